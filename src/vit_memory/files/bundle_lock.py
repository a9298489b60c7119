"""A lock for whoever changes a bundle: commands and servers that change one folder at once wait for one another.

The system releases it when the process that holds it ends, even by a kill. Reading needs no lock: a change replaces
`bundle.json` by a rename.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from vit_memory.errors import FileError
from vit_memory.files.manifest import MANIFEST

LOCK = ".bundle.lock"
_WAIT_S = 30.0  # a change takes milliseconds, but an import of many large files may be under way


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Hold the lock of a bundle; FileError if another process holds it for long. Nothing without a bundle to change."""
    if not (folder / MANIFEST).exists():  # opening it will say what is missing
        yield
        return
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=_WAIT_S)
    except Timeout:
        raise FileError(
            f"{folder}: another process has been changing this bundle for {_WAIT_S:g} s. Try again, or end it."
        ) from None
    except OSError as error:
        raise FileError(f"{folder}: cannot be changed, {error.strerror}.") from error
    try:
        yield
    finally:
        lock.release()
