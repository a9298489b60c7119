"""Several processes behind one address: started, watched, started again if they die, and ended together.

All accept from one socket, so the system spreads connections over them. If no worker has ever been ready and one dies,
the server ends: the next would die too. Later, the others go on while one is started again and again, with a pause. A
worker whose parent was killed ends itself instead of holding the address.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import FrameType
from typing import TypeVar

from vit_memory.errors import ServingError

Plan = TypeVar("Plan")
Work = Callable[[Plan, socket.socket, Callable[[], None]], None]  # calls the last one when it answers requests
_LOOK_EVERY_S = 0.2
_PAUSE_S = 5.0  # between the starts of workers that die before they are ready
_READY = "ready"
_context = get_context("spawn")  # a copy of a process with threads would inherit locks that nobody releases
log = logging.getLogger(__name__)


class _Worker:
    """A process, and the pipe by which each side learns that the other has ended."""

    def __init__(self, work: Work[Plan], plan: Plan, listener: socket.socket) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(work, plan, listener, theirs), daemon=False)
        self.process.start()
        theirs.close()
        self._ready = False
        self._started = time.monotonic()

    def was_ready(self) -> bool:
        """Whether it ever answered requests; also after its end."""
        try:
            while not self._ready and self._pipe.poll():
                self._ready = self._pipe.recv() == _READY
        except (EOFError, OSError):  # it has ended without a word
            pass
        return self._ready

    def failed_just_now(self) -> bool:
        """Whether it was started a moment ago and never ready: another one would fail at once for the same reason."""
        return not self.was_ready() and time.monotonic() < self._started + _PAUSE_S

    def close(self) -> None:
        """Wait for its end."""
        self.process.join()
        self._pipe.close()


def run_workers(work: Work[Plan], plan: Plan, listener: socket.socket, count: int) -> None:
    """Run `work` in `count` processes until SIGTERM or SIGINT; returns when all have ended."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    workers = [_Worker(work, plan, listener) for _ in range(count)]
    served, failed = False, False
    while not failed and not stop.wait(_LOOK_EVERY_S):
        served = served or any(worker.was_ready() for worker in workers)
        for i, worker in enumerate(workers):
            if worker.process.is_alive() or (served and worker.failed_just_now()):
                continue
            if not served:
                failed = True
                break
            log.error("worker %s died (exit code %s); starting another", worker.process.pid, worker.process.exitcode)
            worker.close()
            workers[i] = _Worker(work, plan, listener)
    for worker in workers:
        if worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.close()
    if failed:
        raise ServingError("a worker ended before any was ready; its log says why.")


def end_on_signals() -> None:
    """End with exit code 0 at SIGTERM and Ctrl-C.

    While a server runs, uvicorn has its own handlers; it raises the signal again when it has answered everything.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _run(work: Work[Plan], plan: Plan, listener: socket.socket, parent: Connection) -> None:
    end_on_signals()

    def watch_parent() -> None:
        try:
            parent.recv()
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch_parent, name="parent", daemon=True).start()
    work(plan, listener, lambda: parent.send(_READY))
