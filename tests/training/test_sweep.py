"""Promise 5, repeatable: a setting in a sweep is the setting alone, and training leaves everything else bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from builders import images, tiny_backbone, trained, variant_params
from vit_memory import MemoryViT, Preprocessing, load_backbone, new_task
from vit_memory.adapter import Adapter, LowRank
from vit_memory.data.images import ImageArray
from vit_memory.data.splits import Split
from vit_memory.errors import BackboneMismatch, TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.fit import fit
from vit_memory.training.grid import Grid
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import RateFactors, Recipe
from vit_memory.training.sweep import Setting
from vit_memory.training.trunk_sweep import TrunkSweep
from vit_memory.trunk import run_trunk

FACTS = Preprocessing((32, 32), None, (0.5,) * 3, (0.25,) * 3, "bilinear")
LABELS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def backbone():
    return load_backbone(tiny_backbone().model, preprocessing=FACTS)


def coloured(count, seed):
    """Noise with a tint: something to learn, and not at once."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    pixels = rng.integers(60, 200, (count, 32, 32, 3))
    pixels[np.arange(count), :, :, labels] += 25
    return Split.of(ImageArray.whole("coloured", pixels.astype(np.uint8)), labels)


READER = {"regime": "reader", "rank": 4, "gains": True, "cells": 2, "read_out": "blocks:2+patches"}


def fresh(backbone, cells=3, regime="memory", seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"cells": cells, **options} if regime == "memory" else options
    return new_task(backbone, "tint", LABELS, regime=regime, generator=generator, **options)


def parts(task):
    return task.tensors()


def assert_same_weights(a, b, atol):
    for (name, x), y in zip(parts(a).items(), parts(b).values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


TWELVE = [(cells, seed) for cells in (0, 1, 5) for seed in (0, 1)]


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_each_of_twelve_settings_ends_with_the_weights_of_its_own_solo_run(backbone, optimiser):
    recipe = Recipe(
        steps=12, batch=8, optimiser=optimiser, learning_rates=(0.05, 0.2) if optimiser == "sgd" else (1e-3, 5e-3)
    )
    tasks = [fresh(backbone, cells, seed=seed) for cells, seed in TWELVE]
    train, validation = coloured(24, 1), coloured(12, 2)
    together = fit(backbone, tasks, train, validation, recipe)
    assert len(together.settings) == 12
    for result in together.settings:
        alone = replace(recipe, learning_rates=(result.setting.learning_rate,))
        solo = fit(backbone, [result.setting.task], train, validation, alone).settings[0]
        assert_same_weights(result.task, solo.task, atol=1e-5)
        assert result.score == solo.score


def test_each_reader_of_a_sweep_ends_with_the_weights_of_its_own_solo_run(backbone):
    """Readers of several ranks and read-outs beside memory and heads: stacked where they are alike, apart where not."""
    recipe = replace(Recipe.reader(), steps=12, batch=8, learning_rates=(1e-3, 5e-3), evaluate_every=4)
    tasks = [
        fresh(backbone, **READER),
        fresh(backbone, regime="reader", rank=4, projections=("q", "fc1")),
        fresh(backbone, regime="reader", rank=2, seed=1),
        fresh(backbone, regime="reader", gains=True, read_out="patches"),
        fresh(backbone),
        fresh(backbone, regime="head"),
    ]
    train, validation = coloured(24, 1), coloured(12, 2)
    together = fit(backbone, tasks, train, validation, recipe)
    for result in together.settings:
        alone = replace(recipe, learning_rates=(result.setting.learning_rate,))
        solo = fit(backbone, [result.setting.task], train, validation, alone).settings[0]
        assert_same_weights(result.task, solo.task, atol=1e-5)
        assert result.score == solo.score
        untrained = dict(parts(result.setting.task))
        assert all(
            not torch.equal(value, untrained[name]) for name, value in parts(result.task).items() if value.numel()
        )


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_the_optimisers_are_those_of_torch_with_a_rate_for_every_part(backbone, optimiser):
    recipe = Recipe(steps=6, optimiser=optimiser, learning_rates=(0.01,), weight_decays=(0.1,), warmup=2, clip=0.5)
    task = trained(backbone, "tint", labels=LABELS, regime="reader", rank=3, projections=("q",), gains=True, cells=2)
    sweep = TrunkSweep(backbone, [Setting(task, 0.01, 0.1)], TaskGraph(), recipe)
    theirs = {name: value.clone().requires_grad_() for name, value in parts(task).items()}
    stacks = dict(
        zip(("class_token", "memory", "head.weight", "head.bias", *list(theirs)[4:]), sweep.stacks, strict=True)
    )
    part_of = {
        "class_token": "token",
        "memory": "cells",
        "gains": "gains",
        "q.lora_A": "low_rank",
        "q.lora_B": "low_rank",
    }
    factors = {name: recipe.rate_factor(part_of.get(name, "head")) for name in theirs}
    groups = [{"params": [value], "lr": 0.01 * factors[name]} for name, value in theirs.items()]
    reference = (
        torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
        if optimiser == "sgd"
        else torch.optim.AdamW(groups, weight_decay=0.1)
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(recipe.steps):
        for name, value in theirs.items():
            value.grad = torch.randn(value.shape, generator=generator)
            values = sweep.stacks[stacks[name]].values
            values.grad = value.grad.reshape(values.shape).clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), recipe.clip)
        for group, factor in zip(reference.param_groups, factors.values(), strict=True):
            group["lr"] = 0.01 * factor * recipe.lr_factor(step)
        reference.step()
        assert sweep.step(step, torch.zeros(1)) == []
    for name, value in parts(sweep.tasks()[0]).items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-5, atol=1e-6)


def test_what_is_trained_is_what_the_model_answers_also_for_extensions(backbone):
    parent = trained(backbone, "colour", cells=2)
    grandparent = trained(backbone, "hue", cells=1)
    parent = replace(parent, parents=("hue",))
    child = fresh(backbone, 3, parents=["colour"])
    child = replace(trained(backbone, "tint", labels=LABELS, cells=3), parents=child.parents)
    plain = trained(backbone, "tint", labels=LABELS, regime="class")
    learned = trained(backbone, "colour", regime="reader", rank=3, gains=True, cells=1)
    reader = replace(trained(backbone, "tint", labels=LABELS, **READER), parents=("colour",))
    batch = images(4)
    trunk = run_trunk(backbone.roles, batch)
    for task, above in ((child, [grandparent, parent]), (plain, []), (reader, [learned])):
        sweep = TrunkSweep(backbone, [Setting(task, 0.1)] * 2, TaskGraph(above), Recipe())
        answers = MemoryViT(backbone, [*above, sweep.tasks()[1]])(batch)["tint"]
        for logits in sweep.logits(trunk):
            torch.testing.assert_close(logits, answers, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", variant_params())
def test_gradients_are_those_of_the_dense_reference_also_in_buffers_used_before(variant):
    backbone = tiny_backbone(variant)
    kinds = [{"cells": 3}, {**READER, "projections": ("q", "v", "o")}]
    for task in (trained(backbone, "tint", labels=LABELS, **kind) for kind in kinds):
        _assert_gradients_of_the_reference(backbone, task)


def _assert_gradients_of_the_reference(backbone, task):
    from vit_memory.reference import dense_forward

    sweep = TrunkSweep(backbone, [Setting(task, 0.1)], TaskGraph(), Recipe())
    for batch, labels in ((images(5, seed=1), [0, 1, 2, 0, 1]), (images(4), [0, 1, 2, 0])):
        sweep.accumulate(sweep.backward(sweep.encode(batch), torch.tensor(labels))[1])
        gradients = [gradient.clone() for gradient in sweep.gradients()]
        for stack in sweep.stacks.values():
            stack.values.grad = None
        leaves = {name: value.clone().requires_grad_() for name, value in parts(task).items()}
        with_graph = dense_forward.__wrapped__  # without its no_grad
        logits = with_graph(backbone, [with_tensors(task, leaves)], batch)["tint"]
        loss = F.cross_entropy(logits, torch.tensor(labels), reduction="sum")
        expected = torch.autograd.grad(loss, list(leaves.values()))
        for ours, (name, theirs) in zip(gradients, zip(leaves, expected, strict=True), strict=True):
            if name == "head.weight":  # ours has the parts of a read-out apart: (parts, C, D)
                ours = torch.cat(ours.unbind(0), dim=1)  # noqa: PLW2901
            torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=1e-4, atol=2e-5)


def with_tensors(task, tensors):
    """The task with other values: the inverse of `Task.tensors`."""
    reader = task.reader and Adapter(
        tensors.get("gains"),
        {name: LowRank(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) for name in task.reader.low_rank},
    )
    return replace(
        task,
        class_token=tensors["class_token"],
        memory=tensors["memory"],
        head_weight=tensors["head.weight"],
        head_bias=tensors["head.bias"],
        reader=reader,
    )


def test_a_graph_whose_buffers_were_used_again_is_noticed(backbone):
    task = trained(backbone, "tint", labels=LABELS, cells=3)
    sweep = TrunkSweep(backbone, [Setting(task, 0.1)], TaskGraph(), Recipe())
    first = sweep.logits(run_trunk(backbone.roles, images(4)))
    sweep.logits(run_trunk(backbone.roles, images(4, seed=1)))
    with pytest.raises(RuntimeError, match="modified inplace"):
        first.sum().backward()


def test_training_learns_and_leaves_backbone_and_parents_bit_for_bit(backbone):
    parent = trained(backbone, "colour", cells=2)
    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    parent_before = {name: value.clone() for name, value in parts(parent).items()}
    seen: list[Progress] = []
    recipe = Recipe(steps=40, batch=16, learning_rates=(0.1, 0.3), evaluate_every=10, augment="none")
    tasks = [fresh(backbone, parents=[parent]), fresh(backbone, regime="class", parents=[parent])]
    result = fit(
        backbone, tasks, coloured(96, 1), coloured(48, 2), recipe, parents=[parent], callbacks=Callbacks(seen.append)
    )
    assert result.best.score > 0.8
    seen = [progress for progress in seen if progress.scores is not None]
    assert [progress.step for progress in seen] == [10, 20, 30, 40]
    assert np.nanmin(seen[-1].losses) < np.nanmin(seen[0].losses)
    for name, weight in backbone.model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert not any(weight.grad is not None for weight in backbone.model.parameters())
    for name, value in parts(parent).items():
        assert torch.equal(value, parent_before[name])
    assert result.best.task.record.metrics == {"validation_accuracy": result.best.score}
    assert result.best.task.record.recipe["learning_rates"] == [result.best.setting.learning_rate]


def test_the_same_seed_gives_the_same_bits_and_chunks_the_same_weights(backbone):
    recipe = Recipe(steps=6, batch=12, learning_rates=(0.1,))
    train, validation = coloured(20, 1), coloured(9, 2)

    def run(recipe, workers=0):
        options = TrainingOptions(workers=workers)
        return fit(backbone, [fresh(backbone)], train, validation, recipe, options=options).settings[0].task

    first = run(recipe)
    assert run(recipe).digest == run(recipe, workers=2).digest == first.digest
    assert run(replace(recipe, seed=1)).digest != first.digest
    assert_same_weights(run(replace(recipe, chunk=5)), first, atol=1e-5)


def test_a_setting_that_diverges_is_stopped_and_named_while_the_others_go_on(backbone, caplog):
    recipe = Recipe(steps=8, batch=8, learning_rates=(0.1,), clip=None)
    broken = fresh(backbone)
    broken = replace(broken, memory=torch.full_like(broken.memory, 1e30))
    train, validation = coloured(16, 1), coloured(9, 2)
    together = fit(backbone, [fresh(backbone, seed=1), broken], train, validation, recipe)
    alone = fit(backbone, [fresh(backbone, seed=1)], train, validation, recipe)
    fine, stopped = together.settings
    assert stopped.score is None
    assert stopped.stopped_at == 1
    assert "diverged at step 1 and was stopped" in caplog.text
    assert_same_weights(fine.task, alone.settings[0].task, atol=1e-5)
    assert together.best is fine
    with pytest.raises(TrainingError, match=r"every setting diverged, the last at step 1: .*smaller learning rates"):
        fit(backbone, [broken], train, validation, recipe)


def test_a_setting_that_answers_nan_after_its_last_step_is_stopped_and_not_kept(backbone, caplog):
    """Its gradient was finite, its new weights are not: no later step would notice."""
    recipe = Recipe(steps=1, batch=8, learning_rates=(0.1, 1e38), clip=None)
    task = trained(backbone, "tint", labels=LABELS, regime="class")
    result = fit(backbone, [task], coloured(16, 1), coloured(9, 2), recipe)
    fine, stopped = result.settings
    assert (stopped.score, stopped.stopped_at) == (None, 1)
    assert result.best is fine
    assert "rate 1e+38 diverged at step 1 and was stopped" in caplog.text
    with pytest.raises(TrainingError, match="every setting diverged, the last at step 1"):
        fit(backbone, [task], coloured(16, 1), coloured(9, 2), replace(recipe, learning_rates=(1e38,)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tasks_are_trained_on_a_backbone_in_half_precision(dtype):
    """Trained parameters stay float32; with and without parents, whose tokens are in the backbone's precision."""
    backbone = load_backbone(tiny_backbone().model, preprocessing=FACTS, dtype=dtype)
    parent = trained(backbone, "colour", regime="reader", rank=2, gains=True)
    for parents in ([], [parent]):
        methods = [{}, {"regime": "class"}, {"regime": "head"}, READER]
        tasks = [fresh(backbone, parents=parents, **method) for method in methods]
        recipe = replace(Recipe.reader(), steps=4, batch=8, evaluate_every=2)
        result = fit(backbone, tasks, coloured(16, 1), coloured(9, 2), recipe, parents=parents)
        assert all(one.score is not None for one in result.settings)
        assert all(values.dtype == torch.float32 for values in parts(result.settings[-1].task).values())


def test_equal_points_of_a_grid_are_one_task(backbone):
    grid = Grid(
        ("reader", "class", "memory"),
        cells=(0, 2),
        projections=(("q", "o"), ("o", "q")),
        read_outs=("final", "blocks:1", "patches", "final+patches"),
        ranks=(None, 4),
    )
    tasks = grid.tasks(backbone, "tint", LABELS, ())
    assert [task.method for task in tasks] == [
        "gains",
        "gains + patches",
        "rank 4 + gains",
        "rank 4 + gains + patches",
        "class",
        "2 cells",
    ]
    assert len({task.digest for task in tasks}) == 6


def test_a_recipe_is_a_value_and_its_record_leaves_out_what_changes_nothing():
    assert hash(Recipe()) == hash(Recipe(steps=300))
    assert "rate_factors" not in Recipe().record()
    assert "keep_best" not in Recipe().record()
    assert Recipe(optimiser="adamw").record()["rate_factors"]["gains"] == 10.0
    assert "rate_factors" not in Recipe(optimiser="adamw", rate_factors=RateFactors()).record()
    with pytest.raises(TrainingError, match=r"rate_factors is RateFactors\(head=-1.0.*expected factors of 0 or more"):
        Recipe(rate_factors=RateFactors(head=-1.0))


def test_what_cannot_be_trained_is_refused_before_any_work(backbone):
    train, validation = coloured(12, 1), coloured(6, 2)

    def refused(match, tasks, train=train, validation=validation, error=TrainingError, **options):
        with pytest.raises(error, match=match):
            fit(backbone, tasks, train, validation, Recipe(steps=1), **options)

    refused("no tasks to train", [])
    refused("the validation split holds no images", [fresh(backbone)], validation=validation.select([]))
    refused("all training images show 'red'", [fresh(backbone)], train=train.select([0, 3, 6]))
    two = new_task(backbone, "tint", ["a", "b"])
    refused("label number 2, but task 'tint' answers 2: a, b", [two])
    refused("cannot be trained at once", [fresh(backbone), fresh(backbone, regime="memory-unmasked")])
    refused("extends colour, but the given parents are none", [fresh(backbone, parents=["colour"])])
    refused("but the given parents are other", [fresh(backbone)], parents=[trained(backbone, "other")])
    elsewhere = load_backbone(tiny_backbone("deit").model)
    refused("task 'tint' was trained on", [new_task(elsewhere, "tint", LABELS)], error=BackboneMismatch)
    stranger = trained(elsewhere, "stranger")
    child = fresh(backbone, parents=[stranger])
    refused("task 'stranger' was trained on", [child], parents=[stranger], error=BackboneMismatch)
    with pytest.raises(TrainingError, match="does not say how its images are prepared"):
        fit(tiny_backbone(), [new_task(tiny_backbone(), "tint", LABELS)], train, validation)
    with pytest.raises(TrainingError, match=r"steps is 0; expected 1 or more; learning_rates is \(\)"):
        Recipe(steps=0, learning_rates=())


def test_the_schedule_warms_up_linearly_and_falls_as_a_cosine_over_optimiser_steps():
    recipe = Recipe(steps=105, warmup=5)
    shares = [recipe.lr_factor(step) for step in range(105)]
    assert shares[:5] == [pytest.approx((i + 1) / 6) for i in range(5)]
    assert max(shares) == shares[5] == 1.0
    assert shares[55] == pytest.approx(0.5)
    assert shares[-1] < 0.001
    assert Recipe.paper().steps == 20_000
