"""What a training eats: for every step, what its settings look at, live from images or from a store.

Every epoch has an order of its own, drawn from the seed, and a view: its number, or, where the views are fixed, its
number among them. Both feeds give the same images in the same steps; a store only takes the backbone's pass away.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Literal, Protocol

import torch
from torch import Tensor

from vit_memory.data.loading import Batch, Loader
from vit_memory.data.transforms import view_size
from vit_memory.errors import TrainingError
from vit_memory.training.cache import FEWEST, Cache, Shape, Store, decide, parts
from vit_memory.training.crew import Crew
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import REGIMES
from vit_memory.training.stores import disk_room
from vit_memory.training.sweep import Seen, Sweep

Piece = tuple[Seen, Tensor]  # what settings look at, and its labels; at most a chunk of images
Group = tuple[int, list[int]]  # the places of one batch, and the view they are seen in
_STORED_BYTES = 720 * 2**20
_HELD = 16  # numbers, in widths, that the graph of one class token holds per block
GROUP = 64  # images that are judged, or whose views are stored, at a time
_PLANNED = 256  # batches handed to the workers at once, so that a long training is not one long list


class Feed(Protocol):
    """What the loop asks for."""

    kind: Literal["ram", "disk", "off"]
    precision: str  # what trunks are kept in, or "live"

    def prepare(self, report: Callable[[int, int], None], check_stop: Callable[[], None]) -> None:
        """Whatever takes time before the first step. `report` is told views done and to do, `check_stop` may raise."""

    def steps(self, start: int) -> Iterator[Iterator[Piece]]:
        """From step number `start` to the last, each in pieces."""

    def validation(self) -> Iterator[Piece]:
        """All validation images."""


class Live:
    """Every view is computed when it is needed."""

    kind: Literal["ram", "disk", "off"] = "off"
    precision = "live"

    def __init__(self, sweep: Sweep, train: Loader, judge: Loader, crew: Crew) -> None:
        self.sweep, self.train, self.judge, self.crew = sweep, train, judge, crew
        shape = Shape.of(sweep.backbone, view_size(train.transform.preprocessing))
        self.chunk = chunk_of(sweep, shape, stored=False)

    def prepare(self, report: Callable[[int, int], None], check_stop: Callable[[], None]) -> None:
        """Nothing."""

    def steps(self, start: int) -> Iterator[Iterator[Piece]]:
        """Batches by the workers, looked at a chunk at a time."""
        recipe = self.sweep.recipe
        plan = plan_steps(len(self.train.split), recipe, start, self.crew)
        while groups := list(islice(plan, _PLANNED)):
            for batch in self.train.planned(groups, recipe.seed):
                yield self._pieces(batch)

    def validation(self) -> Iterator[Piece]:
        """Without augmentation."""
        for batch in self.judge.batches(self.crew.share(len(self.judge.split))):
            yield from self._pieces(batch)

    def _pieces(self, batch: Batch) -> Iterator[Piece]:
        for part in parts(len(batch.labels), self.chunk):
            yield self._look(batch.images[part]), batch.labels[part]

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

    def prepare(self, report: Callable[[int, int], None], check_stop: Callable[[], None]) -> None:
        """Fill the stores."""
        total, done = self.train.rows + self.judge.rows, 0
        try:
            for store in (self.train, self.judge):
                store.open(disk=self.kind == "disk")
                store.fill(partial(_told, report, done, total), check_stop)
                done += store.rows
        except BaseException:
            self.close()
            raise

    def steps(self, start: int) -> Iterator[Iterator[Piece]]:
        """Rows of the store, turned into trunks a chunk at a time. The stores are closed once nobody asks for more."""
        recipe = self.sweep.recipe
        plan = plan_steps(len(self.train.loader.split), recipe, start, self.crew)
        chunk = chunk_of(self.sweep, self.train.shape, stored=True)
        try:
            for rows, labels in self.train.take(plan):
                yield chunks(self.train, rows, labels, chunk)
        finally:
            self.close()

    def validation(self) -> Iterator[Piece]:
        """The one view of every validation image."""
        places = self.judge.places
        for rows, labels in self.judge.take((0, places[i : i + GROUP]) for i in range(0, len(places), GROUP)):
            yield from chunks(self.judge, rows, labels, GROUP)


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


def chunk_of(sweep: Sweep, shape: Shape, *, stored: bool) -> int:
    """How many images are held at a time: all that fit a bound, for a few long products beat many short ones.

    A stored trunk has no pass beside it; there, what the graph of many settings holds counts too.
    """
    if sweep.recipe.chunk is not None:
        return sweep.recipe.chunk
    dtype = sweep.backbone.dtype
    if not stored:
        return shape.at_once(dtype)
    graph = len(sweep.settings) * shape.blocks * _HELD * shape.width * dtype.itemsize
    return max(FEWEST, _STORED_BYTES // (shape.bytes(1, dtype) + graph))


def chunks(store: Store, rows: Tensor, labels: Tensor, chunk: int) -> Iterator[Piece]:
    """Rows of a store as trunks, so many images at a time."""
    for part in parts(len(labels), chunk):
        yield store.trunk(rows[part]), labels[part]
