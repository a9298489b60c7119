"""The rows of a store as tensors, in memory or mapped from the files that `store_format.py` describes."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vit_memory.training.row_formats import RowPart
from vit_memory.training.store_format import DONE


@dataclass(frozen=True, slots=True, eq=False)
class StoreTensors:
    """The rows of a store, in memory or mapped from its files."""

    parts: Mapping[str, Tensor]  # (rows, …) by file name
    done: Tensor  # (rows,) uint8
    folder: Path | None = None  # None: in memory

    @classmethod
    def in_memory(cls, rows: int, parts: Mapping[str, RowPart], dtype: torch.dtype) -> "StoreTensors":
        """Space for so many rows, none of them done."""
        tensors = {name: torch.empty(rows, *part.shape, dtype=_dtype(part, dtype)) for name, part in parts.items()}
        return cls(tensors, torch.zeros(rows, dtype=torch.uint8))

    @classmethod
    def on_disk(cls, folder: Path, rows: int, parts: Mapping[str, RowPart], dtype: torch.dtype) -> "StoreTensors":
        """Map the files of a folder. If any is missing or has another size, all of them start empty."""
        dtypes = {**{name: _dtype(part, dtype) for name, part in parts.items()}, DONE: torch.uint8}
        shapes = {**{name: part.shape for name, part in parts.items()}, DONE: ()}
        lengths = {name: rows * math.prod(shape) for name, shape in shapes.items()}
        _create_files([folder / name for name in shapes], [lengths[name] * dtypes[name].itemsize for name in shapes])
        tensors = {
            name: torch.from_file(str(folder / name), shared=True, size=lengths[name], dtype=dtypes[name]).view(
                rows, *shape
            )
            for name, shape in shapes.items()
        }
        done = tensors.pop(DONE)
        return cls(tensors, done, folder)

    def mark_done(self, rows: Sequence[Tensor]) -> None:
        """Mark rows as done after flushing them to disk: after a power cut, a row that is marked is complete."""
        if not rows:
            return
        self._flush(*self.parts)
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
        with ExitStack() as opened:
            files = [
                (opened.enter_context((self.folder / name).open("rb")).fileno(), part[0].nbytes if len(part) else 0)
                for name, part in self.parts.items()
            ]

            def prefetch(rows: Tensor) -> None:
                for row in rows.tolist():
                    for file, length in files:
                        os.posix_fadvise(file, row * length, length, os.POSIX_FADV_WILLNEED)

            yield prefetch


def _dtype(part: RowPart, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if part.float32 else dtype


def _create_files(files: Sequence[Path], sizes: Sequence[int]) -> None:
    """Files of exactly these sizes, with holes for what is not written yet. Existing files that fit are kept."""
    if all(file.exists() and file.stat().st_size == size for file, size in zip(files, sizes, strict=True)):
        return
    for file in reversed(files):  # never truncated: a process that has the old file mapped would be killed
        file.unlink(missing_ok=True)
    for file, size in zip(files, sizes, strict=True):
        with file.open("wb") as empty:
            empty.truncate(size)
