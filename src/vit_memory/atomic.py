"""Files and folders that appear whole or not at all, also after a crash, a kill or a full disk."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vit_memory.errors import FileError


def write_atomic(path: Path, chunks: Iterable[bytes]) -> None:
    """Write `chunks` to a temporary file beside `path`, sync it to the disk, and rename it to `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    except OSError as error:
        raise FileError(f"{path}: cannot be written, {error.strerror}. Nothing was changed.") from error
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o666 & ~_umask())  # mkstemp makes files for the owner alone
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise FileError(f"{path}: cannot be written, {error.strerror}. The old file, if any, is unchanged.") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path, *, last: str) -> Iterator[Path]:
    """A temporary folder to write into; when the block ends without an error, its content becomes that of `target`.

    `target` is a new or an empty folder. A new one appears by one rename. An empty one may be somebody's working
    directory or a mounted disk, so it stays, and the content is moved into it, the file `last` at the end.
    """
    check_empty(target)
    exists = target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = target if exists else target.parent
        partial = Path(tempfile.mkdtemp(dir=place, prefix=f".{target.name}.", suffix=".partial"))
    except OSError as error:
        raise FileError(f"{target}: cannot be written, {error.strerror}. Nothing was changed.") from error
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())  # mkdtemp makes folders for the owner alone
        if exists:
            for entry in sorted(partial.iterdir(), key=lambda entry: entry.name == last):
                entry.rename(target / entry.name)
        else:
            partial.rename(target)
        _sync_folder(place)
    except OSError as error:
        raise FileError(f"{target}: cannot be written, {error.strerror}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_empty(folder: Path) -> None:
    """Raise FileError unless `folder` is new or empty. Remains of an interrupted `new_folder` do not count."""
    if folder.exists() and (not folder.is_dir() or not all(_is_partial(entry) for entry in folder.iterdir())):
        raise FileError(f"{folder}: is not an empty folder; give another name.")


def _is_partial(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """Without this, a power cut may undo the rename. Not every system can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
