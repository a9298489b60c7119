"""One branch trained on several datasets at once: gradients add up, everything else belongs to one dataset."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from builders import worst
from training.test_branch_training import RECIPE, Stop, assert_same_to_rounding, digests, seeded
from training.test_sweep import FACTS, LABELS, backbone, coloured  # noqa: F401 - a fixture
from vit_memory import (
    MemoryViT,
    TrainingError,
    fit,
    load_branch,
    load_task,
    new_branch,
    new_task,
    save_branch,
    save_task,
)
from vit_memory.data.loading import Loader
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.fit_branch import TaskData, fit_branch
from vit_memory.training.options import TrainingOptions


def as_labels(split):
    """Two labels per image: its colour, and whether the colour is green or blue."""
    present = np.stack([split.targets == 0, split.targets > 0], axis=1).astype(np.float32)
    return Split.of(split.images, present, "multi-label")


def as_values(split):
    return Split.of(split.images, split.targets[:, None].astype(np.float64), "regression")


def domain(backbone, regime="class"):  # noqa: F811
    """Three datasets of three kinds and sizes."""

    def task(name, labels, kind):
        return new_task(backbone, name, labels, regime=regime, kind=kind, generator=seeded())

    return [
        TaskData(task("tint", LABELS, "single-label"), coloured(24, 1), coloured(9, 2)),
        TaskData(task("some", ("red", "other"), "multi-label"), as_labels(coloured(15, 3)), as_labels(coloured(12, 4))),
        TaskData(task("value", ("v",), "regression"), as_values(coloured(12, 5)), as_values(coloured(6, 6))),
    ]


def branches(backbone):  # noqa: F811
    return [new_branch(backbone, "all", blocks=blocks, rank=2, generator=seeded()) for blocks in (1, 3)]


def train(backbone, data, recipe=RECIPE, *, callbacks=None, **options):  # noqa: F811
    options = TrainingOptions(**options)
    return fit_branch(backbone, branches(backbone), data, recipe, options=options, callbacks=callbacks)


def all_digests(result):
    return [([task.digest for task in one.tasks], one.branch.digest, one.score) for one in result.settings]


@pytest.mark.parametrize("regime", ["head", "class", "memory"])
def test_a_branch_learns_from_datasets_of_every_kind_and_answers_as_it_was_scored(backbone, regime):  # noqa: F811
    data = domain(backbone, regime)
    result = train(backbone, data, replace(RECIPE, steps=40, evaluate_every=10))
    assert result.metric == "mean score"
    assert len(result.settings) == 4
    for one in result.settings:
        model = MemoryViT(backbone, one.tasks, [one.branch])
        assert [task.name for task in one.tasks] == ["tint", "some", "value"]
        own = [next(iter(task.record.metrics.values())) for task in one.tasks]
        assert one.score == pytest.approx(np.mean(own))
        assert set(one.branch.record.metrics.values()) == {one.score, *own}
        assert one.parameters == one.branch.parameters + sum(task.parameters for task in one.tasks)
        pixels = torch.cat([b.images for b in Loader(data[0].validation, EvalTransform(FACTS), 64).batches()])
        right = model(pixels)["tint"].argmax(1).numpy() == data[0].validation.targets
        assert right.mean() == pytest.approx(own[0])
    best = result.best
    assert len(best.tasks[1].thresholds) == 2
    assert best.tasks[2].target_scale is not None
    assert next(iter(best.tasks[0].record.metrics.values())) > 0.5


def test_one_dataset_is_trained_as_fit_trains_it(backbone):  # noqa: F811
    data = domain(backbone)[:1]
    result = train(backbone, data)
    tasks = [replace(data[0].task, branch=branch.ref) for branch in branches(backbone)]
    alone = fit(
        backbone, tasks, data[0].train, data[0].validation, RECIPE, branches=branches(backbone), train_branches=True
    )
    assert digests(result) == digests(alone)


def test_a_branch_gets_the_sum_of_the_gradients_and_a_task_only_its_own(backbone):  # noqa: F811
    """With plain gradient steps and no clipping, one step moves the branch by the sum of what each dataset asks."""
    recipe = replace(RECIPE, steps=1, batch=36, optimiser="sgd", learning_rates=(0.1,), clip=None, warmup=0)
    recipe = replace(recipe, evaluate_every=1, keep_best=False, augment="none", momentum=0.0)
    data = [replace(one, train=one.train.select(range(12))) for one in domain(backbone)]
    together = train(backbone, data, recipe).settings[0]
    moved = {name: value - together.setting.branch.tensors()[name] for name, value in together.branch.tensors().items()}
    total = {name: torch.zeros_like(value) for name, value in moved.items()}
    for i, one in enumerate(data):
        alone = train(backbone, [one], replace(recipe, batch=12)).settings[0]
        for name, value in alone.branch.tensors().items():
            total[name] += (value - alone.setting.branch.tensors()[name]) * 12 / 36
        for name, before in one.task.tensors().items():
            step, alone_step = (task.tensors()[name] - before for task in (together.tasks[i], alone.task))
            torch.testing.assert_close(step * 3, alone_step, rtol=1e-3, atol=1e-6)
    for name, value in moved.items():
        torch.testing.assert_close(value, total[name], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("mode", ["ram", "disk"])
def test_stored_training_ends_as_live_training_does_and_resumed_training_with_the_same_bits(backbone, tmp_path, mode):  # noqa: F811
    data = domain(backbone)
    live = train(backbone, data, cache=Cache("off"))
    cache = Cache(mode, "float32", folder=tmp_path / "stores")
    stored = train(backbone, data, cache=cache)
    assert_same_to_rounding(stored, live)

    def stop(progress):
        if progress.stage == "training" and progress.step == 5:
            raise Stop

    options = {"cache": cache, "checkpoint": tmp_path / "cut", "checkpoint_every": 2}
    with pytest.raises(Stop):
        train(backbone, data, callbacks=Callbacks(stop), **options)
    for _ in range(2):  # the second time nothing is left to do
        assert all_digests(train(backbone, data, resume=True, **options)) == all_digests(stored)
    with pytest.raises(TrainingError, match="it belongs to another training"):
        train(backbone, data[:2], resume=True, **options)


def test_what_cannot_be_trained_together_is_refused(backbone):  # noqa: F811
    data = domain(backbone)
    with pytest.raises(TrainingError, match="give one or more tasks, each with a name of its own"):
        train(backbone, [data[0], data[0]])
    with pytest.raises(TrainingError, match="a batch of 2 images for 3 datasets; give each at least one"):
        train(backbone, data, replace(RECIPE, batch=2))
    with pytest.raises(TrainingError, match="no tasks"):
        train(backbone, [])


def test_a_diverged_setting_of_a_domain_is_stopped_while_the_others_go_on(backbone, caplog):  # noqa: F811
    result = train(backbone, domain(backbone), replace(RECIPE, learning_rates=(2e-3, 1e12), clip=None))
    assert [one.score is None for one in result.settings] == [False, True, False, True]
    assert [one.parameters for one in result.settings[1::2]] == [one.parameters for one in result.settings[::2]]
    assert "diverged" in caplog.text
    assert worst(result.best.task.head_weight, torch.zeros(3, 32)) < 10


def test_the_files_of_a_domain(backbone, tmp_path):  # noqa: F811
    best = train(backbone, domain(backbone)).best
    save_branch(best.branch, tmp_path / "all.branch.safetensors")
    for task in best.tasks:
        save_task(task, tmp_path / f"{task.name}.safetensors")
    branch = load_branch(tmp_path / "all.branch.safetensors")
    assert all(load_task(tmp_path / f"{task.name}.safetensors").branch == branch.ref for task in best.tasks)
