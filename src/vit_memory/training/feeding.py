"""Batches for training: computed live from images, or read from a store.

Every epoch has an order of its own, drawn from the seed, and a view: its number, or, where the views are fixed, its
number among them. Both sources give the same images in the same steps; a store only takes the backbone's pass away.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, Protocol

import torch
from torch import Tensor

from vit_memory.data.loading import Batch, Loader
from vit_memory.data.transforms import view_size
from vit_memory.errors import TrainingError
from vit_memory.parallel import FEWEST, PieceThreads, pieces
from vit_memory.training.cache import Cache, Shape, Store, decide
from vit_memory.training.crew import Crew
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import REGIMES
from vit_memory.training.stores import disk_room
from vit_memory.training.sweep import Seen, Sweep

Group = tuple[int, list[int]]  # the places of one batch, and the view they are seen in
_STORED_BYTES = 720 * 2**20
_HELD = 16  # numbers, in widths, that the graph of one class token holds per block
GROUP = 64  # images that are judged, or whose views are stored, at a time
_PLANNED = 256  # batches handed to the workers at once, so that a long training is not one long list


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A piece of a batch that one thread computes."""

    load: Callable[[], Seen]  # computes or gathers what the settings read; called in that thread
    targets: Tensor  # (b,) or (b, C)
    indices: Tensor  # (b,) places in the split


class Feed(Protocol):
    """What the loop asks for."""

    kind: Literal["ram", "disk", "off"]
    precision: str  # what trunks are kept in, or "live"

    def prepare(
        self, report: Callable[[int, int], None], check_stop: Callable[[], None], threads: PieceThreads
    ) -> None:
        """Whatever takes time before the first step. `report` is told views done and to do, `check_stop` may raise."""

    def steps(self, start: int, threads: int) -> Iterator[Sequence[Chunk]]:
        """From step number `start` to the last, each in chunks for so many threads."""

    def validation(self, threads: int) -> Iterator[Sequence[Chunk]]:
        """All validation images."""


class Live:
    """Every view is computed when it is needed."""

    kind: Literal["ram", "disk", "off"] = "off"
    precision = "live"

    def __init__(self, sweep: Sweep, train: Loader, judge: Loader, crew: Crew) -> None:
        self.sweep, self.train, self.judge, self.crew = sweep, train, judge, crew
        self.shape = Shape.of(sweep.backbone, view_size(train.transform.preprocessing))

    def prepare(
        self, report: Callable[[int, int], None], check_stop: Callable[[], None], threads: PieceThreads
    ) -> None:
        """Nothing."""

    def steps(self, start: int, threads: int) -> Iterator[Sequence[Chunk]]:
        """Batches by the workers, each image passing the backbone when its chunk is computed."""
        recipe = self.sweep.recipe
        plan = plan_steps(len(self.train.split), recipe, start, self.crew)
        while groups := list(islice(plan, _PLANNED)):
            for batch in self.train.planned(groups, recipe.seed):
                yield self._chunks(batch, threads)

    def validation(self, threads: int) -> Iterator[Sequence[Chunk]]:
        """Without augmentation."""
        for batch in self.judge.batches(self.crew.share(len(self.judge.split))):
            yield self._chunks(batch, threads)

    def _chunks(self, batch: Batch, threads: int) -> Sequence[Chunk]:
        most = chunk_of(self.sweep, self.shape, threads, stored=False)
        return [
            Chunk(partial(self._look, batch.images[part]), batch.targets[part], batch.indices[part])
            for part in pieces(len(batch.indices), threads, most)
        ]

    def _look(self, images: Tensor) -> Seen:
        backbone = self.sweep.backbone
        return self.sweep.look(backbone.check_images(images.to(backbone.device)))


class Stored:
    """Every view is computed once, before the first step."""

    def __init__(self, sweep: Sweep, train: Store, judge: Store, kind: Literal["ram", "disk"], crew: Crew) -> None:
        self.sweep, self.train, self.judge, self.crew = sweep, train, judge, crew
        self.kind: Literal["ram", "disk", "off"] = kind
        self.precision = str(train.dtype)

    def hold(self) -> None:
        """Keep other processes from removing what is on disk already."""
        if self.kind == "disk":
            for store in (self.train, self.judge):
                store.hold()

    def close(self) -> None:
        """Let other processes remove what is on disk."""
        for store in (self.train, self.judge):
            store.close()

    def prepare(
        self, report: Callable[[int, int], None], check_stop: Callable[[], None], threads: PieceThreads
    ) -> None:
        """Fill the stores."""
        total, done = self.train.rows + self.judge.rows, 0
        try:
            for store in (self.train, self.judge):
                store.open(disk=self.kind == "disk")
                store.fill(partial(_told, report, done, total), check_stop, threads)
                done += store.rows
        except BaseException:
            self.close()
            raise

    def steps(self, start: int, threads: int) -> Iterator[Sequence[Chunk]]:
        """Rows of the store, turned into trunks a chunk at a time. The stores are closed once nobody asks for more."""
        recipe = self.sweep.recipe
        plan = plan_steps(len(self.train.loader.split), recipe, start, self.crew)
        most = chunk_of(self.sweep, self.train.shape, threads, stored=True)
        try:
            for rows, places in self.train.take(plan):
                yield stored_chunks(self.train, rows, places, threads, most)
        finally:
            self.close()

    def validation(self, threads: int) -> Iterator[Sequence[Chunk]]:
        """The one view of every validation image."""
        own = self.judge.places
        for rows, places in self.judge.take((0, own[i : i + GROUP]) for i in range(0, len(own), GROUP)):
            yield stored_chunks(self.judge, rows, places, threads, GROUP)


def feed(
    sweep: Sweep,
    train: Loader,
    judge: Loader,
    cache: Cache,
    crew: Crew,
    decided: Callable[[str], None],
) -> Feed:
    """Live or stored, as the cache says and the regimes, the views and the room allow."""
    recipe = sweep.recipe
    storable = all(REGIMES[setting.task.regime].stored for setting in sweep.settings)
    views = recipe.fixed_views
    if cache.mode in ("ram", "disk") and not (storable and views):
        reason = "every epoch has new views. Fix them with --views" if storable else "its regime has no trunk to store"
        raise TrainingError(f"nothing can be stored: {reason}, or leave the cache off.")
    if cache.mode == "off" or not storable or views is None:
        decided("off")
        return Live(sweep, train, judge, crew)
    batch = min(recipe.batch, len(train.split))
    epochs = math.ceil(recipe.steps / math.ceil(len(train.split) / batch))
    with crew.together():
        stores = (
            Store(sweep.backbone, train, min(views, epochs), recipe.seed, cache, crew.share(len(train.split))),
            Store(sweep.backbone, judge, 1, 0, cache, crew.share(len(judge.split))),
        )
        rows = [store.rows for store in stores]
        looks = math.ceil(recipe.steps / recipe.evaluate_every)
        visits = recipe.steps * batch // crew.size + rows[1] * looks
        need = sum(store.need for store in stores)
        room = disk_room(cache.place, [store.folder for store in stores if store.folder], cache.limit)
        wish = decide(cache, need * crew.here, room, visits, sum(rows))
    kind = crew.agreed(wish)
    decided(kind)
    if kind == "off":
        return Live(sweep, train, judge, crew)
    stored = Stored(sweep, *stores, kind, crew)
    with crew.together():  # before any of them makes room, which must not cost another what it is about to open
        stored.hold()
    return stored


def plan_steps(images: int, recipe: Recipe, start: int, crew: Crew) -> Iterator[Group]:
    """The batches of steps `start` to the last; of each, the places that are this process's to look at."""
    size = min(recipe.batch, images)
    per_epoch = math.ceil(images / size)
    for step in range(start, recipe.steps):
        epoch, place = divmod(step, per_epoch)
        if step == start or place == 0:
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
            order = torch.randperm(images, generator=generator).tolist()
        chosen = order[place * size : (place + 1) * size]
        view = epoch if recipe.fixed_views is None else epoch % recipe.fixed_views
        yield view, [i for i in chosen if i % crew.size == crew.rank]


def _told(report: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    report(before + done, total)


def chunk_of(sweep: Sweep, shape: Shape, threads: int, *, stored: bool) -> int:
    """How many images a thread holds at a time: all that fit a bound, for a few long products beat many short ones.

    A stored trunk has no pass beside it; there, what the graph of many settings holds counts too.
    """
    if sweep.recipe.chunk is not None:
        return sweep.recipe.chunk
    dtype = sweep.backbone.dtype
    if not stored:
        return shape.at_once(dtype, threads)
    graph = len(sweep.settings) * shape.blocks * _HELD * shape.width * dtype.itemsize
    return max(FEWEST, _STORED_BYTES // (threads * (shape.bytes(1, dtype) + graph)))


def stored_chunks(store: Store, rows: Tensor, places: Tensor, threads: int, most: int) -> Sequence[Chunk]:
    """Rows of a store in chunks for so many threads, of at most so many images."""
    targets = torch.from_numpy(store.loader.split.targets)
    return [
        Chunk(partial(store.trunk, rows[part]), targets[places[part]], places[part])
        for part in pieces(len(rows), threads, most)
    ]
