"""Every kind of task, single-label, multi-label and regression, end to end: same pass, same promises, own scores."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from sklearn import metrics as sklearn

from builders import ROUNDING, images, library_model, tiny_backbone, trained, worst
from training.test_sweep import FACTS, assert_same_weights
from vit_memory import MemoryViT, load_backbone, load_task, new_task, save_task
from vit_memory.data.images import ImageArray
from vit_memory.data.splits import Split
from vit_memory.errors import BackboneMismatch, TaskError, TrainingError
from vit_memory.reference import dense_forward
from vit_memory.task import TargetScale
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.fit import fit
from vit_memory.training.objective import MultiLabel, Regression, SingleLabel
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe

KINDS = ("single-label", "multi-label", "regression")
LABELS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def backbone():
    return load_backbone(tiny_backbone().model, preprocessing=FACTS)


# ------------------------------------------------------------------------------------------- promises 1 to 4, mixed


@st.composite
def mixed_graphs(draw):
    """Any acyclic graph of up to six tasks of all kinds and regimes."""
    tasks = []
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(KINDS))
        regime = draw(st.sampled_from(["memory", "class", "head"]))
        parents = [task.name for task in tasks if draw(st.booleans())]
        task = trained(tiny_backbone(), f"task-{i}", regime=regime, parents=parents, kind=kind)
        if kind == "regression" and draw(st.booleans()):
            task = replace(task, target_scale=TargetScale((0.5, -1.0, 0.0), (0.7, 1.3, 1.0)))
        if kind == "multi-label" and draw(st.booleans()):
            task = replace(task, thresholds=(0.2, 0.5, 0.9))
        tasks.append(task)
    return draw(st.permutations(tasks))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tasks=mixed_graphs(), batch=st.integers(1, 3), half=st.booleans())
def test_promises_1_to_4_hold_for_graphs_that_mix_all_kinds(tmp_path_factory, tasks, batch, half):
    family, library = library_model("vit")
    backbone, pixels = tiny_backbone(), images(batch)
    model = MemoryViT(backbone, tasks)
    outputs, dense = model(pixels), dense_forward(backbone, tasks, pixels)
    with torch.no_grad():
        assert torch.equal(outputs.original.logits, family.library_forward(library, pixels)["logits"])
    folder = tmp_path_factory.mktemp("files")
    for task in tasks:
        company = [model.tasks[name] for name in model.tasks.with_ancestors((task.name,))]
        alone = MemoryViT(backbone, company)(pixels, [task.name])[task.name]
        assert worst(outputs[task.name], dense[task.name]) <= ROUNDING
        assert worst(outputs[task.name], alone) <= ROUNDING
        path = folder / f"{task.name}.safetensors"
        save_task(task, path, half=half)
        again = load_task(path)
        assert (again.kind, again.thresholds, again.target_scale) == (task.kind, task.thresholds, task.target_scale)
        if not half:
            assert again.digest == task.digest
        with pytest.raises(BackboneMismatch):
            MemoryViT(tiny_backbone("deit"), [replace(again, parents=(), parent_digests={})])


def test_a_file_without_thresholds_or_scale_is_still_format_1_to_the_byte(tmp_path):
    plain = trained(tiny_backbone(), "plain", kind="regression")
    scaled = replace(plain, target_scale=TargetScale((1.0,) * 3, (2.0,) * 3))
    for task, version in ((plain, 1), (scaled, 2)):
        save_task(task, tmp_path / "task")
        assert f'"format":"vit-memory-task/{version}"'.encode() in (tmp_path / "task").read_bytes()[:400]
    save_task(plain, tmp_path / "task")
    assert b"target_scale" not in (tmp_path / "task").read_bytes()
    assert plain.digest != scaled.digest


def test_values_far_from_zero_keep_their_precision_in_half_files(tmp_path):
    """A year around 1987 has no two halves in float16; the scale is kept beside the head, in full."""
    task = trained(tiny_backbone(), "year", labels=["year"], kind="regression")
    task = replace(task, target_scale=TargetScale((1987.4,), (3.0,)))
    save_task(task, tmp_path / "full")
    save_task(task, tmp_path / "half", half=True)
    full, half = (
        MemoryViT(tiny_backbone(), [load_task(tmp_path / name)])(images(4))["year"] for name in ("full", "half")
    )
    assert full.dtype == torch.float32
    assert worst(full, half) < 0.02


def test_what_does_not_belong_to_a_kind_is_refused():
    task = trained(tiny_backbone(), "task", kind="multi-label")
    with pytest.raises(TaskError, match="a target scale belongs to regression tasks, this one is multi-label"):
        replace(task, target_scale=TargetScale((0.0,) * 3, (1.0,) * 3))
    with pytest.raises(TaskError, match="expected 3 thresholds between 0 and 1"):
        replace(task, thresholds=(0.5, 0.5))
    with pytest.raises(TaskError, match="standard deviation above 0 for each of 3 values"):
        replace(task, kind="regression", target_scale=TargetScale((0.0,) * 3, (1.0, 0.0, 1.0)))


# ------------------------------------------------------------------------------------------------ promise 5, training


def tinted(count, seed, kind):
    """Noise with a tint in some of the three colours: which, which of them, or how much of each."""
    rng = np.random.default_rng(seed)
    strength = rng.uniform(0, 1, (count, 3)).astype(np.float32)
    if kind == "single-label":
        targets = np.arange(count) % 3
        strength = np.eye(3, dtype=np.float32)[targets]
    elif kind == "multi-label":
        targets = (strength > 0.5).astype(np.float32)
        strength = targets
    else:
        targets = 100 + 10 * strength.astype(np.float64)
    pixels = rng.integers(60, 160, (count, 32, 32, 3)) + 60 * strength[:, None, None, :]
    return Split.of(ImageArray.whole("tinted", pixels.astype(np.uint8)), targets, kind)


def fresh(backbone, kind, cells=2, seed=0, parents=()):
    generator = torch.Generator().manual_seed(seed)
    return new_task(backbone, "tint", LABELS, cells=cells, kind=kind, generator=generator, parents=parents)


RECIPE = Recipe(steps=10, batch=12, learning_rates=(0.05, 0.2), evaluate_every=5, views=2)


@pytest.mark.parametrize("kind", KINDS)
def test_promise_5_holds_for_every_kind_on_a_parent_of_another(backbone, tmp_path, kind):
    parent = trained(backbone, "parent", kind=KINDS[(KINDS.index(kind) + 1) % 3])
    tasks = [fresh(backbone, kind, 2, parents=[parent]), fresh(backbone, kind, 4, 1, parents=[parent])]
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    data = (tinted(40, 1, kind), tinted(20, 2, kind))

    def run(tasks=tasks, recipe=RECIPE, callbacks=None, **options):
        options = TrainingOptions(**options)
        return fit(backbone, tasks, *data, recipe, parents=[parent], options=options, callbacks=callbacks)

    live, again = run(cache=Cache("off")), run(cache=Cache("off"), workers=2)
    assert [r.task.digest for r in live.settings] == [r.task.digest for r in again.settings]
    assert all(torch.equal(value, before[name]) for name, value in backbone.model.state_dict().items())
    stored = run(cache=Cache("disk", "float32", tmp_path / "store"))
    for a, b in zip(live.settings, stored.settings, strict=True):
        assert_same_weights(a.task, b.task, atol=1e-5)
    solo = run([tasks[1]], replace(RECIPE, learning_rates=(0.2,)), cache=Cache("off")).best
    assert_same_weights(solo.task, live.settings[3].task, atol=1e-5)

    class Stop(Exception):  # noqa: N818
        pass

    def stop(progress):
        if progress.step == 7:
            raise Stop

    with pytest.raises(Stop):
        run(cache=Cache("off"), callbacks=Callbacks(stop), checkpoint=tmp_path / "c", checkpoint_every=3)
    for _ in range(2):  # the second time there is nothing left to do
        resumed = run(cache=Cache("off"), checkpoint=tmp_path / "c", resume=True)
        assert [r.task.digest for r in resumed.settings] == [r.task.digest for r in live.settings]
        assert [r.score for r in resumed.settings] == [r.score for r in live.settings]


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_learns_and_its_score_is_that_of_the_model_and_scikit_learn(backbone, kind):
    validation = tinted(60, 2, kind)
    recipe = Recipe(steps=80, batch=24, learning_rates=(0.1, 0.3), evaluate_every=40, augment="none")
    result = fit(backbone, [fresh(backbone, kind, 5)], tinted(120, 1, kind), validation, recipe)
    assert result.metric == {"single-label": "accuracy", "multi-label": "mAP", "regression": "R²"}[kind]
    assert result.best.score > {"single-label": 0.8, "multi-label": 0.85, "regression": 0.5}[kind]
    from vit_memory.data.loading import Loader
    from vit_memory.data.transforms import EvalTransform

    (batch,) = Loader(validation, EvalTransform(FACTS), 60).batches()
    outputs = MemoryViT(backbone, [result.best.task])(batch.images)["tint"]
    expected = {
        "single-label": lambda: sklearn.accuracy_score(batch.targets, outputs.argmax(1)),
        "multi-label": lambda: sklearn.average_precision_score(batch.targets, outputs),
        "regression": lambda: sklearn.r2_score(batch.targets, outputs),
    }[kind]()
    assert result.best.score == pytest.approx(expected, abs=2e-3)
    if kind == "regression":
        assert outputs.mean() == pytest.approx(105, abs=2)  # in the user's units


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_give_the_weights_of_one_and_the_same_bits_each_time(backbone, tmp_path, threads):
    data = (tinted(40, 1, "multi-label"), tinted(20, 2, "multi-label"))
    recipe = replace(RECIPE, batch=32)

    def run(callbacks=None, **options):
        options, task = TrainingOptions(**options), fresh(backbone, "multi-label")
        return fit(backbone, [task], *data, recipe, options=options, callbacks=callbacks)

    before = torch.get_num_threads()
    plain = run(threads=1)
    first, again = run(threads=threads), run(threads=threads)
    assert torch.get_num_threads() == before
    for a, b, c in zip(plain.settings, first.settings, again.settings, strict=True):
        assert_same_weights(a.task, b.task, atol=1e-5)
        assert b.task.digest == c.task.digest
    # A resumed training goes on with the number of threads it was begun with, whatever is asked for now.
    run(threads=threads, checkpoint=tmp_path / "whole")

    class Stop(Exception):  # noqa: N818
        pass

    def stop(progress):
        if progress.stage == "training" and progress.step == 6:
            raise Stop

    with pytest.raises(Stop):
        run(threads=threads, callbacks=Callbacks(stop), checkpoint=tmp_path / "cut", checkpoint_every=5)
    resumed = run(threads=1, checkpoint=tmp_path / "cut", resume=True)
    assert [r.task.digest for r in resumed.settings] == [r.task.digest for r in first.settings]


def test_an_error_in_one_thread_is_raised_and_torch_has_its_threads_back(backbone):
    from vit_memory.parallel import ChunkThreads

    before = torch.get_num_threads()

    def fail(i):
        if i == 1:
            raise ValueError("piece 1")
        return i

    with pytest.raises(ValueError, match="piece 1"), ChunkThreads(torch.device("cpu"), 2) as threads:
        threads.map(fail, [0, 1, 2])
    assert torch.get_num_threads() == before


# -------------------------------------------------------------------------------------------------- what is not known


def test_what_is_not_known_has_no_part_in_the_loss_or_the_score():
    outputs = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    known = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    partly = known.clone()
    partly[1] = math.nan
    partly[3, 2] = math.nan
    scale = TargetScale((0.0,) * 3, (1.0,) * 3)
    for objective in (MultiLabel(partly), Regression(scale)):
        changed = outputs.clone()
        changed[:, 1] += 5.0
        changed[:, 3, 2] -= 7.0
        results = []
        for given_outputs in (outputs, changed):
            sums = objective.start(2, torch.device("cpu"))
            objective.add(sums, given_outputs, partly, torch.arange(4))
            results.append((objective.losses(given_outputs, partly), objective.scores(sums)))
        for first, second in zip(*results, strict=True):
            torch.testing.assert_close(first, second)
            assert first.isfinite().all()


def test_balanced_weights_make_every_class_count_alike():
    logits = torch.randn(1, 30, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0] * 27 + [1] * 3)
    from vit_memory.training.objective import objective_for

    task = trained(tiny_backbone(), "task", labels=["often", "rare"])
    split = Split(ImageArray.whole("x", np.zeros((30, 1, 1, 3), np.uint8)), labels.numpy(), (b"",) * 30)
    objective = objective_for(task, Recipe(balance=True), split, split)
    assert isinstance(objective, SingleLabel)
    assert objective.metric == "balanced accuracy"
    each = torch.nn.functional.cross_entropy(logits[0], labels, reduction="none")
    expected = 15 * (each[:27].mean() + each[27:].mean())
    torch.testing.assert_close(objective.losses(logits, labels)[0], expected)
    sums = objective.start(1, torch.device("cpu"))
    objective.add(sums, logits, labels, torch.arange(30))
    expected = sklearn.balanced_accuracy_score(labels, logits[0].argmax(1))
    assert float(objective.scores(sums)[0]) == pytest.approx(expected)


def test_data_with_nothing_to_learn_from_is_refused(backbone):
    constant = tinted(12, 1, "regression")
    constant.targets[:, 1] = 7.0
    with pytest.raises(TrainingError, match="green: all training images have 7: there is nothing to learn"):
        fit(backbone, [fresh(backbone, "regression")], constant, tinted(6, 2, "regression"), RECIPE)
    empty = tinted(12, 1, "multi-label")
    empty.targets[:] = 0.0
    with pytest.raises(TrainingError, match="nothing to tell apart"):
        fit(backbone, [fresh(backbone, "multi-label")], empty, tinted(6, 2, "multi-label"), RECIPE)
    with pytest.raises(TrainingError, match="is regression, but the training images are multi-label"):
        fit(backbone, [fresh(backbone, "regression")], empty, empty, RECIPE)
    values = tinted(12, 1, "regression")
    with pytest.raises(TrainingError, match="balancing and label smoothing are for labels"):
        fit(backbone, [fresh(backbone, "regression")], values, values, replace(RECIPE, balance=True))
