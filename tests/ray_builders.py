"""Commands that start a Ray of their own, and what is left of one afterwards, for the tests with Ray."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import vit_memory

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
START_S = 240  # of Ray, Serve and two replicas on a busy machine
SOURCES = str(Path(vit_memory.__file__).parents[1])


class RayCommand:
    """A running command, its log, and every process that it has started."""

    def __init__(self, process, log, temporary):
        self.process, self._log, self.temporary = process, log, temporary

    def log(self):
        return self._log.read_text(errors="replace")

    def events(self):
        """The command's own lines; those of replicas have Ray's prefix."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{") and line.endswith("}")]

    def wait(self, condition, seconds=START_S):
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log()[-3000:]
            assert time.monotonic() < end, self.log()[-3000:]
            time.sleep(0.05)

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def files_with(self, text):
        """Files of Ray, its logs among them, that hold a text."""
        found = []
        for path in Path(self.temporary).rglob("*"):
            if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes():
                found.append(path.name)
        return found


def alive(processes, seconds=30):
    """The processes that still live after so long."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


def end_all(processes):
    """Wait for the end of processes, and bring it about."""
    for one in alive(processes, 10):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    assert alive(processes) == []


@contextmanager
def ray_environment():
    """An environment whose processes have a Ray of their own, in a folder of its own."""
    temporary = tempfile.mkdtemp(prefix="vm-ray-", dir="/tmp")  # short: it holds sockets
    environment = {**os.environ, "PYTHONPATH": SOURCES, "RAY_TMPDIR": temporary}
    environment.pop("RAY_ADDRESS", None)
    try:
        yield environment
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def started(log, *words, **variables):
    """A command with a Ray of its own; nothing of it outlives the block."""
    command = [sys.executable, "-m", "vit_memory", *map(str, words)]
    with ray_environment() as environment:
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env={**environment, **variables})
        running = RayCommand(process, log, environment["RAY_TMPDIR"])
        try:
            yield running
        finally:
            family = running.family() if process.poll() is None else []
            process.kill()
            process.wait()
            end_all(family)
