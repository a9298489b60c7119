"""A store: the rows of fixed views (`row_formats.py`), kept in memory or on disk: the backbone runs once per view.

Rows are computed in a fixed order and in fixed batches, so a store that was interrupted and continued holds the same
bits as one that was not. `store_format.py` describes the files.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict

import torch
from torch import Tensor

from vit_memory.atomic import write_atomic
from vit_memory.backbone import Backbone
from vit_memory.buffers import ThreadBuffers
from vit_memory.data.loading import Loader
from vit_memory.data.transforms import EvalTransform, TrainTransform, view_size
from vit_memory.parallel import ChunkThreads
from vit_memory.training.batch_plan import PlannedBatch
from vit_memory.training.cache import Cache
from vit_memory.training.locks import UseMark, exclusive, remove_stale_marks
from vit_memory.training.row_formats import RowFormat, TrunkRows, row_bytes
from vit_memory.training.store_format import ABOUT, FORMAT, KEY_LENGTH
from vit_memory.training.store_tensors import StoreTensors
from vit_memory.training.stores import lock_stores, make_space
from vit_memory.training.sweep import Encoding
from vit_memory.training.trunk_shape import even_slices

_TRANSFORM_WORDS = {EvalTransform: "Evaluation", TrainTransform: "Training"}  # in keys, which must not change
_FLUSH_EVERY_S = 5.0  # flushing after each batch would cost as much time as computing it
_COMPUTED_AT_ONCE = 16  # images per thread: the same on every machine, as the last bits depend on it
log = logging.getLogger(__name__)


class TrunkStore:
    """The rows of one loader's views. Open it, fill it, then read batches from it."""

    def __init__(
        self,
        backbone: Backbone,
        loader: Loader,
        views: int,
        seed: int,
        cache: Cache,
        indices: Sequence[int],
        stored: RowFormat | None = None,
    ) -> None:
        """`indices` are the images of the split that are stored: all, or those of this process.

        `stored` is what is kept of a view, a plain trunk by default.
        """
        self.backbone, self.loader, self.views, self.seed, self.indices = backbone, loader, views, seed, list(indices)
        self.rows = views * len(indices)
        self.stored = stored or TrunkRows(backbone, view_size(loader.transform.preprocessing))
        self.dtype = cache.torch_dtype
        self.folder = cache.stores_folder / self._key()[:KEY_LENGTH]  # used on disk only
        self.limit = cache.limit
        self.bytes = self.rows * row_bytes(self.stored, self.dtype)
        self.tensors: StoreTensors | None = None  # once it is open
        self._use_mark: UseMark | None = None
        self._buffers = ThreadBuffers()
        self._position = torch.zeros(len(loader.split), dtype=torch.long)
        self._position[self.indices] = torch.arange(len(indices))

    def _key(self) -> str:
        content = {
            "format": FORMAT,
            "backbone": self.backbone.fingerprint,
            "computed_in": str(self.backbone.dtype),
            "kept_in": str(self.dtype),
            "transform": [_TRANSFORM_WORDS[type(self.loader.transform)], asdict(self.loader.transform)],
            "images": hashlib.sha256(b"".join(self.loader.split.digests)).hexdigest(),
            "places": self.indices if len(self.indices) < len(self.loader.split) else "all",
            "views": [self.views, self.seed if isinstance(self.loader.transform, TrainTransform) else 0],
            "group": [self.loader.batch_size, _COMPUTED_AT_ONCE],
            **self.stored.key,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------- open and close

    def reserve(self) -> None:
        """If it is on disk already, keep other processes from removing it until it is closed."""
        if self.folder.exists():
            with lock_stores(self.folder.parent):
                self._mark_in_use()

    def open(self, *, disk: bool) -> "TrunkStore":
        """Take the space it needs; on disk, the least recently used stores that no process uses are removed for it."""
        if not disk:
            self.tensors = StoreTensors.in_memory(self.rows, self.stored.parts, self.dtype)
            return self
        with lock_stores(self.folder.parent):
            make_space(self.folder.parent, self.folder, self.bytes, self.limit)
            self._mark_in_use()
            self._describe()
            self.tensors = StoreTensors.on_disk(self.folder, self.rows, self.stored.parts, self.dtype)
        return self

    def close(self) -> None:
        """Other processes may remove it from now on. Its tensors stay valid in this process."""
        if self._use_mark is not None:
            with suppress(OSError):
                os.utime(self.folder / ABOUT)  # its time is that of its last use
            self._use_mark.release()
            self._use_mark = None

    def _mark_in_use(self) -> None:
        if self._use_mark is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_stale_marks(self.folder)
            self._use_mark = UseMark(self.folder)

    def _describe(self, left_out: int = 0) -> None:
        about = {
            "format": FORMAT,
            "backbone": self.backbone.name,
            "images": len(self.indices),
            "views": self.views,
            "kept_in": str(self.dtype),
            "views_left_out": left_out,
            "first image": self.loader.split.images.name(0),
        }
        text = json.dumps(about, indent=2, ensure_ascii=False)
        # A file name that is not UTF-8 is written escaped.
        write_atomic(self.folder / ABOUT, [text.encode(errors="backslashreplace"), b"\n"])

    def _open_tensors(self) -> StoreTensors:
        assert self.tensors is not None, "open the store first"
        return self.tensors

    # ---------------------------------------------------------------------------------------------------------- write

    def fill(
        self,
        on_progress: Callable[[int], None] = lambda rows: None,
        check_stop: Callable[[], None] = lambda: None,
        threads: ChunkThreads | None = None,
    ) -> None:
        """Compute the rows that are missing. `check_stop` is called between batches and may raise."""
        tensors = self._open_tensors()
        # One process fills a store at a time; the others wait, and then find it filled.
        with nullcontext() if tensors.folder is None else exclusive(tensors.folder / "store.lock", check_stop):
            missing = [batch for batch in self._batches() if not bool(tensors.done[self._rows(*batch)].all())]
            present = self.rows - sum(len(batch.indices) for batch in missing)
            threads = threads or ChunkThreads(self.backbone.device, 1)
            self._compute(missing, lambda computed: on_progress(present + computed), check_stop, threads)
            left_out = self.rows - int(tensors.done.sum())
            if tensors.folder is not None and left_out:
                self._describe(left_out)
        if present:
            log.info("%d of %d views were stored already", present, self.rows)

    def _batches(self) -> list[PlannedBatch]:
        """All rows. A batch with a missing row is computed whole: the last bits of a row depend on its batch."""
        size = self.loader.batch_size
        return [
            PlannedBatch(view, self.indices[first : first + size])
            for view in range(self.views)
            for first in range(0, len(self.indices), size)
        ]

    def _compute(
        self,
        batches: Sequence[PlannedBatch],
        on_progress: Callable[[int], None],
        check_stop: Callable[[], None],
        threads: ChunkThreads,
    ) -> None:
        tensors, computed = self._open_tensors(), 0
        unmarked: list[Tensor] = []
        flushed = time.monotonic()
        try:
            for planned, batch in zip(batches, self.loader.planned(batches, self.seed), strict=True):
                check_stop()
                if len(batch.indices):
                    rows = self._rows(planned.view, batch.indices)
                    slices = even_slices(len(rows), _COMPUTED_AT_ONCE)
                    threads.map(self._compute_rows, [(batch.images[part], rows[part]) for part in slices])
                    unmarked.append(rows)
                if time.monotonic() - flushed > _FLUSH_EVERY_S:
                    tensors.mark_done(unmarked)
                    unmarked.clear()
                    flushed = time.monotonic()
                computed += len(planned.indices)
                on_progress(computed)
        finally:
            tensors.mark_done(unmarked)

    @torch.no_grad()
    def _compute_rows(self, images_and_rows: tuple[Tensor, Tensor]) -> None:
        images, rows = images_and_rows
        backbone, tensors = self.backbone, self._open_tensors()
        limit = largest_finite(backbone.dtype, self.dtype)
        images = backbone.check_images(images.to(backbone.device))
        for computed in self.stored.compute(images, self._buffers.pool):
            table = tensors.parts[computed.part]
            values = computed.values.to("cpu", table.dtype)
            # A value beyond the dtype's range would become infinity, which spoils every reader. The cast comes first:
            # in the backbone's dtype the limit itself may round up to a value that is out of range.
            float32 = self.stored.parts[computed.part].float32
            place: tuple[Tensor | int, ...] = (rows, *computed.place)
            table[place] = values if float32 else values.clamp_(-limit, limit)

    def _rows(self, view: int, indices: Sequence[int] | Tensor) -> Tensor:
        return view * len(self.indices) + self._position[torch.as_tensor(indices, dtype=torch.long)]

    # ----------------------------------------------------------------------------------------------------------- read

    def batches(self, plan: Iterable[PlannedBatch]) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of each planned batch without bad images, and their indices in the split.

        While the caller computes, the system reads the next batch from disk.
        """
        tensors = self._open_tensors()
        with tensors.read_ahead() as prefetch:
            previous = None
            for view, planned in plan:
                indices = torch.as_tensor(planned, dtype=torch.long)
                rows = self._rows(view, indices)
                stored = tensors.done[rows] == 1
                prefetch(rows)
                if previous is not None:
                    yield previous
                previous = rows[stored], indices[stored]
            if previous is not None:
                yield previous

    def encoding(self, rows: Tensor) -> Encoding:
        """Rows as what settings read, in the backbone's dtype, on its device."""
        return self.stored.assemble(self._open_tensors().parts, rows, self._buffers.pool)


def largest_finite(computed: torch.dtype, stored: torch.dtype) -> float:
    """The largest value of the dtype `stored` that is finite when it is cast back to the dtype `computed`."""
    bound = min(torch.finfo(computed).max, torch.finfo(stored).max)
    nearest = float(torch.tensor(bound, dtype=stored))
    # float16's 65504 is 65536 in bfloat16, where the next value below is 65280.
    return nearest if nearest <= bound else nearest * (1 - torch.finfo(stored).eps / 2)
