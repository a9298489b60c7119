"""Backbones, tasks and images for the tests: tiny, random, and at unit scale, so that tolerances mean something."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vit_memory import Backbone, Branch, Task, load_backbone, new_branch, new_task
from vit_memory.errors import VitMemoryError
from vit_memory.evaluation.verification import tiny_models
from vit_memory.families import Family

_beside = Path(__file__).resolve().parents[2] / "shared"
SHARED = _beside if (_beside / "data").is_dir() else None  # real images and weights, beside some checkouts

ROUNDING = 1e-5  # promise 2: float32 logits of unit scale


@cache
def variants() -> dict[str, tuple[Family, object]]:
    return {name: (family, make) for name, family, make in tiny_models()}


def variant_params(quick: Sequence[str] | None = None) -> list[object]:
    """Every variant of every family, skipped with a reason where its library is missing; all but `quick` are slow."""
    params = []
    for name, (_, make) in variants().items():
        marks = [pytest.mark.skip(reason=str(make))] if isinstance(make, VitMemoryError) else []
        if quick is not None and name not in quick:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(name, marks=marks))
    return params


@cache
def library_model(variant: str) -> tuple[Family, nn.Module]:
    family, make = variants()[variant]
    return family, make()  # type: ignore[operator]


@cache
def tiny_backbone(variant: str = "vit") -> Backbone:
    return load_backbone(library_model(variant)[1])


def images(batch: int = 2, size: tuple[int, int] = (32, 32), seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def trained(backbone: Backbone, name: str, *, labels: Sequence[str] = ("a", "b", "c"), **options: object) -> Task:
    """A task as training would leave it: nothing at zero, heads of unit scale, different for every name."""
    fresh = new_task(backbone, name, labels, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def drawn(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    token = fresh.class_token
    return replace(
        fresh,
        class_token=None if token is None else token + drawn(token, 0.5),
        memory=drawn(fresh.memory, 0.5),
        head_weight=drawn(fresh.head_weight, backbone.width**-0.5),
        head_bias=drawn(fresh.head_bias, 0.1),
        reader=None if fresh.reader is None else fresh.reader.map(lambda like: drawn(like, 0.2)),
    )


def trained_branch(backbone: Backbone, name: str, *, scaling: float = 1.0, **options: object) -> Branch:
    """A branch as training would leave it, different for every name."""
    fresh = new_branch(backbone, name, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    adapter = fresh.adapter.map(lambda like: torch.randn(like.shape, generator=generator) * 0.2)
    scaled = {projection: replace(update, scaling=scaling) for projection, update in adapter.low_rank.items()}
    return replace(fresh, adapter=replace(adapter, low_rank=scaled))


def graph_shapes(backbone: Backbone) -> dict[str, list[Task]]:
    """The shapes a graph of tasks comes in."""
    t = lambda name, **options: trained(backbone, name, **options)  # noqa: E731
    return {
        "none": [],
        "one": [t("one", cells=5)],
        "concatenation": [t("a", cells=5), t("b", cells=1), t("c", cells=12), t("d", regime="class")],
        "chain": [t("a", cells=3), t("b", cells=2, parents=["a"]), t("c", cells=4, parents=["b"])],
        "diamond": [
            t("top", cells=2),
            t("left", cells=5, parents=["top"]),
            t("right", regime="class", parents=["top"]),
            t("bottom", cells=1, parents=["left", "right"]),
        ],
        "mixed": [
            t("alone", cells=5),
            t("plain", regime="head"),
            t("coarse", cells=2, kind="multi-label"),
            t("fine", cells=7, parents=["coarse", "plain"], kind="regression"),
        ],
        "readers": [
            t("cells", cells=5),
            t("gains", regime="reader", gains=True),
            t("low-rank", regime="reader", rank=4, parents=["cells"]),
            t("both", regime="reader", rank=4, gains=True, cells=2, parents=["low-rank"], kind="multi-label"),
            t("values", regime="reader", rank=2, projections=("k", "v", "o"), read_out="blocks:2", parents=["gains"]),
            t("patches", regime="reader", rank=2, gains=True, read_out="blocks:3+patches", kind="regression"),
            t("child", cells=1, parents=["both", "patches"]),
            t("plain", regime="head"),
        ],
    }


def worst(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
