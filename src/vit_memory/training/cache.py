"""Whether trunks are kept, where, and in which precision; `auto` chooses by the space that is free."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from vit_memory.choices import CacheDtype, CacheMode, Storage
from vit_memory.errors import TrainingError
from vit_memory.training.sizes import free_memory, size
from vit_memory.training.stores import DiskSpace, default_folder

_AUTO_RAM, _AUTO_DISK = 0.5, 0.5  # share of the free space that `auto` uses at most
_MAX_RAM = 0.85  # share of the free memory beyond which `ram` is refused
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cache:
    """Whether and how trunks are kept: `fit(…, options=TrainingOptions(cache=Cache("disk")))`.

    "ram" and "disk" raise TrainingError if the trunks do not fit. "auto" keeps them in memory or on disk if they fit
    and are used more than once, "off" computes each trunk when a step needs it.
    """

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
        """The dtype of stored keys and values."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def stores_folder(self) -> Path:
        """The folder of all disk stores."""
        return self.folder or default_folder()


def choose_storage(cache: Cache, need: int, space: DiskSpace, reads: int, rows: int) -> Storage:
    """Where `need` bytes of trunks go. Raises TrainingError if the requested storage has no room for them.

    `reads` is how many rows the training reads in total, `rows` how many there are.
    """
    memory = free_memory()
    numbers = f"{size(need)} of trunks ({rows} views in {cache.dtype}); free: {size(memory)} memory, {space}"
    if cache.mode == "auto":
        return _choose_automatically(need, memory, space, reads > rows, numbers)
    remedy = "Use fewer --views, a smaller --cache-dtype, or --cache off, which computes every view when it is needed."
    if cache.mode == "ram" and need > _MAX_RAM * memory:
        raise TrainingError(f"memory does not hold {numbers}. {remedy}")
    if cache.mode == "disk" and need > space.allowed:
        raise TrainingError(
            f"the limit of {cache.stores_folder} does not allow {numbers}. Raise --cache-limit. {remedy}"
        )
    if cache.mode == "disk" and not space.holds(need):
        raise TrainingError(f"{cache.stores_folder} does not hold {numbers}. {remedy}")
    if cache.mode != "off":
        log.info("storing %s", numbers)
    return cache.mode


def _choose_automatically(need: int, memory: int, space: DiskSpace, read_again: bool, numbers: str) -> Storage:
    if not read_again:
        log.info("no view is used twice: nothing is stored")
        return "off"
    storage: Storage = "off"
    if need <= _AUTO_RAM * memory:
        storage = "ram"
    elif need <= _AUTO_DISK * space.disk and need <= space.allowed:
        storage = "disk"
    decision = "nothing is stored: there is no room for" if storage == "off" else f"storing in {storage}"
    log.info("%s %s", decision, numbers)
    return storage
