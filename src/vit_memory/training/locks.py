"""Locks between processes: one may change a thing at a time, and any number may use it meanwhile.

All are locks of files, which the system releases when the process that holds them ends, however it ends.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_ASK_EVERY_S = 0.5
_PROBE_S = 0.1  # another process may hold a lock for an instant, to see whether it is held
_MARK = "in-use-{}-{}.lock"
log = logging.getLogger(__name__)


@contextmanager
def exclusive(path: Path, stop: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file. While another holds it, `stop` is called now and then and may raise."""
    lock = FileLock(path, thread_local=False)
    waiting = False
    while True:
        try:
            lock.acquire(timeout=_ASK_EVERY_S)
            break
        except Timeout:
            if not waiting:
                log.info("waiting for another process, which holds %s", path)
            waiting = True
            if stop is not None:
                stop()
    try:
        yield
    finally:
        lock.release()


class UseMark:
    """Marks a folder as in use by this process until it is released, or the process ends."""

    def __init__(self, folder: Path) -> None:
        # A process may use one folder twice, so the process number alone would not do.
        self.path = folder / _MARK.format(os.getpid(), secrets.token_hex(4))
        self._lock = FileLock(self.path, thread_local=False)
        self._lock.acquire()

    def release(self) -> None:
        """The folder may be removed from now on, as far as this mark is concerned. May be called again."""
        self._lock.release()
        self.path.unlink(missing_ok=True)


def users(folder: Path) -> tuple[int, ...]:
    """The numbers of the processes that use a folder."""
    marks = [path for path in folder.glob(_MARK.format("*", "*")) if _held(path)]
    return tuple(sorted({int(path.name.split("-")[2]) for path in marks}))


def _held(path: Path) -> bool:
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=_PROBE_S)
    except Timeout:
        return True
    except OSError:  # of another user: nothing is known, so nothing may be removed
        return path.exists()
    lock.release()
    return False


def remove_stale_marks(folder: Path) -> None:
    """Remove what processes that were killed left behind. Only while no process can be marking the folder."""
    for path in folder.glob(_MARK.format("*", "*")):
        if not _held(path):
            path.unlink(missing_ok=True)
