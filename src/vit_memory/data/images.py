"""Images before decoding: files, arrays, or rows of a table, by index.

These values are pickled for worker processes, so large ones (arrays, tables) are shared or opened there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vit_memory.data.digests import content_digest, file_digest, file_digests
from vit_memory.errors import BadImage


class Images(Protocol):
    """A sequence of images that are not decoded yet."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str:
        """The name of image i in messages: a path, or a file and a row."""

    def read(self, i: int) -> bytes | np.ndarray:
        """The encoded file, or pixels (H, W[, C]). Raises BadImage."""

    def digest(self, i: int) -> bytes:
        """Eight bytes computed from the content alone."""

    def select(self, indices: Sequence[int]) -> "Images":
        """The images with these indices, in this order."""


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
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise BadImage(self.paths[i], f"cannot be read ({_reason(error)})") from error

    def digest(self, i: int) -> bytes:
        """The digest of the whole file."""
        return file_digest(self.paths[i])

    def select(self, indices: Sequence[int]) -> "ImageFiles":
        """The files with these indices."""
        return ImageFiles(tuple(self.paths[i] for i in indices))


@dataclass(frozen=True, slots=True, eq=False)
class ImageArray:
    """Pixels in one array (n, H, W[, C])."""

    source: str
    pixels: np.ndarray
    rows: np.ndarray  # int64, the rows of `pixels` in use

    @classmethod
    def whole(cls, source: str, pixels: np.ndarray) -> "ImageArray":
        """All images of an array."""
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
        """The digest of all pixels."""
        return content_digest(np.ascontiguousarray(self.read(i)).data)

    def select(self, indices: Sequence[int]) -> "ImageArray":
        """The images with these indices, in the same array."""
        return ImageArray(self.source, self.pixels, self.rows[np.asarray(indices, dtype=np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Encoded images in a column of a table, in the format of Hugging Face datasets: {bytes, path}."""

    source: str
    column: Any  # column[i] -> {"bytes": bytes | None, "path": str | None}
    rows: np.ndarray  # int64, the rows of `column` in use
    folder: Path = field(default=Path())  # base of relative paths

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, i: int) -> str:
        """Source and row."""
        return f"{self.source} row {self.rows[i]}"

    def read(self, i: int) -> bytes:
        """The bytes in the cell, or of the file that it refers to."""
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
                    self.name(i), f"refers to {cell['path']}, which cannot be read ({_reason(error)})"
                ) from error
        raise BadImage(self.name(i), "has no image bytes")

    def digest(self, i: int) -> bytes:
        """The digest of the encoded file, or of the row's name if it cannot be read."""
        try:
            encoded = self.read(i)
        except BadImage:
            return content_digest(b"unreadable\0" + self.name(i).encode("utf-8", "surrogatepass"))
        return content_digest(encoded)

    def select(self, indices: Sequence[int]) -> "ImageRows":
        """The images with these indices, in the same table."""
        return ImageRows(self.source, self.column, self.rows[np.asarray(indices, dtype=np.int64)], self.folder)


def digests(images: Images) -> tuple[bytes, ...]:
    """Every image's digest. Those of files are cached between commands and computed by several threads."""
    if isinstance(images, ImageFiles):
        return file_digests(images.paths)
    return tuple(images.digest(i) for i in range(len(images)))


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
