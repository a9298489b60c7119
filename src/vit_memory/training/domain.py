"""One branch trained on several datasets at once, with a task of its own for each: how a domain gets its branch.

Every step takes a share of its batch from each dataset. The settings of all datasets have the same branches, whose
gradients add up; class tokens, cells, readers and heads belong to one dataset each. To the training loop this is one
sweep (`DomainSweep`) with one source of batches and one objective, the mean of the datasets' scores.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vit_memory.branch import Branch
from vit_memory.choices import Storage
from vit_memory.errors import TrainingError
from vit_memory.parallel import ChunkThreads
from vit_memory.task import Task
from vit_memory.training.batches import BatchSource, Chunk
from vit_memory.training.branch_sweep import BranchSweep
from vit_memory.training.objective import Objective, Sums
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Encoding, Stack, Sweep


@dataclass(frozen=True, slots=True, eq=False)
class DomainEncoding:
    """What the settings read of some images of one dataset."""

    dataset: int
    encoding: Encoding


class DomainObjective(Objective):
    """The mean of several datasets' scores. Indices of images count through all datasets, one after the other."""

    def __init__(self, parts: Sequence[Objective], images: Sequence[int]) -> None:
        """`images` are the numbers of validation images."""
        self.parts = tuple(parts)
        self.first_index = [sum(images[:d]) for d in range(len(images))]
        metrics = {part.metric for part in parts}
        self.metric = f"mean {metrics.pop()}" if len(metrics) == 1 else "mean score"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses are computed by the sweep of a dataset."""
        raise AssertionError("a domain's losses are those of its datasets")

    def start(self, settings: int, device: torch.device) -> Sums:
        """The sums of every dataset, one after the other."""
        started = [part.start(settings, device) for part in self.parts]
        self._sizes = [len(sums) for sums in started]
        return [tensor for sums in started for tensor in sums]

    def _split(self, sums: Sums) -> list[Sums]:
        """The sums of each dataset."""
        ends = [sum(self._sizes[: d + 1]) for d in range(len(self._sizes))]
        return [sums[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]

    def add(self, sums: Sums, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Add to the sums of the dataset that these indices belong to."""
        if not len(indices):
            return
        dataset = sum(int(indices[0]) >= first for first in self.first_index) - 1
        own = self._split(sums)[dataset]
        self.parts[dataset].add(own, outputs, targets, indices - self.first_index[dataset])
        start = sum(self._sizes[:dataset])
        sums[start : start + len(own)] = own  # an objective may replace a sum instead of adding to it

    def scores(self, sums: Sums) -> Tensor:
        """(T,): the mean over the datasets."""
        return torch.tensor(self.part_scores(sums)).mean(1)

    def part_scores(self, sums: Sums) -> list[list[float]]:
        """For every setting, the score on each dataset."""
        each = [part.scores(own).tolist() for part, own in zip(self.parts, self._split(sums), strict=True)]
        return [list(scores) for scores in zip(*each, strict=True)]

    def thresholds(self, sums: Sums) -> list[list[float]] | None:
        """For every setting, the thresholds of its multi-label tasks, one dataset after the other."""
        each = [part.thresholds(own) for part, own in zip(self.parts, self._split(sums), strict=True)]
        present = [thresholds for thresholds in each if thresholds is not None]
        if not present:
            return None
        return [[value for thresholds in own for value in thresholds] for own in zip(*present, strict=True)]


class DomainSweep(Sweep):
    """Settings that each have a branch, and on it one task for every dataset."""

    def __init__(self, parts: Sequence[BranchSweep], objective: DomainObjective, recipe: Recipe) -> None:
        first = parts[0]
        self.parts, self.backbone, self.recipe, self.objective = tuple(parts), first.backbone, recipe, objective
        self.settings, self.parents = first.settings, first.parents
        self.alive, self._rates, self._decays = first.alive, first._rates, first._decays
        for part in parts[1:]:
            part.share_branches(first)
            part.alive = self.alive
        self.stacks = self.create_parameters()

    def create_parameters(self) -> dict[str, Stack]:
        """The parameters of every dataset's tasks, and once those of the branches."""
        stacks: dict[str, Stack] = {}
        for d, part in enumerate(self.parts):
            stacks |= {f"{d}.{name}": stack for name, stack in part.stacks.items() if name not in part.branch_stacks}
        return {**stacks, **self.parts[0].branch_stacks}

    def encode(self, images: Tensor) -> Encoding:
        """Images belong to a dataset, whose sweep encodes them."""
        raise AssertionError("a domain's images are encoded by the sweeps of its datasets")

    def logits(self, encoding: Encoding | DomainEncoding) -> Tensor:
        """Outputs (T, B, C) of the tasks of the encoding's dataset."""
        assert isinstance(encoding, DomainEncoding)
        return self.parts[encoding.dataset].logits(encoding.encoding)

    def leaves(self) -> list[Tensor]:
        """Those of every dataset's tasks, and once those of the branches."""
        return [leaf for part in self.parts for leaf in part.task_leaves()] + self.parts[0].branch_leaves()

    def backward(self, encoding: Encoding | DomainEncoding, targets: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Losses and gradients of some images of one dataset; the tasks of the others have none."""
        assert isinstance(encoding, DomainEncoding)
        losses, gradients = self.parts[encoding.dataset].backward(encoding.encoding, targets)
        branches = len(self.parts[0].branch_leaves())
        own = gradients[: len(gradients) - branches]
        every: list[Tensor | None] = []
        for d, part in enumerate(self.parts):
            every += own if d == encoding.dataset else [None] * len(part.task_leaves())
        return losses, every + gradients[len(gradients) - branches :]

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients, one per stack."""
        for part in self.parts:
            part.gradients()
        return super().gradients()

    def load_state_dict(self, state: Mapping[str, Tensor], stopped: Iterable[int]) -> None:
        """Restore the state of a sweep of the same settings, of which some were stopped."""
        super().load_state_dict(state, stopped)
        for part in self.parts:
            part.forget_readers()

    def tasks(self) -> list[Task]:
        """Every setting's task of the first dataset."""
        return self.parts[0].tasks()

    def branches(self) -> list[Branch]:
        """Every setting's branch."""
        return self.parts[0].branches()


class DomainBatches:
    """Batches with a share of every dataset."""

    def __init__(self, sources: Sequence[BatchSource], objective: DomainObjective) -> None:
        self.sources, self.first_index = tuple(sources), objective.first_index
        self.storage: Storage = sources[0].storage
        self.precision = "+".join(source.precision for source in sources)

    def prepare(
        self, on_progress: Callable[[int, int], None], check_stop: Callable[[], None], threads: ChunkThreads
    ) -> None:
        """Prepare the sources, one after the other."""
        for source in self.sources:
            source.prepare(on_progress, check_stop, threads)

    def training_batches(self, start: int, threads: int) -> Iterator[Sequence[Chunk]]:
        """For every step, the chunks of all datasets."""
        each = [source.training_batches(start, threads) for source in self.sources]
        for batches in zip(*each, strict=True):
            yield [_tagged(chunk, d, 0) for d, chunks in enumerate(batches) for chunk in chunks]

    def validation_batches(self, threads: int) -> Iterator[Sequence[Chunk]]:
        """The validation images of every dataset."""
        for d, source in enumerate(self.sources):
            for chunks in source.validation_batches(threads):
                yield [_tagged(chunk, d, self.first_index[d]) for chunk in chunks]


def _tagged(chunk: Chunk, dataset: int, first_index: int) -> Chunk:
    def encode() -> DomainEncoding:
        return DomainEncoding(dataset, chunk.encode())

    return replace(chunk, encode=encode, indices=chunk.indices + first_index)  # type: ignore[arg-type]


def recipe_of_dataset(recipe: Recipe, datasets: int) -> Recipe:
    """The recipe of one of several datasets: each has an equal share of the batch."""
    if recipe.batch < datasets:
        raise TrainingError(f"a batch of {recipe.batch} images for {datasets} datasets; give each at least one.")
    return replace(recipe, batch=math.ceil(recipe.batch / datasets))
