"""Branches: the promises with several of them in one pass, what they are judged by, and what is refused."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from builders import ROUNDING, images, library_model, tiny_backbone, trained, trained_branch, variant_params, worst
from vit_memory import GraphError, MemoryViT, TaskError, TaskGraph, load_backbone, new_branch, new_task
from vit_memory.errors import BackboneMismatch, UnknownTask
from vit_memory.evaluation.verification import verify
from vit_memory.families.roles import projections_of
from vit_memory.reference import dense_forward

LABELS = ["a", "b", "c"]


def crossing_graph(backbone):
    """Three branches, all regimes, and extension across trunks in both directions."""
    branches = [
        trained_branch(backbone, "two", blocks=2, rank=4, projections=("q", "k", "v", "o")),
        trained_branch(backbone, "one", blocks=1, rank=2, gains=True),
        trained_branch(backbone, "whole", blocks=3, rank=None, gains=True),
    ]
    two, one, whole = branches
    tasks = [
        trained(backbone, "cells", cells=3, branch=two),
        trained(backbone, "plain", cells=2, parents=["cells"]),
        trained(backbone, "reader", regime="reader", rank=2, gains=True, branch=one, parents=["plain"]),
        trained(backbone, "patches", regime="reader", gains=True, read_out="blocks:2+patches", branch=one),
        trained(backbone, "lora", regime="head", branch=whole),
        trained(backbone, "class", regime="class", branch=whole, kind="regression"),
        trained(backbone, "original", regime="head"),
    ]
    return tasks, branches


@pytest.mark.parametrize("variant", variant_params())
def test_promises_hold_for_branches_of_every_family(variant):
    """Untouched to the bit, alone as in company, and equal to the dense rule: graphs with up to three branches."""
    family, library = library_model(variant)
    backbone = tiny_backbone(variant)
    tasks, branches = crossing_graph(backbone)
    model = MemoryViT(backbone, tasks, branches)
    for batch, size in ((1, (32, 32)), (3, (48, 40))):
        batch_images = images(batch, size)
        outputs = model(batch_images)
        with torch.no_grad():
            for field, value in family.library_forward(library, batch_images).items():
                assert torch.equal(getattr(outputs.original, field), value), field
        dense, stored = dense_forward(backbone, tasks, batch_images, branches), model.read(model.trunk(batch_images))
        for task in tasks:
            needed = [model.tasks[name] for name in model.tasks.with_ancestors([task.name])]
            own = {branch.name: branch for t in needed if (branch := model.tasks.branch_of(t.name)) is not None}
            alone = MemoryViT(backbone, needed, own.values())(batch_images, [task.name])
            for other in (dense, stored, alone):
                assert worst(outputs[task.name], other[task.name]) <= ROUNDING, task.name


@pytest.mark.parametrize("variant", variant_params())
def test_verify_draws_branches_and_passes(variant):
    result = verify(library_model(variant)[1], tasks=5, graphs=2, batches=(2,), sizes=((32, 32),), seed=7)
    assert result.passed, result


@pytest.mark.parametrize("variant", variant_params())
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_head_on_a_branch_reads_what_the_library_computes_with_merged_weights(variant, blocks):
    """The judge: the library's own model, the updates added to its weights from the branch's first block on."""
    family, library = library_model(variant)
    backbone = tiny_backbone(variant)
    projections = [name for name in ("q", "v", "o", "fc2") if name in projections_of(backbone.roles.blocks[0])]
    branch = trained_branch(backbone, "lora", blocks=blocks, rank=3, projections=projections, scaling=0.7)
    merged = copy.deepcopy(library)
    shares_weights = load_backbone(merged)
    with torch.no_grad():
        for i, block in enumerate(shares_weights.roles.blocks[branch.start :]):
            for name, update in branch.adapter.low_rank.items():
                part = projections_of(block)[name]
                rows = part.module.weight[part.start : part.start + part.outer]
                rows += update.scaling * update.B[i] @ update.A[i]
    labels = [str(i) for i in range(backbone.width)]
    head = replace(
        new_task(backbone, "head", labels, regime="head", branch=branch), head_weight=torch.eye(backbone.width)
    )
    feature = MemoryViT(backbone, [head], [branch])(images(3))["head"]
    expected = MemoryViT(load_backbone(merged))(images(3)).original
    said = family.library_forward(merged, images(3))
    assert all(torch.equal(getattr(expected, field), value) for field, value in said.items())
    assert worst(feature, expected.feature) <= ROUNDING
    assert worst(feature, MemoryViT(backbone)(images(3)).original.feature) > 1e-3


@pytest.mark.parametrize("variant", variant_params())
def test_an_untrained_branch_is_the_original_trunk(variant):
    backbone = tiny_backbone(variant)
    branch = new_branch(backbone, "fresh", blocks=2, rank=4, gains=True)
    for options in ({"cells": 3}, {"regime": "head"}, {"regime": "reader", "gains": True, "read_out": "patches"}):
        task = trained(backbone, "t", **options)
        on_branch = replace(task, branch=branch.ref)
        expected = MemoryViT(backbone, [task])(images())["t"]
        assert worst(MemoryViT(backbone, [on_branch], [branch])(images())["t"], expected) <= ROUNDING


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("part", ["k.lora_A", "v.lora_A", "v.lora_B", "gains"])
def test_a_broken_branch_spoils_its_own_tasks_and_their_descendants_and_no_other(part, value):
    backbone = tiny_backbone()
    tasks, branches = crossing_graph(backbone)
    sound = MemoryViT(backbone, tasks, branches)(images())
    broken = next(branch for branch in branches if branch.name == ("one" if part == "gains" else "two"))
    reached = {"one": {"reader", "patches"}, "two": {"cells", "plain", "reader"}}[broken.name]
    tensor = broken.tensors()[part]
    clean = tensor.clone()
    tensor[...] = value
    rewired = [
        replace(task, branch=broken.ref) if task.branch and task.branch.name == broken.name else task for task in tasks
    ]
    outputs = MemoryViT(backbone, rewired, branches)(images())
    tensor[...] = clean
    for name in sound:
        if name in reached:
            changed = worst(outputs[name], sound[name])
            assert math.isnan(changed) or changed > ROUNDING
        else:
            assert torch.equal(outputs[name], sound[name]), name
    assert torch.equal(outputs.original.logits, sound.original.logits)


def test_only_the_branches_that_are_asked_for_are_computed():
    backbone = tiny_backbone()
    tasks, branches = crossing_graph(backbone)
    model = MemoryViT(backbone, tasks, branches)
    starts = {branch.digest: branch.name for branch in branches}
    computed = {name: {starts[b.key] for b in model._select([name]).branches} for name in model.tasks}
    assert computed == {
        "cells": {"two"},
        "plain": {"two"},  # its parent stands on it
        "reader": {"one", "two"},
        "patches": {"one"},
        "lora": {"whole"},
        "class": {"whole"},
        "original": set(),
    }


def test_sixteen_tasks_on_a_branch_share_its_tokens():
    """Nothing of a branch is computed per task: one trunk part, one product with its keys."""
    backbone = tiny_backbone()
    branch = trained_branch(backbone, "shared", blocks=2, rank=2)
    model = MemoryViT(backbone, [trained(backbone, f"t{i}", cells=5, branch=branch) for i in range(16)], [branch])
    layout = model._select(None).readers.layout
    assert [(part.branch, part.start, part.stop) for part in layout.trunks] == [(branch.digest, 0, 16)]
    assert len(layout.groups) == 1


def test_attention_on_a_branch_is_explained_as_that_on_the_trunk():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, *crossing_graph(backbone))
    for name in ("cells", "plain", "reader", "class"):
        explanation = model.explain(images(1), name)
        assert worst(explanation.total(), torch.ones(3, backbone.heads)) <= ROUNDING


def test_branches_come_and_go_with_their_tasks():
    backbone = tiny_backbone()
    tasks, branches = crossing_graph(backbone)
    model = MemoryViT(backbone, tasks, branches)
    with pytest.raises(GraphError, match=r"'lora', 'class' stand on branch 'whole': remove them first, or all in one"):
        model.remove(branches=["whole"])
    with pytest.raises(UnknownTask, match=r"no branch 'wohle'. Attached: two, one, whole"):
        model.remove(branches=["wohle"])
    assert sorted(model.tasks.branches) == ["one", "two", "whole"]
    trunk = model.trunk(images())
    model.remove("lora", "class", branches=["whole"])
    assert sorted(model.tasks.branches) == ["one", "two"]
    assert torch.equal(model.read(trunk)["cells"], MemoryViT(backbone, tasks, branches).read(trunk)["cells"])
    newcomer = trained_branch(backbone, "newcomer", blocks=1, rank=1)
    model.add(trained(backbone, "new", branch=newcomer), branches=[newcomer])
    with pytest.raises(TaskError, match=r"lacks a branch that was attached later: make it again with model.trunk"):
        model.read(trunk, ["new"])
    assert model(images(), ["new"])["new"].shape == (2, 3)


def test_a_task_finds_its_branch_by_content_whatever_it_is_called():
    backbone = tiny_backbone()
    branch = trained_branch(backbone, "old-name", blocks=2, rank=2)
    task = trained(backbone, "t", branch=branch)
    expected = MemoryViT(backbone, [task], [branch])(images())["t"]
    renamed = replace(branch, name="new-name")
    assert torch.equal(MemoryViT(backbone, [task], [renamed])(images())["t"], expected)


def test_a_branch_that_claims_to_be_another_in_float16_does_not_take_its_tasks():
    backbone = tiny_backbone()
    branch = trained_branch(backbone, "birds", blocks=2, rank=2)
    task = trained(backbone, "t", branch=branch)
    expected = MemoryViT(backbone, [task], [branch])(images())["t"]
    impostor = trained_branch(backbone, "impostor", blocks=2, rank=2)
    impostor = replace(impostor, record=replace(impostor.record, half_of=branch.digest))
    for branches in ([branch, impostor], [impostor, branch]):
        assert torch.equal(MemoryViT(backbone, [task], branches)(images())["t"], expected)


def test_what_cannot_be_is_refused_by_name():
    backbone = tiny_backbone()
    branch = trained_branch(backbone, "birds", blocks=2, rank=2)
    task = trained(backbone, "wings", branch=branch)
    other = replace(branch, adapter=branch.adapter.map(lambda x: x + 1))
    new = partial(new_branch, backbone)
    cases = [
        (lambda: new("b", blocks=0), TaskError, r"branch 'b': blocks is 0; expected 1 to 3"),
        (lambda: new("b", blocks=4), TaskError, r"branch 'b': blocks is 4; expected 1 to 3"),
        (lambda: replace(branch, start=3), TaskError, r"'birds' starts at block 3; .* has the blocks 0 to 2"),
        (lambda: replace(branch, start=-1), TaskError, r"'birds' starts at block -1"),
        (lambda: replace(branch, start=0), TaskError, r"branch 'birds': q lora_A is \(2, 2, 32\) .* \(3, 2, 32\)"),
        (
            lambda: new("b", blocks=2, rank=None),
            TaskError,
            r"it is the original trunk. Give it either",
        ),
        (lambda: new("b", blocks=2, rank=33), TaskError, r"branch 'b': rank 33; expected 1 to 32"),
        (
            lambda: new("b", blocks=2, projections=("x",)),
            TaskError,
            r"low-rank updates of 'x'; expected one",
        ),
        (lambda: replace(branch, name="a/b"), TaskError, r"branch name 'a/b': use 1 to 100 letters"),
        (lambda: trained(backbone, "t", regime="propagated", branch=branch), TaskError, r"cannot stand on a branch"),
        (lambda: MemoryViT(backbone, [task]), GraphError, r"'wings' stands on branch 'birds' \(digest .*birds.branch"),
        (lambda: MemoryViT(backbone, [task], [other]), GraphError, r"another branch of that name, or trained again"),
        (lambda: TaskGraph([], [branch, other]), GraphError, r"two branches are called 'birds'; remove or rename one"),
        (lambda: MemoryViT(tiny_backbone("dinov2"), [], [branch]), BackboneMismatch, r"branch 'birds' was trained on"),
    ]
    for make, error, message in cases:
        with pytest.raises(error, match=message):
            make()
    wide = trained_branch(backbone, "x", blocks=2, rank=2, projections=("fc1",)).adapter
    narrow = replace(branch, adapter=wide.map(lambda x: x[:, :48]))
    with pytest.raises(TaskError, match=r"fc1 lora_B is \(2, 48, 2\) .* expected \(2, 64, 2\)"):
        MemoryViT(backbone, [], [narrow])


def test_a_digest_depends_on_everything_that_decides_the_tokens_and_not_on_the_name():
    backbone = tiny_backbone()
    branch = trained_branch(backbone, "birds", blocks=2, rank=2, gains=True)
    digests = {branch.digest}
    for name, tensor in branch.tensors().items():
        tensor.view(-1)[-1] += 1
        assert branch.digest not in digests, name
        digests.add(branch.digest)
    scaled = {name: replace(update, scaling=2.0) for name, update in branch.adapter.low_rank.items()}
    assert replace(branch, adapter=replace(branch.adapter, low_rank=scaled)).digest not in digests
    assert replace(branch, name="other").digest == branch.digest
    task = trained(backbone, "wings", branch=branch)
    assert task.digest != replace(task, branch=None).digest
