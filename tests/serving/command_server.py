"""`vit-memory serve` in a process of its own, with its log."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil

START_S = 120  # importing torch on a busy machine


class Server:
    """A running command."""

    def __init__(self, process, log):
        self.process, self._log = process, log

    def log(self):
        return self._log.read_text()

    def events(self):
        return [json.loads(line) for line in self.log().splitlines(keepends=True) if line.endswith("\n")]

    def count(self, name):
        return sum(event["event"] == name for event in self.events())

    @property
    def url(self):
        return next(event["url"] for event in self.events() if event["event"] == "listening")

    def ready(self, workers=1):
        wait(
            lambda: sum(event["event"] == "ready" for event in self.events()) >= workers or self.process.poll(), START_S
        )
        assert self.process.poll() is None, self.log()
        return self

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def started(tmp_path, *words, **variables):
    log = tmp_path / f"log-{time.monotonic()}"
    command = [sys.executable, "-m", "vit_memory", "serve", *map(str, words), "--port", "0", "--log-format", "json"]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1", **variables})
    try:
        yield Server(process, log)
    finally:
        for child in [*psutil.Process(process.pid).children()] if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def wait(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
