"""Training on branches: a branch with its task, and tasks on a branch that does not change."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from builders import tiny_backbone, trained, trained_branch, worst
from training.test_sweep import FACTS, LABELS, READER, backbone, coloured  # noqa: F401 - a fixture
from vit_memory import GraphError, MemoryViT, TrainingError, fit, load_backbone, new_branch, new_task
from vit_memory.data.loading import Loader
from vit_memory.data.transforms import EvalTransform
from vit_memory.graph import TaskGraph
from vit_memory.reference import dense_pass, rule
from vit_memory.training import branch_sweep
from vit_memory.training.branch_sweep import BranchSweep
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.grid import BranchGrid, Grid
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Setting
from vit_memory.trunk import patch_mean

RECIPE = replace(Recipe.reader(), steps=8, batch=8, learning_rates=(2e-3, 8e-3), evaluate_every=4)
METHODS = [{"regime": "head"}, {"regime": "class"}, {"cells": 2}, READER]


def on_new_branches(backbone, methods=METHODS):  # noqa: F811
    """Tasks of several regimes, on branches of several lengths."""
    branches = [
        new_branch(backbone, "tint", blocks=1 + i % 3, rank=2 + i, gains=bool(i % 2), generator=seeded())
        for i in range(len(methods))
    ]
    tasks = [
        new_task(backbone, "tint", LABELS, branch=branch, generator=seeded(), **method)
        for branch, method in zip(branches, methods, strict=True)
    ]
    return tasks, branches


def seeded():
    return torch.Generator().manual_seed(5)


def train(backbone, tasks, branches, recipe=RECIPE, *, callbacks=None, train_branches=True, parents=(), **options):  # noqa: F811
    return fit(
        backbone,
        tasks,
        coloured(20, 1),
        coloured(9, 2),
        recipe,
        parents=parents,
        branches=branches,
        train_branches=train_branches,
        options=TrainingOptions(**options),
        callbacks=callbacks,
    )


def digests(result):
    return [(one.task.digest, one.branch and one.branch.digest, one.score) for one in result.settings]


def test_branch_and_task_learn_together_and_answer_as_they_were_scored(backbone):  # noqa: F811
    before = {name: weight.clone() for name, weight in backbone.model.named_parameters()}
    tasks, branches = on_new_branches(backbone)
    result = train(backbone, tasks, branches, replace(RECIPE, steps=30, evaluate_every=10))
    assert all(torch.equal(before[name], weight) for name, weight in backbone.model.named_parameters())
    assert len(result.settings) == 8
    assert max(one.score for one in result.settings) > 0.5
    validation = coloured(9, 2)
    pixels = torch.stack(_images(validation))
    for one in result.settings:
        untrained = one.setting.branch.tensors()
        assert one.task.branch == one.branch.ref
        assert all(not torch.equal(value, untrained[name]) for name, value in one.branch.tensors().items())
        assert one.branch.record.metrics == {"validation_accuracy": one.score}
        answers = MemoryViT(backbone, [one.task], [one.branch])(pixels)["tint"].argmax(1)
        assert float((answers == torch.as_tensor(validation.targets)).float().mean()) == pytest.approx(one.score)


def _images(split):
    return [image for batch in Loader(split, EvalTransform(FACTS), 64).batches() for image in batch.images]


@pytest.mark.parametrize("variant", ["vit", "dinov2", "dinov3-vit", "siglip-vision", "bundled"])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_the_dense_reference(variant, method):
    own = load_backbone(tiny_backbone(variant).model, preprocessing=FACTS)
    branch = trained_branch(own, "t", blocks=2, rank=2, gains=True)
    task = trained(own, "t", labels=LABELS, branch=branch, **method)
    sweep = BranchSweep(own, [Setting(task, 0.1, branch=branch)], TaskGraph(), Recipe(optimiser="adamw"))
    pixels, targets = torch.randn(4, 3, 32, 32, generator=seeded()), torch.tensor([0, 1, 2, 0])
    sweep.leaves()
    _, gradients = sweep.backward(sweep.encode(pixels), targets)
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(sweep.leaves(), gradients, strict=True)}

    leaves = {name: value.clone().requires_grad_() for name, value in branch.tensors().items()}
    low_rank = {
        name: replace(update, A=leaves[f"{name}.lora_A"], B=leaves[f"{name}.lora_B"])
        for name, update in branch.adapter.low_rank.items()
    }
    with_graph = replace(branch, adapter=replace(branch.adapter, gains=leaves["gains"], low_rank=low_rank))
    graph = TaskGraph([task], [branch])
    readers = [task] if task.class_token is not None else []
    finals, outputs = dense_pass(
        own.roles,
        pixels,
        torch.stack([reader.class_token for reader in readers]) if readers else torch.zeros(0, own.width),
        task.memory,
        "memory",
        lambda N: rule(N, readers, graph),
        learned=[reader.reader for reader in readers],
        branches=[with_graph],
    )
    feature = finals[1].feature
    if readers:
        parts = [outputs[:, -1 - block, 0] for block in range(task.read_out.blocks)]
        parts += [patch_mean(own.roles, finals[1])] * task.read_out.patches
        feature = torch.cat(parts, dim=1)
    loss = F.cross_entropy(task.answer(feature), targets, reduction="sum")
    for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        mine = by_leaf[id(sweep.stacks[f"branch.0.{name}"].values)]
        torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5)


def test_each_setting_with_a_branch_ends_with_the_weights_of_its_solo_run(backbone):  # noqa: F811
    tasks, branches = on_new_branches(backbone)
    together = train(backbone, tasks, branches)
    for one in together.settings:
        alone = replace(RECIPE, learning_rates=(one.setting.learning_rate,))
        solo = train(backbone, [one.setting.task], [one.setting.branch], alone).settings[0]
        pairs = [*zip(one.task.tensors().values(), solo.task.tensors().values(), strict=True)]
        pairs += zip(one.branch.tensors().values(), solo.branch.tensors().values(), strict=True)
        assert max(worst(a, b) for a, b in pairs if a.numel()) <= 1e-5
        assert one.score == solo.score


def assert_same_to_rounding(result, other):
    """The same tasks and branches, to rounding.

    A store is filled in larger batches than the chunks of a step, and some processors round those otherwise.
    """
    for a, b in zip(result.settings, other.settings, strict=True):
        branches = [] if a.branch is None else [(a.branch, b.branch)]
        for one, same in (*branches, *zip(a.tasks, b.tasks, strict=True)):
            for name, value in one.tensors().items():
                torch.testing.assert_close(value, same.tensors()[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["ram", "disk"])
@pytest.mark.parametrize("frozen", [False, True])
def test_stored_training_ends_as_live_training_does(backbone, tmp_path, mode, frozen):  # noqa: F811
    tasks, branches = on_new_branches(backbone)
    parents = ()
    if frozen:
        branches = [trained_branch(backbone, "birds", blocks=2, rank=3), trained_branch(backbone, "all", blocks=3)]
        parents = (trained(backbone, "p", cells=2, branch=branches[1]), trained(backbone, "o", regime="class"))
        tasks = [
            new_task(backbone, "tint", LABELS, branch=branches[0], parents=parents, generator=seeded(), **method)
            for method in METHODS
        ]
    options = {"train_branches": not frozen, "parents": parents}
    live = train(backbone, tasks, branches, cache=Cache("off"), **options)
    cache = Cache(mode, "float32", folder=tmp_path)
    stored = [train(backbone, tasks, branches, cache=cache, **options) for _ in range(2)]  # then the store is ready
    assert_same_to_rounding(stored[0], live)
    assert digests(stored[1]) == digests(stored[0])


class Stop(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("mode", ["off", "disk"])
def test_resuming_ends_with_the_same_bits(backbone, tmp_path, mode):  # noqa: F811
    tasks, branches = on_new_branches(backbone)
    whole = train(backbone, tasks, branches, cache=Cache(mode, folder=tmp_path / "a"))

    def stop(progress):
        if progress.stage == "training" and progress.step == 5:
            raise Stop

    options = {
        "cache": Cache(mode, folder=tmp_path / "b"),
        "checkpoint": tmp_path / "checkpoint",
        "checkpoint_every": 2,
    }
    with pytest.raises(Stop):
        train(backbone, tasks, branches, callbacks=Callbacks(stop), **options)
    assert digests(train(backbone, tasks, branches, resume=True, **options)) == digests(whole)
    frozen = [replace(branch, name=f"b{i}") for i, branch in enumerate(branches)]
    with pytest.raises(TrainingError, match="it belongs to another training"):  # the same tasks, on frozen branches
        train(backbone, tasks, frozen, resume=True, train_branches=False, **options)


def test_tasks_on_a_frozen_branch_answer_as_they_were_trained_also_across_trunks(backbone):  # noqa: F811
    branch = trained_branch(backbone, "birds", blocks=2, rank=3, gains=True)
    before = branch.digest
    parents = [trained(backbone, "below", cells=2), trained(backbone, "beside", cells=1, branch=branch)]
    for own in (branch, None):  # a task on the branch extends one on the trunk, and the reverse
        tasks = [
            new_task(backbone, "tint", LABELS, branch=own, parents=parents, generator=seeded(), **method)
            for method in METHODS
        ]
        result = train(backbone, tasks, [branch], parents=parents, train_branches=False)
        assert branch.digest == before
        for one in result.settings:
            assert one.branch is None
            assert one.task.branch == (None if own is None else branch.ref)
            model = MemoryViT(backbone, [*parents, one.task], [branch])
            right = model(torch.stack(_images(coloured(9, 2))))["tint"].argmax(1)
            assert float((right == torch.as_tensor(coloured(9, 2).targets)).float().mean()) == pytest.approx(one.score)


def test_while_a_branch_trains_only_the_tokens_that_enter_it_are_stored(backbone):  # noqa: F811
    """N·D numbers per view for heads, against 2·L·N·D of a trunk; class tokens also read what is below."""
    branch = new_branch(backbone, "tint", blocks=2, rank=2)
    sizes = {}
    for method in ({"regime": "head"}, {"regime": "class"}):
        task = new_task(backbone, "tint", LABELS, branch=branch, **method)
        sweep = BranchSweep(backbone, [Setting(task, 0.1, branch=branch)], TaskGraph(), Recipe(optimiser="adamw"))
        sizes[method["regime"]] = {name: part.shape for name, part in sweep.stored_rows((32, 32)).parts.items()}
    tokens = 1 + (32 // backbone.roles.patch_size[0]) ** 2
    assert sizes["head"] == {"tokens.bin": (1, tokens, 32)}
    assert sizes["class"] == {"tokens.bin": (1, tokens, 32), "trunks.bin": (1, 2, 4, tokens, 8)}


def test_what_cannot_be_trained_is_refused_before_any_work(backbone, monkeypatch):  # noqa: F811
    tasks, branches = on_new_branches(backbone)
    elsewhere = trained_branch(backbone, "elsewhere", blocks=1)
    for stands_on in (None, elsewhere):  # whatever trunk the parent reads
        parent = trained(backbone, "p", branch=stands_on)
        child = new_task(backbone, "tint", LABELS, regime="head", branch=branches[0], parents=[parent])
        for given in ([parent], []):
            with pytest.raises(
                TrainingError, match=r"while a branch is trained, .* cannot extend others \(p\).*--branch"
            ):
                train(backbone, [child], branches[:1], parents=given)
    plain = new_task(backbone, "tint", LABELS)
    with pytest.raises(TrainingError, match=r"has no branch to train; all settings need one"):
        train(backbone, [tasks[0], plain], branches)
    with pytest.raises(GraphError, match=r"'tint' stands on branch 'tint' \(digest .*\), not attached"):
        train(backbone, tasks[:1], [], train_branches=False)
    monkeypatch.setattr(branch_sweep, "free_memory", lambda: 10_000)
    with pytest.raises(TrainingError, match=r"training 8 branches of 14 blocks in all needs .* free: 10 kB memory"):
        train(backbone, tasks, branches)


def test_a_grid_of_branches_has_every_combination_once(backbone):  # noqa: F811
    grid = Grid(regimes=("head",), branch_grid=BranchGrid((1, 2, 1), (2, 4), projections=(("q", "v"), ("v", "q"))))
    branches = grid.branch_grid.branches(backbone, "tint", 0)
    assert [branch.method for branch in branches] == [
        "last 1 block, rank 2",
        "last 1 block, rank 4",
        "last 2 blocks, rank 2",
        "last 2 blocks, rank 4",
    ]
    assert grid.record()["branch_grid"]["blocks"] == (1, 2, 1)
    assert "branch_grid" not in Grid().record()
