"""The rows of a store as tensors, in memory or mapped from the files that `store_format.py` describes."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vit_memory.training.store_format import DONE, FEATURES, TRUNKS
from vit_memory.training.trunk_shape import TrunkShape


@dataclass(frozen=True, slots=True, eq=False)
class StoreTensors:
    """The rows of a store, in memory or mapped from its files."""

    trunks: Tensor  # (rows, L, 2, H, N, D/H): keys and values of every block
    features: Tensor  # (rows, 2, D) float32: what `head` tasks read, and the patch mean
    done: Tensor  # (rows,) uint8
    folder: Path | None = None  # None: in memory

    @classmethod
    def in_memory(cls, rows: int, shape: TrunkShape, dtype: torch.dtype) -> "StoreTensors":
        """Space for so many rows, none of them done."""
        trunks = torch.empty(rows, *shape.row, dtype=dtype)
        return cls(trunks, torch.empty(rows, 2, shape.width), torch.zeros(rows, dtype=torch.uint8))

    @classmethod
    def on_disk(cls, folder: Path, rows: int, shape: TrunkShape, dtype: torch.dtype) -> "StoreTensors":
        """Map the files of a folder. If any is missing or has another size, all of them start empty."""
        dtypes = (dtype, torch.float32, torch.uint8)
        lengths = (rows * math.prod(shape.row), rows * 2 * shape.width, rows)
        files = [folder / name for name in (TRUNKS, FEATURES, DONE)]
        _create_files(files, [n * each.itemsize for n, each in zip(lengths, dtypes, strict=True)])
        trunks, features, done = (
            torch.from_file(str(file), shared=True, size=n, dtype=each)
            for file, n, each in zip(files, lengths, dtypes, strict=True)
        )
        return cls(trunks.view(rows, *shape.row), features.view(rows, 2, shape.width), done, folder)

    def mark_done(self, rows: Sequence[Tensor]) -> None:
        """Mark rows as done after flushing them to disk: after a power cut, a row that is marked is complete."""
        if not rows:
            return
        self._flush(TRUNKS, FEATURES)
        self.done[torch.cat(list(rows))] = 1
        self._flush(DONE)

    def _flush(self, *names: str) -> None:
        if self.folder is None:
            return
        for name in names:
            descriptor = os.open(self.folder / name, os.O_RDWR)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @contextmanager
    def read_ahead(self) -> Iterator[Callable[[Tensor], None]]:
        """Gives a function that asks the system to read rows from disk, in the background, before they are needed."""
        if self.folder is None or not hasattr(os, "posix_fadvise"):  # macOS and Windows have no such call
            yield lambda rows: None
            return
        length = self.trunks[0].nbytes if len(self.trunks) else 0
        with (self.folder / TRUNKS).open("rb") as file:

            def prefetch(rows: Tensor) -> None:
                for row in rows.tolist():
                    os.posix_fadvise(file.fileno(), row * length, length, os.POSIX_FADV_WILLNEED)

            yield prefetch


def _create_files(files: Sequence[Path], sizes: Sequence[int]) -> None:
    """Files of exactly these sizes, with holes for what is not written yet. Existing files that fit are kept."""
    if all(file.exists() and file.stat().st_size == size for file, size in zip(files, sizes, strict=True)):
        return
    for file in reversed(files):  # never truncated: a process that has the old file mapped would be killed
        file.unlink(missing_ok=True)
    for file, size in zip(files, sizes, strict=True):
        with file.open("wb") as empty:
            empty.truncate(size)
