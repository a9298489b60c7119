"""Stores: the trunks of fixed views, kept in memory or on disk, so that the backbone's pass is paid once per view.

A store holds one row per view of an image: the keys and values of every block, and the feature that `head` tasks read.
Rows are computed in a fixed order and in fixed groups, so a store that was cut off and continued holds the same bits
as one that was not. On disk it is a folder named by its key, a digest of everything that decides its content:

store.json    what it holds, for people
trunks.bin    rows × (L, 2, H, N, A/H), memory-mapped
features.bin  rows × D float32, memory-mapped
done.bin      one byte per row: 0 not yet, 1 stored; written only after the row itself is on disk
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.loading import Loader
from vit_memory.data.transforms import Training, view_size
from vit_memory.errors import TrainingError
from vit_memory.families.roles import Original
from vit_memory.files.atomic import write_atomic
from vit_memory.parallel import FEWEST, PieceThreads
from vit_memory.trunk import RoomPerThread, Trunk, run_trunk
from vit_memory.user_cache import user_cache_folder

CacheMode = Literal["auto", "ram", "disk", "off"]
CacheDtype = Literal["float16", "bfloat16", "float32"]
_FORMAT = "vit-memory-store/1"
_RAM_SHARE, _DISK_SHARE = 0.5, 0.5  # of what is free, that `auto` takes
_MOST_RAM, _MOST_DISK = 0.85, 0.95  # of what is free, that is refused beyond
_SETTLE_S = 5.0  # between two times that rows are brought to disk and marked: syncing each group costs as much as it
_AT_ONCE = 80 * 2**20  # bytes of trunks
_STORED_AT_ONCE = 16  # images that one thread computes rows of: the same everywhere, as the last bits depend on it
_GATHERED = 16  # rows of a block that are gathered before they are cast: few enough to stay in the processor's cache
_TRUNKS, _FEATURES, _DONE = "trunks.bin", "features.bin", "done.bin"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cache:
    """Whether and how trunks are kept."""

    mode: CacheMode = "auto"
    dtype: CacheDtype = "float16"
    folder: Path | None = None  # of disk stores; None: see default_folder

    def __post_init__(self) -> None:
        for name, choices in (("mode", get_args(CacheMode)), ("dtype", get_args(CacheDtype))):
            if getattr(self, name) not in choices:
                raise TrainingError(f"cache {name} is {getattr(self, name)!r}; expected {', '.join(choices)}.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """What rows are kept in."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def place(self) -> Path:
        """Where disk stores lie."""
        return self.folder or default_folder()


def default_folder() -> Path:
    """Where disk stores lie unless told: the user's cache, which may be emptied at any time."""
    return user_cache_folder() / "trunks"


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


def decide(cache: Cache, need: int, held: int, visits: int, rows: int) -> Literal["ram", "disk", "off"]:
    """Where `need` bytes go. Refuses with the numbers what was asked for and does not fit; `auto` takes what fits.

    `held` of them are on disk already, `visits` is how often some row of the `rows` will be asked for.
    """
    memory, disk = free_memory(), free_disk(cache.place) + held
    numbers = f"{size(need)} of trunks ({rows} views in {cache.dtype}); free: {size(memory)} memory, {size(disk)} disk"
    remedy = "Fewer --views, a smaller --cache-dtype, or --cache off, which computes every view when it is needed."
    if cache.mode == "ram" and need > _MOST_RAM * memory:
        raise TrainingError(f"memory does not hold {numbers}. {remedy}")
    if cache.mode == "disk" and need > _MOST_DISK * disk:
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
    elif need <= _DISK_SHARE * disk:
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
        self.folder: Path | None = cache.place / self._key()[:32]
        self.need = self.shape.bytes(self.rows, self.dtype)
        self._rooms = RoomPerThread()
        self._position = torch.zeros(len(loader.split), dtype=torch.long)
        self._position[self.places] = torch.arange(len(places))

    @property
    def held(self) -> int:
        """Bytes of it that are on disk already."""
        found = self.folder.glob("*.bin") if self.folder is not None else ()
        return sum(512 * getattr(file.stat(), "st_blocks", 0) for file in found)

    def open(self, *, disk: bool) -> "Store":
        """Take the room it needs."""
        rows = self.rows
        self.folder = self.folder if disk else None
        sizes = (rows * math.prod(self.shape.row), rows * self.shape.width, rows)
        kinds = (self.dtype, torch.float32, torch.uint8)
        if self.folder is None:
            flat = [torch.empty(n, dtype=kind) for n, kind in zip(sizes, kinds, strict=True)]
            flat[2].zero_()
        else:
            flat = self._map(self.folder, sizes, kinds)
        self._trunks = flat[0].view(rows, *self.shape.row)
        self._features = flat[1].view(rows, self.shape.width)
        self._done = flat[2]
        return self

    def _key(self) -> str:
        told = {
            "format": _FORMAT,
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
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / name for name in (_TRUNKS, _FEATURES, _DONE)]
        wanted = [n * kind.itemsize for n, kind in zip(sizes, kinds, strict=True)]
        if any(not file.exists() or file.stat().st_size != length for file, length in zip(files, wanted, strict=True)):
            files[2].unlink(missing_ok=True)
            for file, length in zip(files, wanted, strict=True):
                with file.open("wb") as made:
                    made.truncate(length)
        about = {
            "format": _FORMAT,
            "backbone": self.backbone.name,
            "images": len(self.places),
            "views": self.views,
            "kept_in": str(self.dtype),
            "first image": self.loader.split.images.name(0),
        }
        write_atomic(folder / "store.json", [json.dumps(about, indent=2, ensure_ascii=False).encode(), b"\n"])
        return [
            torch.from_file(str(file), shared=True, size=n, dtype=kind)
            for file, n, kind in zip(files, sizes, kinds, strict=True)
        ]

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
        with _locked(self.folder):
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
        trunk = run_trunk(backbone.roles, backbone.check_images(images.to(backbone.device)), room=self._rooms.room)
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
        self._flush(_TRUNKS, _FEATURES)
        self._done[torch.cat(unsettled)] = 1
        self._flush(_DONE)
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
        return nullcontext() if self.folder is None else (self.folder / _TRUNKS).open("rb")

    def _announce(self, file: BinaryIO | None, rows: Tensor) -> None:
        """Say that rows will be read soon."""
        if file is None or not hasattr(os, "posix_fadvise"):  # not on macOS or Windows, which read when they are asked
            return
        length = math.prod(self.shape.row) * self.dtype.itemsize
        for row in rows.tolist():
            os.posix_fadvise(file.fileno(), row * length, length, os.POSIX_FADV_WILLNEED)

    def trunk(self, rows: Tensor) -> Trunk:
        """Rows as a trunk, cast and placed for the backbone; it holds until the next is made."""
        device, dtype, shape = self.backbone.device, self.backbone.dtype, self.shape
        each = shape.row[2:]  # the keys, or values, of one block: a line of the table below
        keys, values = (
            tuple(self._rooms.room.take((name, i), (len(rows), *each), dtype, device) for i in range(shape.blocks))
            for name in ("keys", "values")
        )
        table = self._trunks.view(-1, math.prod(each))
        for part in parts(len(rows), _GATHERED):
            lines = rows[part] * (2 * shape.blocks)
            gathered = self._rooms.room.take("gathered", (len(lines), table.shape[1]), table.dtype, table.device)
            for i in range(shape.blocks):
                for j, kept in enumerate((keys, values)):
                    torch.index_select(table, 0, lines + (2 * i + j), out=gathered)
                    kept[i][part].copy_(gathered.view(-1, *each))
        feature = self._features[rows].to(device, dtype)
        nothing = feature.new_zeros(len(feature), 0, shape.width)  # of the output, only the feature is kept
        return Trunk(keys, values, Original(nothing, feature))


@contextmanager
def _locked(folder: Path | None) -> Iterator[None]:
    """One process fills a store at a time; another waits, and then finds it filled."""
    if folder is None:
        yield
        return
    try:
        import fcntl  # noqa: PLC0415 - not on Windows, where nothing is locked
    except ImportError:
        yield
        return
    with (folder / "store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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


def free_memory() -> int:
    """Bytes that can be taken without pushing others out: the system's, or the container's if that is less."""
    free = 2**62
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    elif hasattr(os, "sysconf"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def free_disk(folder: Path) -> int:
    """Bytes free where the folder is or would be."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


def size(count: int) -> str:
    """Bytes for a person."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
