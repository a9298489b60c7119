"""The regimes that do not compose: one loop trains them too, and the library's own model is the reference."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_sweep import FACTS, LABELS, backbone, coloured, fresh  # noqa: F401 - a fixture

from builders import images
from vit_memory import load_backbone, new_task
from vit_memory.data.loading import Loader
from vit_memory.data.transforms import TrainTransform
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.regimes import COMPOSABLE
from vit_memory.standalone import StandaloneModel
from vit_memory.training.batch_plan import plan_batches
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.fit import fit
from vit_memory.training.options import TrainingOptions
from vit_memory.training.ranks import Ranks
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import SWEEPS, build_sweep
from vit_memory.training.sweep import Setting
from vit_memory.training.trunk_sweep import TrunkSweep

RECIPE = Recipe(steps=40, batch=12, augment="none", learning_rates=(0.05, 0.2), evaluate_every=20)
NOT_COMPOSABLE = [regime for regime in SWEEPS if regime not in COMPOSABLE]


@pytest.mark.parametrize("regime", NOT_COMPOSABLE)
def test_a_regime_that_does_not_compose_learns_and_answers_as_it_was_scored(backbone, regime):  # noqa: F811
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    validation = coloured(30, 2)
    result = fit(backbone, [fresh(backbone, regime=regime)], coloured(60, 1), validation, RECIPE)
    assert result.storage == "off"
    assert result.best.score > 0.5  # of three colours
    for name, value in backbone.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model = StandaloneModel(result.best.backbone or backbone, result.best.task)
    assert result.best.task.backbone.fingerprint == model.backbone.fingerprint
    loader = Loader(validation, TrainTransform(FACTS, augment="none"), 30)
    (batch,) = loader.batches()
    right = (model(batch.images)["tint"].argmax(-1) == batch.targets).float().mean()
    assert float(right) == pytest.approx(result.best.score)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_full_fine_tuning_is_that_of_torch_and_the_library(optimiser):
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    library = ViTModel(
        ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32),
        add_pooling_layer=False,
    )
    ours = load_backbone(library, preprocessing=FACTS)
    train = coloured(24, 1)
    rate = 0.05 if optimiser == "sgd" else 1e-3
    recipe = Recipe(
        steps=6, batch=8, optimiser=optimiser, learning_rates=(rate,), weight_decays=(0.01,), augment="none", warmup=2
    )
    result = fit(ours, [new_task(ours, "tint", LABELS, regime="full")], train, coloured(9, 2), recipe).best
    assert result.parameters == result.task.parameters + sum(weight.numel() for weight in library.parameters())

    theirs, head = library.eval(), torch.nn.Linear(32, 3)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    parameters = [*theirs.parameters(), *head.parameters()]
    reference = (
        torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=0.01)
        if optimiser == "sgd"
        else torch.optim.AdamW(parameters, rate, weight_decay=0.01)
    )
    loader = Loader(train, TrainTransform(FACTS, augment="none"), 8)
    plan = list(plan_batches(24, recipe, 0, Ranks()))
    for step, batch in enumerate(loader.planned(plan, recipe.seed)):
        reference.zero_grad()
        F.cross_entropy(head(theirs(batch.images).last_hidden_state[:, 0]), batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        reference.param_groups[0]["lr"] = rate * recipe.lr_factor(step)
        reference.step()
    torch.testing.assert_close(result.task.head_weight, head.weight.detach(), rtol=0, atol=1e-4)
    tuned = result.backbone.model.state_dict()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(tuned[name], value, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_unmasked_gradients_are_those_of_numeric_differences(backbone):  # noqa: F811
    task = fresh(backbone, 2, regime="memory-unmasked")
    task = replace(task, head_weight=torch.randn(3, backbone.width, generator=torch.Generator().manual_seed(1)))
    sweep = build_sweep(backbone, [Setting(task, 0.1)], TaskGraph(), Recipe())
    batch, labels = images(3), torch.tensor([0, 1, 2])
    sweep.accumulate(sweep.backward(batch, labels)[1])
    values = sweep.stacks["cells"].values
    slope = values.grad.clone()
    direction = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            values.add_(sign * 1e-4 * direction)
            ends.append(float(sweep.objective.losses(sweep.logits(batch), labels)))
            values.sub_(sign * 1e-4 * direction)
    assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(float((slope * direction).sum()), rel=0.05)


def test_the_regimes_that_compose_are_those_that_train_on_one_trunk():
    assert {regime for regime, sweep in SWEEPS.items() if sweep is TrunkSweep} == COMPOSABLE


def test_what_a_regime_cannot_do_is_refused(backbone):  # noqa: F811
    parent = replace(fresh(backbone), name="colour")
    child = replace(fresh(backbone, regime="propagated"), parents=("colour",))
    with pytest.raises(TrainingError, match="only class, head, memory, reader tasks can extend others"):
        fit(backbone, [child], coloured(12, 1), coloured(6, 2), RECIPE, parents=[parent])
    with pytest.raises(TrainingError, match="only class, head, memory, reader share one pass"):
        fit(backbone, [fresh(backbone), fresh(backbone, regime="full")], coloured(12, 1), coloured(6, 2), RECIPE)


def test_early_stopping_ends_with_every_settings_best_evaluation_and_resuming_adds_nothing(backbone, tmp_path):  # noqa: F811
    recipe = Recipe(steps=400, batch=12, augment="none", learning_rates=(0.02, 0.3), evaluate_every=5, patience=3)
    evaluations = []
    arguments = (backbone, [fresh(backbone)], coloured(60, 1), coloured(30, 2), recipe)
    options = TrainingOptions(checkpoint=tmp_path / "checkpoint")
    callbacks = Callbacks(lambda progress: progress.scores and evaluations.append(progress.scores))
    result = fit(*arguments, options=options, callbacks=callbacks)
    resumed = fit(*arguments, options=replace(options, resume=True))
    assert [r.task.digest for r in resumed.settings] == [r.task.digest for r in result.settings]
    assert len(evaluations) < 80
    for i, setting in enumerate(result.settings):
        assert setting.score == max(scores[i] for scores in evaluations)
    assert max(max(scores) for scores in evaluations[:-3]) >= max(max(scores) for scores in evaluations[-3:])
    validation = coloured(30, 2)
    from vit_memory import MemoryViT

    (batch,) = Loader(validation, TrainTransform(FACTS, augment="none"), 30).batches()
    for setting in result.settings:
        answers = MemoryViT(backbone, [setting.task])(batch.images)["tint"].argmax(-1)
        assert float((answers == batch.targets).float().mean()) == pytest.approx(setting.score)
