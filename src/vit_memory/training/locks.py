"""File locks between processes: exclusive locks, and marks that a folder is in use.

The system releases a file lock when the process that holds it ends, even by a kill.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_CHECK_STOP_EVERY_S = 0.5
_PROBE_S = 0.1  # a process that probes a lock holds it for an instant
_MARK = "in-use-{}-{}.lock"
log = logging.getLogger(__name__)


@contextmanager
def exclusive(path: Path, check_stop: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file. While waiting for it, `check_stop` is called now and then and may raise."""
    lock = FileLock(path, thread_local=False)
    waiting = False
    while True:
        try:
            lock.acquire(timeout=_CHECK_STOP_EVERY_S)
            break
        except Timeout:
            if not waiting:
                log.info("waiting for another process that holds %s", path)
            waiting = True
            if check_stop is not None:
                check_stop()
    try:
        yield
    finally:
        lock.release()


class UseMark:
    """Marks a folder as in use by this process until the mark is released or the process ends."""

    def __init__(self, folder: Path) -> None:
        # A process may use one folder twice, so the process id alone is not unique.
        self.path = folder / _MARK.format(os.getpid(), secrets.token_hex(4))
        self._lock = FileLock(self.path, thread_local=False)
        self._lock.acquire()

    def release(self) -> None:
        """Remove the mark. May be called again."""
        self._lock.release()
        self.path.unlink(missing_ok=True)


def users(folder: Path) -> tuple[int, ...]:
    """The ids of the processes that use a folder."""
    marks = [path for path in folder.glob(_MARK.format("*", "*")) if _held(path)]
    return tuple(sorted({int(path.name.split("-")[2]) for path in marks}))


def _held(path: Path) -> bool:
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=_PROBE_S)
    except Timeout:
        return True
    except OSError:  # a lock of another user: assume that it is held
        return path.exists()
    lock.release()
    return False


def remove_stale_marks(folder: Path) -> None:
    """Remove the marks of processes that were killed. Only while no other process can add a mark."""
    for path in folder.glob(_MARK.format("*", "*")):
        if not _held(path):
            path.unlink(missing_ok=True)
