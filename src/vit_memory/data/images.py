"""Where images lie before anyone decodes them: files, arrays, rows of a table. Each says its name and gives its bytes.

All are small values that travel to worker processes; what is large (arrays, tables) is opened there or shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vit_memory.data.digests import content_digest, file_digest, file_digests
from vit_memory.errors import BadImage


class Images(Protocol):
    """A row of images, undecoded."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str:
        """What reports call image i: a path, or a file and a row."""

    def read(self, i: int) -> bytes | np.ndarray:
        """The encoded file, or pixels (H, W[, C]). Raises BadImage."""

    def digest(self, i: int) -> bytes:
        """Eight bytes that follow the content, wherever the image lies."""

    def select(self, which: Sequence[int]) -> "Images":
        """Those images, in that order."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Files by path."""

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, i: int) -> str:
        """The path."""
        return self.paths[i]

    def read(self, i: int) -> bytes:
        """The whole file."""
        try:
            return Path(self.paths[i]).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            raise BadImage(self.paths[i], f"cannot be read ({_reason(error)})") from error

    def digest(self, i: int) -> bytes:
        """Of the whole file."""
        return file_digest(self.paths[i])

    def select(self, which: Sequence[int]) -> "ImageFiles":
        """Those files."""
        return ImageFiles(tuple(self.paths[i] for i in which))


@dataclass(frozen=True, slots=True, eq=False)
class ImageArray:
    """Pixels in one array (n, H, W[, C])."""

    source: str
    pixels: np.ndarray
    rows: np.ndarray  # int64, which of them

    @classmethod
    def whole(cls, source: str, pixels: np.ndarray) -> "ImageArray":
        """All of an array."""
        return cls(source, pixels, np.arange(len(pixels)))

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, i: int) -> str:
        """Source and row."""
        return f"{self.source}[{self.rows[i]}]"

    def read(self, i: int) -> np.ndarray:
        """(H, W[, C])."""
        pixels: np.ndarray = self.pixels[self.rows[i]]
        return pixels

    def digest(self, i: int) -> bytes:
        """From all pixels."""
        return content_digest(np.ascontiguousarray(self.read(i)).data)

    def select(self, which: Sequence[int]) -> "ImageArray":
        """Those rows of the same array."""
        return ImageArray(self.source, self.pixels, self.rows[np.asarray(which, dtype=np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Encoded images in a column of Hugging Face's image style, {bytes, path}, of any indexable table."""

    source: str
    column: Any  # column[i] -> {"bytes": bytes | None, "path": str | None}
    rows: np.ndarray
    folder: Path = field(default=Path())  # what a relative path is relative to

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, i: int) -> str:
        """Source and row."""
        return f"{self.source} row {self.rows[i]}"

    def read(self, i: int) -> bytes:
        """The cell's bytes, or the file it names."""
        cell = self.column[int(self.rows[i])]
        cell = cell.as_py() if hasattr(cell, "as_py") else cell
        encoded = cell.get("bytes") if isinstance(cell, dict) else cell
        if isinstance(encoded, bytes):
            return encoded
        if isinstance(cell, dict) and cell.get("path"):
            try:
                return Path(self.folder, cell["path"]).read_bytes()
            except (OSError, ValueError) as error:
                raise BadImage(
                    self.name(i), f"names {cell['path']}, which cannot be read ({_reason(error)})"
                ) from error
        raise BadImage(self.name(i), "holds no image bytes")

    def digest(self, i: int) -> bytes:
        """The digest of the file it would be."""
        try:
            encoded = self.read(i)
        except BadImage:
            return content_digest(b"unreadable\0" + self.name(i).encode("utf-8", "surrogatepass"))
        return content_digest(encoded)

    def select(self, which: Sequence[int]) -> "ImageRows":
        """Those rows of the same table."""
        return ImageRows(self.source, self.column, self.rows[np.asarray(which, dtype=np.int64)], self.folder)


def digests(images: Images) -> tuple[bytes, ...]:
    """Every image's digest; those of files are remembered from an earlier command, or read by several threads."""
    if isinstance(images, ImageFiles):
        return file_digests(images.paths)
    return tuple(images.digest(i) for i in range(len(images)))


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
