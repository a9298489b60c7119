"""The stores of a folder: which there are, how much room they take, and which of them go when room is needed.

A store is a folder named by its key, 32 hexadecimal digits (`cache.py` says what lies in it). Whoever opens, makes or
removes one holds the lock of the folder above. A store in use carries the mark of every process that uses it
(`locks.py`) and is never removed. One that is removed loses its name first, so that no half of it is taken for a store.
"""

import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_memory.errors import FileError, TrainingError
from vit_memory.training.locks import exclusive, remove_stale_marks, users
from vit_memory.training.space import disk_size, free_disk, size
from vit_memory.user_cache import user_cache_folder

FORMAT = "vit-memory-store/1"
ABOUT, TRUNKS, FEATURES, DONE = "store.json", "trunks.bin", "features.bin", "done.bin"
KEY_LENGTH = 32
MOST_DISK = 0.95  # of the room on disk: what needs more is refused
_DEFAULT_LIMIT, _DEFAULT_SHARE = 50 * 10**9, 0.25
_STORE_NAME = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")
_REMOVED_NAME = re.compile(rf"removed-[0-9a-f]{{{KEY_LENGTH}}}-[0-9a-f]{{8}}")
log = logging.getLogger(__name__)


def default_folder() -> Path:
    """Where stores lie unless told: the user's cache, which may be emptied at any time."""
    return user_cache_folder() / "trunks"


def default_limit(place: Path) -> int:
    """How many bytes all stores of a folder may take unless told: 50 GB, or a quarter of a smaller disk."""
    return min(_DEFAULT_LIMIT, int(_DEFAULT_SHARE * disk_size(place)))


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One store of a folder, as it is found on disk."""

    folder: Path
    bytes: int  # on disk now
    full_bytes: int  # on disk once every view is stored
    last_used: float  # seconds since 1970
    users: tuple[int, ...]  # numbers of the processes that use it
    backbone: str
    images: int
    views: int  # of every image
    precision: str
    rows: int  # views of all images
    rows_stored: int
    rows_left_out: int  # views of images that cannot be read

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compute."""
        return self.rows > 0 and self.rows_stored + self.rows_left_out >= self.rows

    @property
    def name(self) -> str:
        """Enough of the key to tell stores apart."""
        return self.folder.name[:8]


def list_stores(place: Path) -> list[StoreInfo]:
    """Every store of a folder, the least recently used first. Changes nothing."""
    found = []
    for folder in place.iterdir() if place.is_dir() else ():
        if _STORE_NAME.fullmatch(folder.name) and any((folder / name).exists() for name in (ABOUT, TRUNKS, DONE)):
            try:
                found.append(_read_store(folder))
            except FileNotFoundError:  # another process has just removed it
                continue
    return sorted(found, key=lambda store: (store.last_used, store.folder.name))


def _read_store(folder: Path) -> StoreInfo:
    about, done = _read_about(folder), b""
    if (folder / DONE).exists():
        done = (folder / DONE).read_bytes()
    described = folder / ABOUT if (folder / ABOUT).exists() else folder
    full = sum(path.stat().st_size for path in folder.glob("*.bin"))
    return StoreInfo(
        folder,
        bytes_on_disk(folder),
        full,
        described.stat().st_mtime,
        users(folder),
        str(about.get("backbone", "unknown")),
        _whole(about.get("images")),
        _whole(about.get("views")),
        str(about.get("kept_in", "unknown")).removeprefix("torch."),
        len(done),
        done.count(1),
        _whole(about.get("views_left_out")),
    )


def _read_about(folder: Path) -> dict[str, Any]:
    """What the store says of itself, or nothing where that is damaged: it can be listed and removed all the same."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def bytes_on_disk(folder: Path) -> int:
    """What a store takes now. Its files have their full length from the start, with holes for what is not stored."""
    stats = [path.stat() for path in folder.glob("*.bin")]
    return sum(512 * stat.st_blocks if hasattr(stat, "st_blocks") else stat.st_size for stat in stats)


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """What a folder of stores has room for, as seen by those who want certain stores in it. All in bytes."""

    free: int  # on the disk, less what other stores in use have yet to write
    own: int  # that the wanted stores take already
    unused: int  # of other stores that nobody uses, which can be removed
    in_use: int  # of other stores that are in use, once they are full
    limit: int  # of all stores together

    @property
    def disk(self) -> int:
        """What the wanted stores could take if only the disk counted."""
        return max(0, self.free + self.own + self.unused)

    @property
    def allowed(self) -> int:
        """What the wanted stores could take if only the limit counted."""
        return max(0, self.limit - self.in_use)

    def holds(self, need: int) -> bool:
        """Whether so many bytes of wanted stores fit, others removed if need be."""
        return need <= MOST_DISK * self.disk and need <= self.allowed

    def __str__(self) -> str:
        text = f"{size(self.disk)} disk; limit of all stores: {size(self.limit)}"
        return f"{text}, of which other trainings use {size(self.in_use)}" if self.in_use else text


def disk_room(place: Path, wanted: Collection[Path], limit: int | None) -> DiskRoom:
    """How much room there is for the wanted stores, given by their folders. Changes nothing."""
    return _room(place, list_stores(place), wanted, limit)


def _room(place: Path, stores: Sequence[StoreInfo], wanted: Collection[Path], limit: int | None) -> DiskRoom:
    others = [store for store in stores if store.folder not in wanted]
    growing = sum(max(0, store.full_bytes - store.bytes) for store in others if store.users)
    return DiskRoom(
        free=free_disk(place) - growing,
        own=sum(store.bytes for store in stores if store.folder in wanted),
        unused=sum(store.bytes for store in others if not store.users),
        in_use=sum(max(store.full_bytes, store.bytes) for store in others if store.users),
        limit=default_limit(place) if limit is None else limit,
    )


@contextmanager
def changing(place: Path, stop: Callable[[], None] | None = None) -> Iterator[None]:
    """While this process opens, makes or removes stores of a folder; what another left half removed goes first."""
    with ExitStack() as held:
        try:
            place.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(place / "stores.lock", stop))
        except OSError as error:
            raise FileError(
                f"{place}: stores cannot be kept here, {error.strerror}. Give another --cache-dir."
            ) from error
        for folder in place.iterdir():
            if _REMOVED_NAME.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        yield


def make_room(place: Path, folder: Path, need: int, limit: int | None) -> None:
    """Remove unused stores until one in `folder` may take `need` bytes, the least recently used first.

    Removes nothing, and raises TrainingError, where that would not be enough. Only inside `changing`.
    """
    stores = list_stores(place)
    room = _room(place, stores, [folder], limit)
    free, unused = room.free + room.own, room.unused
    removable = [store for store in stores if not store.users and store.folder != folder] if room.holds(need) else []
    while not (need <= MOST_DISK * free and need + unused <= room.allowed):
        if not removable:
            raise TrainingError(
                f"{place} has no room for {size(need)} of trunks; room: {room}. "
                f"Give a larger --cache-limit, fewer --views, or --cache off, which stores nothing."
            )
        store = removable.pop(0)
        reason = remove_store(store)
        if reason is not None:
            log.warning("%s: cannot be removed to make room, %s", store.folder, reason)
            continue
        log.info("removed a store of %s to make room: %s", size(store.bytes), describe(store))
        free, unused = free + store.bytes, unused - store.bytes


def remove_store(store: StoreInfo) -> str | None:
    """Remove a store, or say why it has to stay. Only inside `changing`."""
    remove_stale_marks(store.folder)
    if using := users(store.folder):
        return f"in use by process {', '.join(map(str, using))}"
    nameless = store.folder.with_name(f"removed-{store.folder.name}-{secrets.token_hex(4)}")
    try:
        store.folder.rename(nameless)
    except OSError as error:
        return str(error.strerror)
    shutil.rmtree(nameless, ignore_errors=True)  # what this leaves goes when `changing` is entered again
    return None


@dataclass(frozen=True, slots=True)
class Cleared:
    """What became of the stores of a folder."""

    removed: tuple[StoreInfo, ...]
    kept: tuple[tuple[StoreInfo, str], ...]  # with the reason

    @property
    def bytes(self) -> int:
        """What was freed."""
        return sum(store.bytes for store in self.removed)


def clear_stores(place: Path, *, older_than_days: float | None = None, dry_run: bool = False) -> Cleared:
    """Remove the stores of a folder that nobody uses: all, or those last used more than so many days ago."""
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    if not any(_STORE_NAME.fullmatch(name) or _REMOVED_NAME.fullmatch(name) for name in names):
        return Cleared((), ())  # without leaving a lock in a folder that is none of ours
    removed: list[StoreInfo] = []
    kept: list[tuple[StoreInfo, str]] = []
    with changing(place):
        for store in list_stores(place):
            days = (time.time() - store.last_used) / 86400
            if older_than_days is not None and days <= older_than_days:
                reason: str | None = f"last used {days:.1f} days ago"
            elif store.users:
                reason = f"in use by process {', '.join(map(str, store.users))}"
            else:
                reason = None if dry_run else remove_store(store)
            if reason is None:
                removed.append(store)
            else:
                kept.append((store, reason))
    return Cleared(tuple(removed), tuple(kept))


def describe(store: StoreInfo) -> str:
    """What a store holds, in a few words."""
    views = f"{store.views} view{'' if store.views == 1 else 's'}"
    return f"{store.name}, {store.images} images × {views} by {store.backbone} in {store.precision}"
