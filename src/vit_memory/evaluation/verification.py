"""Promises 1 to 3, tried on any backbone: random tasks in random graphs, judged by library and dense rule."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn

from vit_memory.backbone import Backbone, load_backbone
from vit_memory.errors import VitMemoryError
from vit_memory.families import Family, families, family_of
from vit_memory.model import MemoryViT
from vit_memory.reference import dense_forward
from vit_memory.task import Kind, TargetScale, Task, new_task

# What rounding may do to logits of unit scale through a whole ViT. Half precision carries 8 or 11 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was seen on one backbone."""

    family: str
    base_identical: bool
    worst_interference: float
    worst_reference_difference: float
    tolerance: float

    @property
    def kept(self) -> bool:
        """Whether every promise held."""
        worst = max(self.worst_interference, self.worst_reference_difference)
        return self.base_identical and worst <= self.tolerance  # NaN is no promise kept


def random_tasks(backbone: Backbone, count: int, seed: int) -> list[Task]:
    """Tasks of all composable regimes and kinds and several sizes, in a random acyclic graph, of unit scale."""
    chance, kinds = random.Random(seed), random.Random(f"kinds {seed}")
    generator = torch.Generator().manual_seed(seed)

    def drawn(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    tasks: list[Task] = []
    for i in range(count):
        regime = chance.choice(("memory", "memory", "memory", "class", "head"))
        kind = kinds.choice(get_args(Kind))
        parents = [task.name for task in tasks if chance.random() < 0.3]
        fresh = new_task(
            backbone,
            f"task-{i}",
            [str(c) for c in range(chance.randint(1, 6))],
            regime=regime,  # type: ignore[arg-type]
            kind=kind,
            cells=chance.choice((1, 2, 5, 9)) if regime == "memory" else None,
            parents=parents,
            generator=generator,
        )
        token, count = fresh.class_token, len(fresh.labels)
        tasks.append(
            replace(
                fresh,
                thresholds=tuple(kinds.random() for _ in range(count)) if kind == "multi-label" else None,
                target_scale=_random_scale(kinds, count) if kind == "regression" else None,
                class_token=None if token is None else token + drawn(token, 0.5),
                memory=drawn(fresh.memory, 0.5),
                head_weight=drawn(fresh.head_weight, backbone.width**-0.5),
                head_bias=drawn(fresh.head_bias, 0.1),
            )
        )
    return tasks


def _random_scale(chance: random.Random, count: int) -> TargetScale:
    mean, std = zip(*((chance.uniform(-1, 1), chance.uniform(0.5, 1.5)) for _ in range(count)), strict=True)
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
) -> Verdict:
    """Try the promises on a library model, which is cast to `dtype` in a copy and otherwise untouched."""
    judge = load_backbone(model, dtype=dtype).model  # the library's own class and forward, in the dtype asked for
    backbone = load_backbone(judge)
    family = family_of(model)
    identical = True
    interference: list[float] = [0.0]
    difference: list[float] = [0.0]
    generator = torch.Generator().manual_seed(seed)
    for g in range(graphs):
        drawn = random_tasks(backbone, tasks, seed + g)
        together = MemoryViT(backbone, drawn)
        for height, width in sizes or (backbone.roles.image_size,):
            for batch in batches:
                images = torch.randn(batch, backbone.roles.channels, height, width, generator=generator)
                images = images.to(backbone.device, dtype)
                outputs = together(images)
                with torch.no_grad():
                    said = family.library_forward(judge, images)
                identical &= all(torch.equal(getattr(outputs.original, field), value) for field, value in said.items())
                reference = dense_forward(backbone, drawn, images)
                for task in drawn:
                    company = together.tasks.with_ancestors((task.name,))
                    alone = MemoryViT(backbone, [together.tasks[name] for name in company])(images, (task.name,))
                    interference.append(_distance(outputs[task.name], alone[task.name]))
                    difference.append(_distance(outputs[task.name], reference[task.name]))
    return Verdict(name or family.name, identical, _worst(interference), _worst(difference), TOLERANCE[dtype])


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _worst(values: Sequence[float]) -> float:
    return next((value for value in values if value != value), max(values))  # noqa: PLR0124 - NaN is the worst


def tiny_models() -> Iterator[tuple[str, Family, Callable[[], nn.Module] | VitMemoryError]]:
    """Small random models of every variant of every family; in its place, an error where a library is not to be had."""
    for family in families():
        try:
            models = family.tiny_models()
        except (ImportError, RuntimeError) as error:  # torchvision's wheel fails with RuntimeError beside another torch
            yield family.name, family, VitMemoryError(f"{family.library} cannot be imported: {error}")
            continue
        for name, make in models.items():
            yield name, family, make
