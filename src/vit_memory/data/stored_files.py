"""Files on this machine or at an address, s3://bucket/folder for example: whatever pyarrow or fsspec can open.

A name is a path or an address. An address keeps the form in which it was given, and what lies below it is appended.
Keys and passwords come from the environment, as the storage's own tools read them; in an address they are refused.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vit_memory.atomic import write_atomic
from vit_memory.data.decoding import EXTENSIONS
from vit_memory.data.digests import content_digest
from vit_memory.errors import BadImage, DataError, FileError


def is_address(name: str) -> bool:
    """Whether a name is an address and not a path."""
    return "://" in name


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Images by name: paths, or names below one of `addresses`."""

    names: tuple[str, ...]
    addresses: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        """The path or address."""
        return self.names[i]

    def read(self, i: int) -> bytes:
        """The whole file."""
        name = self.names[i]
        try:
            if not is_address(name):
                return Path(name).read_bytes()
            address = next(one for one in self.addresses if name == one or name.startswith(f"{_root(one)}/"))
            filesystem, base = _opened(address)
            below = "" if name == address else name[len(_root(address)) :]
            with filesystem.open_input_file(base + below) as file:
                content: bytes = file.read()
            return content
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise BadImage(name, f"cannot be read ({reason})") from error

    def digest(self, i: int) -> bytes:
        """The digest of the whole file."""
        return content_digest(self.read(i))

    def select(self, indices: Sequence[int]) -> "StoredFiles":
        """The files with these indices."""
        return StoredFiles(tuple(self.names[i] for i in indices), self.addresses)


def images_at(address: str) -> Iterator[str]:
    """The address of one image, or those of every image below a folder, sorted."""
    import pyarrow.fs

    filesystem, base = open_place(address)
    info = _listed(address, filesystem, base)
    if info.type == pyarrow.fs.FileType.File:
        yield address
        return
    if info.type == pyarrow.fs.FileType.NotFound:
        raise DataError(f"{address}: no such file or folder.")
    files = _listed(address, filesystem, pyarrow.fs.FileSelector(base, recursive=True))
    below = sorted(one.path[len(base) :] for one in files if one.type == pyarrow.fs.FileType.File)
    for path in below:
        if Path(path).suffix.lower() in EXTENSIONS and "/." not in path:
            yield _root(address) + path


@dataclass(frozen=True, slots=True, eq=False)
class StoredFolder:
    """A folder on this machine or at an address, whose files appear whole or not at all."""

    place: str

    def names(self) -> set[str]:
        """The files in it; none if there is no such folder."""
        import pyarrow.fs

        filesystem, base = open_place(self.place)
        files = _listed(self.place, filesystem, pyarrow.fs.FileSelector(base, allow_not_found=True))
        return {one.base_name for one in files}

    def read(self, name: str) -> bytes:
        """One of its files."""
        filesystem, base = open_place(self.place)
        try:
            with filesystem.open_input_file(f"{base}/{name}") as file:
                content: bytes = file.read()
        except OSError as error:
            raise FileError(f"{self.place}/{name}: cannot be read, {error}.") from error
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file under another name first; a process that is killed meanwhile leaves nothing of this name."""
        import pyarrow.fs

        filesystem, base = open_place(self.place)
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            write_atomic(Path(base, name), [content])
            return
        partial = f"{base}/.{name}.{uuid.uuid4().hex}.partial"
        try:
            filesystem.create_dir(base, recursive=True)
            with filesystem.open_output_stream(partial) as file:
                file.write(content)
            filesystem.move(partial, f"{base}/{name}")
        except OSError as error:
            raise FileError(f"{self.place}/{name}: cannot be written, {error}.") from error


def open_place(place: str) -> tuple[Any, str]:
    """A filesystem of pyarrow, and the path in it that a path or an address means."""
    import pyarrow.fs

    if not is_address(place):
        return pyarrow.fs.LocalFileSystem(), str(Path(place).absolute())
    return _opened(place)


@cache
def _opened(address: str) -> tuple[Any, str]:
    import pyarrow
    import pyarrow.fs

    if urlsplit(address).password is not None:
        raise DataError("the address holds a password: leave it out, and give it as the storage's own tools read it.")
    try:
        try:
            filesystem, base = pyarrow.fs.FileSystem.from_uri(address)
        except pyarrow.ArrowInvalid:  # not one of pyarrow's own
            import fsspec.core

            other, base = fsspec.core.url_to_fs(address)
            filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(other))
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{address}: cannot be opened ({error}).") from error
    return filesystem, base.rstrip("/") or base


def _root(address: str) -> str:
    """An address without the options behind its question mark, to append names to."""
    return address.partition("?")[0].rstrip("/")


def _listed(place: str, filesystem: Any, what: Any) -> Any:
    try:
        return filesystem.get_file_info(what)
    except OSError as error:
        raise DataError(f"{place}: cannot be listed ({error}).") from error
