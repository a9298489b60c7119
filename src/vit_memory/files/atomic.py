"""Writing a file so that a crash, a kill or a full disk leaves the old one or the new one, never a broken one."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from vit_memory.errors import FileError


def write_atomic(path: Path, chunks: Iterable[bytes]) -> None:
    """Write `chunks` beside `path`, make sure they are on the disk, and only then take the name."""
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


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """Without this a power cut may forget the new name; not every system can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
