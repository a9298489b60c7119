"""A copy of a model shares the backbone and what was prepared, and plans its passes as they will be."""

import pytest
import torch

from builders import ROUNDING, graph_shapes, images, tiny_backbone, trained, trained_branch, worst
from vit_memory import BackboneMismatch, MemoryViT, TaskGraph, joining
from vit_memory.joining import JoinPlan


def model_with_branches():
    backbone = tiny_backbone()
    early, late = (trained_branch(backbone, name, blocks=n, rank=2) for name, n in (("early", 3), ("late", 1)))
    tasks = [
        trained(backbone, "plain", regime="head"),
        trained(backbone, "cells", cells=5),
        trained(backbone, "child", cells=2, parents=["cells"], branch=late),
        trained(backbone, "other", branch=early),
    ]
    return MemoryViT(backbone, tasks, [early, late])


def test_a_copy_with_other_tasks_prepares_only_what_is_new(monkeypatch):
    from vit_memory import snapshot as module

    backbone = tiny_backbone()
    old = MemoryViT(backbone, graph_shapes(backbone)["mixed"])
    expected = old(images())
    prepared = []
    prepare = module.prepare_task
    monkeypatch.setattr(module, "prepare_task", lambda task, b: prepared.append(task.name) or prepare(task, b))
    replaced = trained(backbone, "alone", cells=1)
    kept = [task for task in old.tasks.values() if task.name != "alone"]
    new = old.copy(TaskGraph([*kept, replaced, trained(backbone, "more")]))
    outputs = new(images())
    assert sorted(prepared) == ["alone", "more"]
    assert all(worst(outputs[task.name], expected[task.name]) <= ROUNDING for task in kept)
    assert worst(outputs["alone"], expected["alone"]) > ROUNDING
    assert torch.equal(old(images())["alone"], expected["alone"])
    assert new.backbone is old.backbone


def test_a_copy_and_its_model_change_apart():
    model = model_with_branches()
    twin = model.copy()
    twin.remove("child")
    model.add(trained(model.backbone, "more"))
    assert (list(twin.tasks), list(model.tasks)[-2:]) == (["plain", "cells", "other"], ["other", "more"])
    with pytest.raises(BackboneMismatch):
        model.copy(TaskGraph([trained(tiny_backbone("dinov2"), "stranger")]))


@pytest.mark.parametrize("names", [None, ["plain"], ["cells"], ["child", "plain"], ["other"]])
def test_the_shapes_foretold_are_those_that_a_pass_asks_for(names):
    plan = JoinPlan(tiny_backbone().roles, deferred=True)
    model = model_with_branches().copy(plan=plan)
    model(images(3, (32, 64)), names)
    assert list(plan._noted) == model.pass_shapes(3, (32, 64), names)


def test_a_deferred_plan_proves_later_and_remembers(monkeypatch):
    tried = []
    prove = joining.same_bits_when_joined
    monkeypatch.setattr(joining, "same_bits_when_joined", lambda m, w, s: tried.append(s) or prove(m, w, s))
    model = model_with_branches()
    plan = JoinPlan(model.backbone.roles, deferred=True)
    serving = model.copy(plan=plan)
    apart = serving(images())
    assert (tried, plan.has_work) == ([], True)
    plan.plan_ahead(serving.pass_shapes(5, (32, 32)))
    while plan.prove_next():
        pass
    assert {shape.batch for shape in tried} == {2, 5}
    assert not plan.has_work
    known = len(tried)
    joined = serving(images())
    serving(images(5))
    assert len(tried) == known
    assert torch.equal(joined.original.tokens, apart.original.tokens)
    assert torch.equal(joined["child"], model(images())["child"])  # which proves at once
    assert len(tried) > known
