"""Checks promises 1 to 3 on any backbone: random tasks and branches, against the library and the dense reference.

1. the original output is the library's own, bit for bit; 2. a task beside others gives what it gives alone;
3. the fast pass agrees with the dense reference.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor, nn

from vit_memory.adapter import PROJECTIONS, Adapter, LowRank
from vit_memory.backbone import Backbone, load_backbone
from vit_memory.branch import Branch, new_branch
from vit_memory.choices import Kind, Projection
from vit_memory.errors import VitMemoryError
from vit_memory.evaluation.comparisons import TOLERANCE, changed_fields, difference, library_output, model_of_one
from vit_memory.families import Family, families
from vit_memory.families.roles import projections_of
from vit_memory.model import MemoryViT
from vit_memory.read_out import FINAL, ReadOut
from vit_memory.reference import dense_forward
from vit_memory.task import TargetScale, Task, new_task


@dataclass(frozen=True, slots=True)
class Verification:
    """The result for one backbone."""

    family: str
    base_identical: bool
    worst_interference: float  # largest difference between a task beside others and alone
    worst_reference_difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether every promise holds."""
        worst = max(self.worst_interference, self.worst_reference_difference)
        return self.base_identical and worst <= self.tolerance  # False for NaN


def random_graph(backbone: Backbone, count: int, seed: int) -> tuple[list[Task], list[Branch]]:
    """Tasks of all composable regimes and kinds and several sizes, on up to three branches or the original trunk.

    They form a random acyclic graph, and are of unit scale.
    """
    choices, kinds = random.Random(seed), random.Random(f"kinds {seed}")
    generator = torch.Generator().manual_seed(seed)
    tasks: list[Task] = []
    branches = [_random_branch(backbone, f"branch-{i}", kinds, generator) for i in range(kinds.randint(0, 3))]
    for i in range(count):
        regime = choices.choice(("memory", "memory", "reader", "reader", "class", "head"))
        kind = kinds.choice(get_args(Kind))
        parents = [task.name for task in tasks if choices.random() < 0.3]
        task = new_task(
            backbone,
            f"task-{i}",
            [str(c) for c in range(choices.randint(1, 6))],
            regime=regime,  # type: ignore[arg-type]
            kind=kind,
            cells=_random_cells(regime, choices),
            parents=parents,
            branch=kinds.choice((None, *branches)),
            generator=generator,
            **(_random_reader(backbone, choices) if regime == "reader" else {}),
        )
        tasks.append(_with_random_values(task, kinds, generator))
    return tasks, branches


def _random_branch(backbone: Backbone, name: str, choices: random.Random, generator: torch.Generator) -> Branch:
    projections = _projections(backbone)
    rank = choices.choice((None, 1, 4))
    branch = new_branch(
        backbone,
        name,
        blocks=choices.randint(1, backbone.depth),
        rank=rank,
        gains=rank is None or choices.random() < 0.5,
        projections=choices.sample(projections, choices.randint(1, len(projections))),
    )
    adapter = _random_values_of(branch.adapter, lambda like, std: torch.randn(like.shape, generator=generator) * std)
    return replace(branch, adapter=adapter)


def _projections(backbone: Backbone) -> list[Projection]:
    """Those that every block has."""
    return [name for name in PROJECTIONS if all(name in projections_of(b) for b in backbone.roles.blocks)]


def _random_reader(backbone: Backbone, choices: random.Random) -> dict[str, Any]:
    """Gains, low-rank updates of any projections that the backbone has, and read-outs, in any combination."""
    projections = _projections(backbone)
    read_out = ReadOut(choices.randint(1, backbone.depth), choices.random() < 0.5)
    return {
        "rank": choices.choice((None, 1, 4)),
        "gains": choices.random() < 0.6 or read_out == FINAL,
        "projections": choices.sample(projections, choices.randint(1, len(projections))),
        "read_out": read_out,
    }


def _random_cells(regime: str, choices: random.Random) -> int | None:
    sizes = {"memory": (1, 2, 5, 9), "reader": (0, 0, 3)}
    return choices.choice(sizes[regime]) if regime in sizes else None


def _with_random_values(task: Task, kinds: random.Random, generator: torch.Generator) -> Task:
    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    token, count = task.class_token, len(task.labels)
    return replace(
        task,
        thresholds=tuple(kinds.random() for _ in range(count)) if task.kind == "multi-label" else None,
        target_scale=_random_scale(kinds, count) if task.kind == "regression" else None,
        class_token=None if token is None else token + normal(token, 0.5),
        memory=normal(task.memory, 0.5),
        head_weight=normal(task.head_weight, task.head_weight.shape[1] ** -0.5),
        head_bias=normal(task.head_bias, 0.1),
        reader=None if task.reader is None else _random_values_of(task.reader, normal),
    )


def _random_values_of(reader: Adapter, normal: Callable[[Tensor, float], Tensor]) -> Adapter:
    return Adapter(
        None if reader.gains is None else normal(reader.gains, 0.3),
        {
            name: LowRank(normal(update.A, update.A.shape[2] ** -0.5), normal(update.B, update.rank**-0.5))
            for name, update in reader.low_rank.items()
        },
    )


def _random_scale(choices: random.Random, count: int) -> TargetScale:
    mean, std = zip(*((choices.uniform(-1, 1), choices.uniform(0.5, 1.5)) for _ in range(count)), strict=True)
    return TargetScale(mean, std)


def verify(
    model: nn.Module,
    *,
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    tasks: int = 6,
    graphs: int = 3,
    batches: Sequence[int] = (1, 3),
    sizes: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
) -> Verification:
    """Check the promises on a library model; `dtype` applies to a copy, the model itself is not changed."""
    backbone = load_backbone(model, dtype=dtype)
    identical, interference, reference_difference = True, [0.0], [0.0]
    generator = torch.Generator().manual_seed(seed)
    for g in range(graphs):
        graph, branches = random_graph(backbone, tasks, seed + g)
        together = MemoryViT(backbone, graph, branches)
        for (height, width), batch in product(sizes or (backbone.roles.image_size,), batches):
            images = torch.randn(batch, backbone.roles.channels, height, width, generator=generator)
            images = images.to(backbone.device, dtype)
            outputs = together(images)
            identical &= not changed_fields(outputs.original, library_output(backbone, images))
            reference = dense_forward(backbone, graph, images, branches)
            for task in graph:
                alone = model_of_one(together, task.name)(images, (task.name,))
                interference.append(float(difference(outputs[task.name], alone[task.name]).max()))
                reference_difference.append(float(difference(outputs[task.name], reference[task.name]).max()))
    worst = _worst(interference), _worst(reference_difference)
    return Verification(name or backbone.family.name, identical, *worst, TOLERANCE[dtype])


def _worst(values: Sequence[float]) -> float:
    return next((value for value in values if value != value), max(values))  # noqa: PLR0124 - NaN is the worst


def tiny_models() -> Iterator[tuple[str, Family, Callable[[], nn.Module] | VitMemoryError]]:
    """Small random models of every variant of every family: name, family, and a function that builds the model, or an
    error if the family's library cannot be imported.
    """
    for family in families():
        try:
            models = family.tiny_models()
        except (ImportError, RuntimeError) as error:  # torchvision's wheel fails with RuntimeError beside another torch
            yield family.name, family, VitMemoryError(f"{family.library} cannot be imported: {error}")
            continue
        for name, make in models.items():
            yield name, family, make
