"""Stores: the trunks of fixed views, kept in memory or on disk, so that the backbone's pass is paid once per view.

A store holds one row per view of an image: the keys and values of every block, and the feature that `head` tasks read.
Rows are computed in a fixed order and in fixed groups, so a store that was cut off and continued holds the same bits
as one that was not. On disk it is a folder named by its key, a digest of everything that decides its content:

store.json    what it holds, for people
trunks.bin    rows × (L, 2, H, N, A/H), memory-mapped
features.bin  rows × D float32, memory-mapped
done.bin      one byte per row: 0 not yet, 1 stored; written only after the row itself is on disk

The folder above may hold many stores; `stores.py` says how much room they take and which of them go.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.buffers import ThreadBuffers
from vit_memory.data.loading import Loader
from vit_memory.data.transforms import Training, view_size
from vit_memory.errors import TrainingError
from vit_memory.files.atomic import write_atomic
from vit_memory.outputs import Original
from vit_memory.parallel import FEWEST, PieceThreads
from vit_memory.training.locks import UseMark, exclusive, remove_stale_marks
from vit_memory.training.space import free_memory, size
from vit_memory.training.stores import (
    ABOUT,
    DONE,
    FEATURES,
    FORMAT,
    KEY_LENGTH,
    TRUNKS,
    DiskRoom,
    changing,
    default_folder,
    make_room,
)
from vit_memory.trunk import PooledTrunk, run_trunk

CacheMode = Literal["auto", "ram", "disk", "off"]
CacheDtype = Literal["float16", "bfloat16", "float32"]
_RAM_SHARE, _DISK_SHARE = 0.5, 0.5  # of what is free, that `auto` takes
_MOST_RAM = 0.85  # of what is free, that is refused beyond
_SETTLE_S = 5.0  # between two times that rows are brought to disk and marked: syncing each group costs as much as it
_AT_ONCE = 80 * 2**20  # bytes of trunks
_STORED_AT_ONCE = 16  # images that one thread computes rows of: the same everywhere, as the last bits depend on it
_GATHERED = 16  # rows of a block that are gathered before they are cast: few enough to stay in the processor's cache
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cache:
    """Whether and how trunks are kept."""

    mode: CacheMode = "auto"
    dtype: CacheDtype = "float16"
    folder: Path | None = None  # of disk stores; None: see default_folder
    limit: int | None = None  # bytes of all disk stores together; None: see default_limit

    def __post_init__(self) -> None:
        for name, choices in (("mode", get_args(CacheMode)), ("dtype", get_args(CacheDtype))):
            if getattr(self, name) not in choices:
                raise TrainingError(f"cache {name} is {getattr(self, name)!r}; expected {', '.join(choices)}.")
        if self.limit is not None and self.limit < 0:
            raise TrainingError(f"cache limit is {self.limit} bytes; expected 0 or more.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """What rows are kept in."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def place(self) -> Path:
        """Where disk stores lie."""
        return self.folder or default_folder()


@dataclass(frozen=True, slots=True)
class Shape:
    """How much one row holds."""

    blocks: int
    heads: int
    tokens: int
    head_width: int
    width: int

    @classmethod
    def of(cls, backbone: Backbone, size: tuple[int, int]) -> "Shape":
        """Asked of one blank image."""
        image = torch.zeros(1, backbone.roles.channels, *size, device=backbone.device, dtype=backbone.dtype)
        keys = run_trunk(backbone.roles, backbone.check_images(image)).keys
        _, heads, tokens, head_width = keys[0].shape
        return cls(len(keys), heads, tokens, head_width, backbone.width)

    @property
    def row(self) -> tuple[int, ...]:
        """One row of trunks."""
        return (self.blocks, 2, self.heads, self.tokens, self.head_width)

    def at_once(self, dtype: torch.dtype, threads: int) -> int:
        """How many images each of so many threads computes at a time: a step needs about the memory of inference.

        What a block frees is then also small enough for the C allocator to keep for the next (`backbone.py`).
        """
        return max(FEWEST, _AT_ONCE // (threads * self.bytes(1, dtype)))

    def bytes(self, rows: int, dtype: torch.dtype) -> int:
        """What so many rows take."""
        return rows * (math.prod(self.row) * dtype.itemsize + self.width * 4 + 1)


def decide(cache: Cache, need: int, room: DiskRoom, visits: int, rows: int) -> Literal["ram", "disk", "off"]:
    """Where `need` bytes go. Refuses with the numbers what was asked for and does not fit; `auto` takes what fits.

    `visits` is how often some row of the `rows` will be asked for.
    """
    memory = free_memory()
    numbers = f"{size(need)} of trunks ({rows} views in {cache.dtype}); free: {size(memory)} memory, {room}"
    remedy = "Fewer --views, a smaller --cache-dtype, or --cache off, which computes every view when it is needed."
    if cache.mode == "ram" and need > _MOST_RAM * memory:
        raise TrainingError(f"memory does not hold {numbers}. {remedy}")
    if cache.mode == "disk" and need > room.allowed:
        raise TrainingError(f"the limit of {cache.place} does not allow {numbers}. Raise --cache-limit. {remedy}")
    if cache.mode == "disk" and not room.holds(need):
        raise TrainingError(f"{cache.place} does not hold {numbers}. {remedy}")
    if cache.mode != "auto":
        if cache.mode != "off":
            log.info("storing %s", numbers)
        return cache.mode
    if visits <= rows:
        log.info("no view is seen twice: nothing is stored")
        return "off"
    chosen: Literal["ram", "disk", "off"] = "off"
    if need <= _RAM_SHARE * memory:
        chosen = "ram"
    elif need <= _DISK_SHARE * room.disk and need <= room.allowed:
        chosen = "disk"
    log.info("%s %s", "nothing is stored, for there would be" if chosen == "off" else f"storing in {chosen}", numbers)
    return chosen


class Store:
    """The rows of one loader's views. Fill it, then take batches from it."""

    def __init__(
        self, backbone: Backbone, loader: Loader, views: int, seed: int, cache: Cache, places: Sequence[int]
    ) -> None:
        """`places` are those of the split that are kept: all, or this process's share."""
        self.backbone, self.loader, self.views, self.seed, self.places = backbone, loader, views, seed, list(places)
        self.rows = views * len(places)
        self.shape = Shape.of(backbone, view_size(loader.transform.preprocessing))
        self.dtype = cache.torch_dtype
        self.folder: Path | None = cache.place / self._key()[:KEY_LENGTH]
        self.limit = cache.limit
        self.need = self.shape.bytes(self.rows, self.dtype)
        self._mark: UseMark | None = None
        self._buffers = ThreadBuffers()
        self._position = torch.zeros(len(loader.split), dtype=torch.long)
        self._position[self.places] = torch.arange(len(places))

    def hold(self) -> None:
        """If it is on disk already, keep others from removing it until it is closed."""
        if self.folder is not None and self.folder.exists():
            with changing(self.folder.parent):
                self._mark_in_use(self.folder)

    def _mark_in_use(self, folder: Path) -> None:
        if self._mark is None:
            folder.mkdir(parents=True, exist_ok=True)
            remove_stale_marks(folder)
            self._mark = UseMark(folder)

    def close(self) -> None:
        """Say that it is no longer in use. What was taken from it stays valid."""
        if self._mark is not None and self.folder is not None:
            with suppress(OSError):
                os.utime(self.folder / ABOUT)  # its time is that of its last use
            self._mark.release()
            self._mark = None

    def open(self, *, disk: bool) -> "Store":
        """Take the room it needs; on disk, the least recently used stores that nobody uses make way."""
        rows = self.rows
        self.folder = self.folder if disk else None
        sizes = (rows * math.prod(self.shape.row), rows * self.shape.width, rows)
        kinds = (self.dtype, torch.float32, torch.uint8)
        if self.folder is None:
            flat = [torch.empty(n, dtype=kind) for n, kind in zip(sizes, kinds, strict=True)]
            flat[2].zero_()
        else:
            with changing(self.folder.parent):
                make_room(self.folder.parent, self.folder, self.need, self.limit)
                self._mark_in_use(self.folder)
                flat = self._map(self.folder, sizes, kinds)
        self._trunks = flat[0].view(rows, *self.shape.row)
        self._features = flat[1].view(rows, self.shape.width)
        self._done = flat[2]
        return self

    def _key(self) -> str:
        told = {
            "format": FORMAT,
            "backbone": self.backbone.fingerprint,
            "computed_in": str(self.backbone.dtype),
            "kept_in": str(self.dtype),
            "transform": [type(self.loader.transform).__name__, asdict(self.loader.transform)],
            "images": hashlib.sha256(b"".join(self.loader.split.digests)).hexdigest(),
            "places": self.places if len(self.places) < len(self.loader.split) else "all",
            "views": [self.views, self.seed if isinstance(self.loader.transform, Training) else 0],
            "group": [self.loader.batch_size, _STORED_AT_ONCE],
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _map(self, folder: Path, sizes: Sequence[int], kinds: Sequence[torch.dtype]) -> list[Tensor]:
        """Files of exactly these sizes, mapped; a file of another size is begun anew, with all that rests on it."""
        self._describe(folder)
        files = [folder / name for name in (TRUNKS, FEATURES, DONE)]
        wanted = [n * kind.itemsize for n, kind in zip(sizes, kinds, strict=True)]
        if any(not file.exists() or file.stat().st_size != length for file, length in zip(files, wanted, strict=True)):
            for file in reversed(files):  # never cut short: a process that has the old file mapped would be killed
                file.unlink(missing_ok=True)
            for file, length in zip(files, wanted, strict=True):
                with file.open("wb") as made:
                    made.truncate(length)
        return [
            torch.from_file(str(file), shared=True, size=n, dtype=kind)
            for file, n, kind in zip(files, sizes, kinds, strict=True)
        ]

    def _describe(self, folder: Path, left_out: int = 0) -> None:
        about = {
            "format": FORMAT,
            "backbone": self.backbone.name,
            "images": len(self.places),
            "views": self.views,
            "kept_in": str(self.dtype),
            "views_left_out": left_out,
            "first image": self.loader.split.images.name(0),
        }
        text = json.dumps(about, indent=2, ensure_ascii=False)
        # A file name that is no UTF-8 stands there escaped.
        write_atomic(folder / ABOUT, [text.encode(errors="backslashreplace"), b"\n"])

    def fill(
        self,
        report: Callable[[int], None] | None = None,
        stop: Callable[[], None] | None = None,
        threads: PieceThreads | None = None,
    ) -> None:
        """Compute the rows that are not there yet. `report` is told how many are, `stop` may raise between groups."""
        threads = threads or PieceThreads(self.backbone.device, 1)
        size = self.loader.batch_size
        # Groups never reach over a view, and one with a missing row is computed whole: a row's last bits depend on the
        # batch it is computed in.
        groups = [
            (view, self.places[first : first + size])
            for view in range(self.views)
            for first in range(0, len(self.places), size)
        ]
        # One process fills a store at a time; another waits, and then finds it filled.
        with nullcontext() if self.folder is None else exclusive(self.folder / "store.lock", stop):
            missing = [group for group in groups if not bool(self._done[self._rows(*group)].all())]
            ready = done = self.rows - sum(len(places) for _, places in missing)
            unsettled: list[Tensor] = []
            settled = time.monotonic()
            try:
                for group, batch in zip(missing, self.loader.planned(missing, self.seed), strict=True):
                    if stop is not None:
                        stop()
                    if len(batch.indices):
                        unsettled.append(self._put(group[0], batch.images, batch.indices, threads))
                    if time.monotonic() - settled > _SETTLE_S:
                        self._settle(unsettled)
                        settled = time.monotonic()
                    done += len(group[1])
                    if report is not None:
                        report(done)
            finally:
                self._settle(unsettled)
            left_out = self.rows - int(self._done.sum())
            if self.folder is not None and left_out:
                self._describe(self.folder, left_out)
        if ready:
            log.info("%d of %d views were stored already", ready, self.rows)

    def _rows(self, view: int, places: Sequence[int] | Tensor) -> Tensor:
        return view * len(self.places) + self._position[torch.as_tensor(places, dtype=torch.long)]

    def _put(self, view: int, images: Tensor, places: Tensor, threads: PieceThreads) -> Tensor:
        """Compute some rows; returns which."""
        rows = self._rows(view, places)
        work = [(images[part], rows[part]) for part in parts(len(rows), _STORED_AT_ONCE)]
        threads.map(self._put_piece, work)
        return rows

    @torch.no_grad()
    def _put_piece(self, piece: tuple[Tensor, Tensor]) -> None:
        images, rows = piece
        backbone, largest = self.backbone, largest_kept(self.backbone.dtype, self.dtype)
        trunk = run_trunk(backbone.roles, backbone.check_images(images.to(backbone.device)), pool=self._buffers.pool)
        for i, block in enumerate(zip(trunk.keys, trunk.values, strict=True)):
            for j, kept in enumerate(block):
                # Beyond a dtype's range there is only infinity, which would poison every reader. The cast comes
                # first: in the backbone's dtype the limit itself may round up to a value that is out of range.
                self._trunks[rows, i, j] = kept.to("cpu", self.dtype).clamp_(-largest, largest)
        self._features[rows] = trunk.original.feature.float().cpu()

    def _settle(self, unsettled: list[Tensor]) -> None:
        """Mark rows as done, once they are on disk themselves: a power cut may take the last seconds, not the truth."""
        if not unsettled:
            return
        self._flush(TRUNKS, FEATURES)
        self._done[torch.cat(unsettled)] = 1
        self._flush(DONE)
        unsettled.clear()

    def _flush(self, *names: str) -> None:
        for name in names if self.folder is not None else ():
            descriptor = os.open(self.folder / name, os.O_RDWR)  # type: ignore[operator]
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def take(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of each group of places in a view, bad images left out, and their places in the split.

        While the caller computes, the system is asked to read the next group from disk.
        """
        with self._readable() as file:
            ahead = None
            for view, places in groups:
                chosen = torch.as_tensor(places, dtype=torch.long)
                rows = self._rows(view, chosen)
                good = self._done[rows] == 1
                coming = rows[good], chosen[good]
                self._announce(file, rows)
                if ahead is not None:
                    yield ahead
                ahead = coming
            if ahead is not None:
                yield ahead

    def _readable(self) -> AbstractContextManager[BinaryIO | None]:
        return nullcontext() if self.folder is None else (self.folder / TRUNKS).open("rb")

    def _announce(self, file: BinaryIO | None, rows: Tensor) -> None:
        """Say that rows will be read soon."""
        if file is None or not hasattr(os, "posix_fadvise"):  # not on macOS or Windows, which read when they are asked
            return
        length = math.prod(self.shape.row) * self.dtype.itemsize
        for row in rows.tolist():
            os.posix_fadvise(file.fileno(), row * length, length, os.POSIX_FADV_WILLNEED)

    def trunk(self, rows: Tensor) -> PooledTrunk:
        """Rows as a trunk, cast and placed for the backbone."""
        device, dtype, shape = self.backbone.device, self.backbone.dtype, self.shape
        each = shape.row[2:]  # the keys, or values, of one block: a line of the table below
        keys, values = (
            tuple(self._buffers.pool.get((name, i), (len(rows), *each), dtype, device) for i in range(shape.blocks))
            for name in ("keys", "values")
        )
        table = self._trunks.view(-1, math.prod(each))
        for part in parts(len(rows), _GATHERED):
            lines = rows[part] * (2 * shape.blocks)
            gathered = self._buffers.pool.get("gathered", (len(lines), table.shape[1]), table.dtype, table.device)
            for i in range(shape.blocks):
                for j, kept in enumerate((keys, values)):
                    torch.index_select(table, 0, lines + (2 * i + j), out=gathered)
                    kept[i][part].copy_(gathered.view(-1, *each))
        feature = self._features[rows].to(device, dtype)
        nothing = feature.new_zeros(len(feature), 0, shape.width)  # of the output, only the feature is kept
        return PooledTrunk(keys, values, Original(nothing, feature))


def largest_kept(computed: torch.dtype, kept: torch.dtype) -> float:
    """The largest value of the dtype `kept` that is finite when it is cast back to the dtype `computed`."""
    bound = min(torch.finfo(computed).max, torch.finfo(kept).max)
    nearest = float(torch.tensor(bound, dtype=kept))
    # float16's 65504 is 65536 in bfloat16, where the next value below is 65280.
    return nearest if nearest <= bound else nearest * (1 - torch.finfo(kept).eps / 2)


def parts(count: int, most: int) -> Iterator[slice]:
    """`count` images in as few parts of at most `most` as will do, all about as large."""
    size = math.ceil(count / math.ceil(count / most)) if count else 1
    return (slice(i, i + size) for i in range(0, count, size))
