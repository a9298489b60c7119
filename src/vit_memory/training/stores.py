"""All stores of a folder: list them, measure the space they take, remove the least recently used.

A store is a folder named by its key, 32 hexadecimal digits (`store_format.py` describes its files). A process that
opens, creates or removes a store holds the lock of the folder above. Every process that uses a store leaves a mark in
it (`locks.py`), and a store in use is never removed. A store is renamed before it is deleted, so that an interrupted
removal leaves nothing that looks like a store.
"""

import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_memory.errors import FileError, TrainingError
from vit_memory.training.locks import exclusive, remove_stale_marks, users
from vit_memory.training.sizes import disk_size, free_disk, size
from vit_memory.training.store_format import ABOUT, DONE, KEY_LENGTH, TRUNKS
from vit_memory.user_cache import user_cache_folder

MAX_DISK = 0.95  # share of the space on disk beyond which a store is refused
_DEFAULT_LIMIT, _DEFAULT_SHARE = 50 * 10**9, 0.25
_STORE_NAME = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")
_REMOVED_NAME = re.compile(rf"removed-[0-9a-f]{{{KEY_LENGTH}}}-[0-9a-f]{{8}}")
log = logging.getLogger(__name__)


def default_folder() -> Path:
    """Where stores are by default: the user's cache, which may be emptied at any time."""
    return user_cache_folder() / "trunks"


def default_limit(root: Path) -> int:
    """How many bytes all stores of a folder may take by default: 50 GB, or a quarter of a smaller disk."""
    return min(_DEFAULT_LIMIT, int(_DEFAULT_SHARE * disk_size(root)))


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One store of a folder, as it is on disk."""

    folder: Path
    bytes: int  # on disk now
    full_bytes: int  # on disk once every view is stored
    last_used: float  # seconds since 1970
    users: tuple[int, ...]  # ids of the processes that use it
    backbone: str
    images: int
    views: int  # of every image
    precision: str
    rows: int  # views of all images
    rows_stored: int
    rows_left_out: int  # views of images that cannot be read

    @property
    def complete(self) -> bool:
        """Whether every row is stored or belongs to an unreadable image."""
        return self.rows > 0 and self.rows_stored + self.rows_left_out >= self.rows

    @property
    def name(self) -> str:
        """The first digits of the key."""
        return self.folder.name[:8]


def list_stores(root: Path) -> list[StoreInfo]:
    """Every store of a folder, the least recently used first. Changes nothing."""
    stores = []
    for folder in root.iterdir() if root.is_dir() else ():
        if _STORE_NAME.fullmatch(folder.name) and any((folder / name).exists() for name in (ABOUT, TRUNKS, DONE)):
            try:
                stores.append(_read_store(folder))
            except FileNotFoundError:  # another process has just removed it
                continue
    return sorted(stores, key=lambda store: (store.last_used, store.folder.name))


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
        _int(about.get("images")),
        _int(about.get("views")),
        str(about.get("kept_in", "unknown")).removeprefix("torch."),
        len(done),
        done.count(1),
        _int(about.get("views_left_out")),
    )


def _read_about(folder: Path) -> dict[str, Any]:
    """The content of store.json, or {} if it is damaged: the store can still be listed and removed."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def bytes_on_disk(folder: Path) -> int:
    """Bytes that a store takes now. Its files have full length from the start, with holes for missing rows."""
    stats = [path.stat() for path in folder.glob("*.bin")]
    return sum(512 * stat.st_blocks if hasattr(stat, "st_blocks") else stat.st_size for stat in stats)


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space for certain wanted stores in a folder, in bytes."""

    free: int  # on the disk, minus what other stores in use have not written yet
    own: int  # already taken by the wanted stores
    unused: int  # of other stores that no process uses; they can be removed
    in_use: int  # of other stores that are in use, once they are complete
    limit: int  # of all stores together

    @property
    def disk(self) -> int:
        """How large the wanted stores may be by the space on disk."""
        return max(0, self.free + self.own + self.unused)

    @property
    def allowed(self) -> int:
        """How large the wanted stores may be by the limit."""
        return max(0, self.limit - self.in_use)

    def holds(self, need: int) -> bool:
        """Whether wanted stores of so many bytes fit, if unused ones are removed."""
        return need <= MAX_DISK * self.disk and need <= self.allowed

    def __str__(self) -> str:
        text = f"{size(self.disk)} disk; limit of all stores: {size(self.limit)}"
        return f"{text}, of which other trainings use {size(self.in_use)}" if self.in_use else text


def disk_space(root: Path, wanted: Collection[Path], limit: int | None) -> DiskSpace:
    """The space for the stores with these folders. Changes nothing."""
    return _space(root, list_stores(root), wanted, limit)


def _space(root: Path, stores: Sequence[StoreInfo], wanted: Collection[Path], limit: int | None) -> DiskSpace:
    others = [store for store in stores if store.folder not in wanted]
    growing = sum(max(0, store.full_bytes - store.bytes) for store in others if store.users)
    return DiskSpace(
        free=free_disk(root) - growing,
        own=sum(store.bytes for store in stores if store.folder in wanted),
        unused=sum(store.bytes for store in others if not store.users),
        in_use=sum(max(store.full_bytes, store.bytes) for store in others if store.users),
        limit=default_limit(root) if limit is None else limit,
    )


@contextmanager
def lock_stores(root: Path) -> Iterator[None]:
    """Hold the lock of a folder of stores, to open, create or remove them. Interrupted removals are completed first."""
    with ExitStack() as held:
        try:
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(root / "stores.lock"))
        except OSError as error:
            raise FileError(
                f"{root}: stores cannot be kept here, {error.strerror}. Use another --cache-dir."
            ) from error
        for folder in root.iterdir():
            if _REMOVED_NAME.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        yield


def make_space(root: Path, folder: Path, need: int, limit: int | None) -> None:
    """Remove unused stores, the least recently used first, until the store in `folder` has space for `need` bytes.

    If that would not be enough, removes nothing and raises TrainingError. Only inside `lock_stores`.
    """
    stores = list_stores(root)
    space = _space(root, stores, [folder], limit)
    free, unused = space.free + space.own, space.unused
    removable = [store for store in stores if not store.users and store.folder != folder] if space.holds(need) else []
    while not (need <= MAX_DISK * free and need + unused <= space.allowed):
        if not removable:
            raise TrainingError(
                f"{root} has no room for {size(need)} of trunks; free: {space}. "
                f"Use a larger --cache-limit, fewer --views, or --cache off, which stores nothing."
            )
        store = removable.pop(0)
        reason = remove_store(store)
        if reason is not None:
            log.warning("%s: cannot be removed to make room, %s", store.folder, reason)
            continue
        log.info("removed a store of %s to make room: %s", size(store.bytes), describe(store))
        free, unused = free + store.bytes, unused - store.bytes


def remove_store(store: StoreInfo) -> str | None:
    """Remove a store; returns the reason if it cannot be removed. Only inside `lock_stores`."""
    remove_stale_marks(store.folder)
    if using := users(store.folder):
        return f"in use by process {', '.join(map(str, using))}"
    renamed = store.folder.with_name(f"removed-{store.folder.name}-{secrets.token_hex(4)}")
    try:
        store.folder.rename(renamed)
    except OSError as error:
        return str(error.strerror)
    shutil.rmtree(renamed, ignore_errors=True)  # what this leaves is removed by the next `lock_stores`
    return None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Which stores of a folder were removed, and which were kept."""

    removed: tuple[StoreInfo, ...]
    kept: tuple[tuple[StoreInfo, str], ...]  # with the reason

    @property
    def bytes(self) -> int:
        """Bytes that were freed."""
        return sum(store.bytes for store in self.removed)


def clear_stores(root: Path, *, older_than_days: float | None = None, dry_run: bool = False) -> Cleared:
    """Remove the stores of a folder that no process uses: all, or those last used more than so many days ago."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    if not any(_STORE_NAME.fullmatch(name) or _REMOVED_NAME.fullmatch(name) for name in names):
        return Cleared((), ())  # leave no lock file in a folder without stores
    removed: list[StoreInfo] = []
    kept: list[tuple[StoreInfo, str]] = []
    with lock_stores(root):
        for store in list_stores(root):
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
