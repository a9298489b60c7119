"""Batches for training: computed live from images, or read from a store.

Both sources give the same images in the same steps (`batch_plan.py`); a store only saves the backbone's pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.choices import Storage
from vit_memory.data.loading import Batch, Loader
from vit_memory.data.transforms import view_size
from vit_memory.errors import TrainingError
from vit_memory.parallel import ChunkThreads, chunk_slices
from vit_memory.training.batch_plan import PlannedBatch, epochs, plan_batches
from vit_memory.training.cache import Cache, choose_storage
from vit_memory.training.ranks import Ranks
from vit_memory.training.recipe import Recipe
from vit_memory.training.row_formats import RowFormat
from vit_memory.training.stores import disk_space
from vit_memory.training.sweep import Encoding, Sweep
from vit_memory.training.trunk_shape import TrunkShape
from vit_memory.training.trunk_store import TrunkStore

LOADER_BATCH = 64  # images that are evaluated, or whose views are stored, at a time
_PLANNED_BATCHES = 256  # handed to the loading workers at once, so that a long training is not one long list


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A part of a batch that one thread computes."""

    encode: Callable[[], Encoding]  # computes or reads what the settings read; called in that thread
    targets: Tensor  # (b,) or (b, C)
    indices: Tensor  # (b,) in the split


@dataclass(frozen=True, slots=True, eq=False)
class Loaders:
    """The loaders of one training."""

    train: Loader
    validation: Loader


class BatchSource(Protocol):
    """Where the training loop gets its batches."""

    storage: Storage
    precision: str  # the dtype of stored trunks, or "live"

    def prepare(
        self, on_progress: Callable[[int, int], None], check_stop: Callable[[], None], threads: ChunkThreads
    ) -> None:
        """Work before the first step. `on_progress` receives views done and in total, `check_stop` may raise."""

    def training_batches(self, start: int, threads: int) -> Iterator[Sequence[Chunk]]:
        """The batches from step `start` to the last, each as chunks for so many threads."""

    def validation_batches(self, threads: int) -> Iterator[Sequence[Chunk]]:
        """All validation images."""


class LiveBatches:
    """Every view is computed when it is needed."""

    storage: Storage = "off"
    precision = "live"

    def __init__(self, backbone: Backbone, sweep: Sweep, recipe: Recipe, loaders: Loaders, ranks: Ranks) -> None:
        self.backbone, self.sweep, self.recipe, self.loaders, self.ranks = backbone, sweep, recipe, loaders, ranks
        self.shape = TrunkShape.of(backbone, view_size(loaders.train.transform.preprocessing))

    def prepare(
        self, on_progress: Callable[[int, int], None], check_stop: Callable[[], None], threads: ChunkThreads
    ) -> None:
        """Nothing."""

    def training_batches(self, start: int, threads: int) -> Iterator[Sequence[Chunk]]:
        """Loaded by the workers; each chunk passes the backbone when a thread computes it."""
        train, recipe = self.loaders.train, self.recipe
        plan = plan_batches(len(train.split), recipe, start, self.ranks)
        while planned := list(islice(plan, _PLANNED_BATCHES)):
            for batch in train.planned(planned, recipe.seed):
                yield self._chunks(batch, threads)

    def validation_batches(self, threads: int) -> Iterator[Sequence[Chunk]]:
        """Without augmentation."""
        validation = self.loaders.validation
        for batch in validation.batches(self.ranks.shard(len(validation.split))):
            yield self._chunks(batch, threads)

    def _chunks(self, batch: Batch, threads: int) -> Sequence[Chunk]:
        at_most = self.recipe.chunk or self.sweep.live_chunk(self.shape, threads)
        return [
            Chunk(partial(self._encode, batch.images[part]), batch.targets[part], batch.indices[part])
            for part in chunk_slices(len(batch.indices), threads, at_most)
        ]

    def _encode(self, images: Tensor) -> Encoding:
        return self.sweep.encode(self.backbone.check_images(images.to(self.backbone.device)))


class StoredBatches:
    """Every view is computed once, before the first step."""

    def __init__(
        self, train: TrunkStore, validation: TrunkStore, storage: Storage, sweep: Sweep, recipe: Recipe, ranks: Ranks
    ) -> None:
        self.train, self.validation, self.storage, self.sweep = train, validation, storage, sweep
        self.recipe, self.ranks = recipe, ranks
        self.precision = str(train.dtype)

    def reserve(self) -> None:
        """Keep other processes from removing stores that are on disk already."""
        if self.storage == "disk":
            for store in (self.train, self.validation):
                store.reserve()

    def close(self) -> None:
        """Other processes may remove the stores from now on."""
        for store in (self.train, self.validation):
            store.close()

    def prepare(
        self, on_progress: Callable[[int, int], None], check_stop: Callable[[], None], threads: ChunkThreads
    ) -> None:
        """Fill the stores."""
        train, total = self.train.rows, self.train.rows + self.validation.rows
        disk = self.storage == "disk"
        try:
            self.train.open(disk=disk).fill(lambda rows: on_progress(rows, total), check_stop, threads)
            self.validation.open(disk=disk).fill(lambda rows: on_progress(train + rows, total), check_stop, threads)
        except BaseException:
            self.close()
            raise

    def training_batches(self, start: int, threads: int) -> Iterator[Sequence[Chunk]]:
        """Rows of the store, turned into trunks a chunk at a time. The stores are closed after the last batch."""
        store, recipe = self.train, self.recipe
        plan = plan_batches(len(store.loader.split), recipe, start, self.ranks)
        at_most = recipe.chunk or self.sweep.stored_chunk(store.stored.shape, threads)
        try:
            for rows, indices in store.batches(plan):
                yield stored_chunks(store, rows, indices, threads, at_most)
        finally:
            self.close()

    def validation_batches(self, threads: int) -> Iterator[Sequence[Chunk]]:
        """The one view of every validation image."""
        store, indices = self.validation, self.validation.indices
        plan = (PlannedBatch(0, indices[i : i + LOADER_BATCH]) for i in range(0, len(indices), LOADER_BATCH))
        for rows, batch_indices in store.batches(plan):
            yield stored_chunks(store, rows, batch_indices, threads, LOADER_BATCH)


def stored_chunks(store: TrunkStore, rows: Tensor, indices: Tensor, threads: int, at_most: int) -> Sequence[Chunk]:
    """Rows of a store as chunks for so many threads, each of at most so many images."""
    targets = torch.from_numpy(store.loader.split.targets)
    return [
        Chunk(partial(store.encoding, rows[part]), targets[indices[part]], indices[part])
        for part in chunk_slices(len(rows), threads, at_most)
    ]


def batch_source(
    backbone: Backbone,
    sweep: Sweep,
    recipe: Recipe,
    loaders: Loaders,
    cache: Cache,
    ranks: Ranks,
    on_storage: Callable[[Storage], None],
    datasets: int = 1,
) -> BatchSource:
    """Live or stored, as the cache requests and the regimes, the views and the free space allow.

    Of several datasets that are trained at once, each may use an equal share of the space.
    """
    views = recipe.fixed_views
    stored = sweep.stored_rows(view_size(loaders.train.transform.preprocessing))
    if cache.mode in ("ram", "disk") and not (stored and views):
        reason = "every epoch has new views. Fix them with --views" if stored else "its regime has no trunk"
        raise TrainingError(f"nothing can be stored: {reason}, or use --cache off.")
    if cache.mode == "off" or stored is None or views is None:
        on_storage("off")
        return LiveBatches(backbone, sweep, recipe, loaders, ranks)
    with ranks.fail_together():
        stores = _stores(backbone, stored, recipe, loaders, views, cache, ranks)
        chosen = _choose_storage(stores, recipe, cache, ranks, datasets)
    # A store needs space in every process.
    storage: Storage = "ram" if ranks.all(chosen == "ram") else "disk" if ranks.all(chosen == "disk") else "off"
    on_storage(storage)
    if storage == "off":
        return LiveBatches(backbone, sweep, recipe, loaders, ranks)
    source = StoredBatches(*stores, storage, sweep, recipe, ranks)
    with ranks.fail_together():  # before any process removes stores to make space for its own
        source.reserve()
    return source


def _stores(
    backbone: Backbone,
    stored: RowFormat,
    recipe: Recipe,
    loaders: Loaders,
    views: int,
    cache: Cache,
    ranks: Ranks,
) -> tuple[TrunkStore, TrunkStore]:
    train, validation = loaders.train, loaders.validation
    views = min(views, epochs(len(train.split), recipe))
    return (
        TrunkStore(backbone, train, views, recipe.seed, cache, ranks.shard(len(train.split)), stored),
        TrunkStore(backbone, validation, 1, 0, cache, ranks.shard(len(validation.split)), stored),
    )


def _choose_storage(
    stores: tuple[TrunkStore, TrunkStore], recipe: Recipe, cache: Cache, ranks: Ranks, datasets: int
) -> Storage:
    """What this process would choose by the free space, which it shares with the others on its machine."""
    train, validation = stores
    batch = min(recipe.batch, len(train.loader.split))
    evaluations = math.ceil(recipe.steps / recipe.evaluate_every)
    reads = recipe.steps * batch // ranks.world_size + validation.rows * evaluations
    need = (train.bytes + validation.bytes) * ranks.local_world_size * datasets
    space = disk_space(cache.stores_folder, [store.folder for store in stores], cache.limit)
    return choose_storage(cache, need, space, reads, train.rows + validation.rows)
