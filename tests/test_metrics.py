"""Scores, thresholds and predictions of every kind, compared with scikit-learn."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sklearn import metrics as sklearn

from builders import tiny_backbone, trained
from vit_memory.average_precision import average_precision, best_thresholds
from vit_memory.cli.score_pages import page
from vit_memory.evaluation.metrics import score_task
from vit_memory.evaluation.metrics.multi_label import score_multi_label
from vit_memory.evaluation.metrics.regression import score_regression
from vit_memory.evaluation.metrics.single_label import score_single_label
from vit_memory.predictions import predictions


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 40), labels=st.integers(1, 5), seed=st.integers(0, 1000), ties=st.booleans())
def test_multi_label_scores_are_those_of_scikit_learn(n, labels, seed, ties):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, labels))
    logits = np.round(logits) if ties else logits
    truth = (rng.random((n, labels)) < 0.4).astype(np.float64)
    found = score_multi_label(torch.from_numpy(logits), torch.from_numpy(truth), [str(i) for i in range(labels)])
    answered = (logits >= 0).astype(int)
    shown = truth.any(0)
    if shown.any():
        precisions = [sklearn.average_precision_score(truth[:, i], logits[:, i]) for i in np.flatnonzero(shown)]
        assert found.mean_average_precision == pytest.approx(np.mean(precisions))
        assert found.macro_f1 == pytest.approx(
            np.mean([sklearn.f1_score(truth[:, i], answered[:, i], zero_division=0) for i in np.flatnonzero(shown)])
        )
    assert found.subset_accuracy == pytest.approx((truth == answered).all(1).mean())
    for i, one in enumerate(found.per_label.values()):
        assert one.images == truth[:, i].sum()
        assert (one.average_precision is None) == (not shown[i])


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 30), seed=st.integers(0, 1000))
def test_thresholds_reach_the_best_f1_there_is(n, seed):
    rng = np.random.default_rng(seed)
    scores = np.round(rng.random((n, 1)), 1)
    truth = (rng.random((n, 1)) < 0.5).astype(np.float64)
    threshold = float(best_thresholds(torch.from_numpy(scores), torch.from_numpy(truth))[0])
    if not truth.any():
        assert threshold == 0.5
        return
    candidates = [sklearn.f1_score(truth[:, 0], scores[:, 0] >= cut, zero_division=0) for cut in np.unique(scores)]
    assert sklearn.f1_score(truth[:, 0], scores[:, 0] >= threshold) == pytest.approx(max(candidates))
    assert average_precision(torch.from_numpy(scores), torch.from_numpy(truth))[0] <= 1 + 1e-9


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 40), seed=st.integers(0, 1000))
def test_regression_scores_are_those_of_scikit_learn_and_their_intervals_hold_them(n, seed):
    rng = np.random.default_rng(seed)
    truth = rng.normal(100, 5, (n, 2))
    answers = truth + rng.normal(0, 2, (n, 2))
    found = score_regression(torch.from_numpy(answers), torch.from_numpy(truth), ["a", "b"])
    for i, one in enumerate(found.per_value.values()):
        assert one.mae == pytest.approx(sklearn.mean_absolute_error(truth[:, i], answers[:, i]))
        assert one.rmse == pytest.approx(math.sqrt(sklearn.mean_squared_error(truth[:, i], answers[:, i])))
        assert one.r2 == pytest.approx(sklearn.r2_score(truth[:, i], answers[:, i]))
        assert one.mae_interval[0] <= one.mae_interval[1]


def test_macro_f1_and_balanced_accuracy_stand_beside_accuracy():
    logits = torch.tensor([[2.0, 0, 0]] * 8 + [[0, 2.0, 0]] * 2)
    truth = torch.tensor([0] * 7 + [1] * 3)
    found = score_single_label(logits, truth, "abc")
    assert found.balanced_accuracy == pytest.approx(sklearn.balanced_accuracy_score(truth, logits.argmax(1)))
    assert found.macro_f1 == pytest.approx(sklearn.f1_score(truth, logits.argmax(1), average="macro"))


def test_predictions_say_what_is_present_or_how_much():
    backbone = tiny_backbone()
    several = replace(trained(backbone, "several", kind="multi-label"), thresholds=(0.9, 0.2, 0.5))
    (found,) = predictions(several, torch.tensor([[1.0, 0.0, 2.0]]))
    assert list(found.present) == ["c", "b"]
    assert found.as_json()["labels"][0]["probability"] == pytest.approx(0.880797)
    values = trained(backbone, "much", labels=["height"], kind="regression")
    (found,) = predictions(values, torch.tensor([[1.25]]))
    assert found.as_json() == {"values": {"height": 1.25}}
    assert "height 1.25" in found.text()


def test_a_task_that_answers_nan_is_named_and_scores_nothing(caplog):
    task = trained(tiny_backbone(), "broken")
    scores = score_task(task, torch.tensor([[float("nan")] * 3, [0.0, 2.0, 0.0]]), torch.tensor([0, 1]))
    assert scores.accuracy == 0.5
    assert "task broken: its output is NaN or infinite for 1 of 2 images" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_image_without_an_answer_is_wrong_and_counts_as_a_prediction_of_no_class(value):
    labels, rng = "abcdefghij", np.random.default_rng(0)
    logits, truth = torch.from_numpy(rng.normal(size=(30, 10))), torch.from_numpy(np.arange(30) % 10)
    logits[::4, 3] = value
    broken = torch.arange(30) % 4 == 0
    found = score_single_label(logits, truth, labels)
    answered = logits[~broken].argmax(1)
    assert torch.equal(
        found.confusion, torch.from_numpy(sklearn.confusion_matrix(truth[~broken], answered, labels=range(10)))
    )
    assert found.no_answer.tolist() == [int((truth[broken] == c).sum()) for c in range(10)]
    # A class of its own that no image shows: that is how scikit-learn knows a wrong answer that is none of the others.
    predicted = logits.argmax(1).where(~broken, 10)
    recalls = sklearn.recall_score(truth, predicted, labels=range(10), average=None, zero_division=0)
    precisions = sklearn.precision_score(truth, predicted, labels=range(10), average=None, zero_division=0)
    rows = found.per_class()
    assert [rows[c]["images"] for c in labels] == [int((truth == c).sum()) for c in range(10)]
    assert [rows[c]["recall"] for c in labels] == pytest.approx(recalls)
    assert [rows[c]["precision"] or 0.0 for c in labels] == pytest.approx(precisions)
    assert found.balanced_accuracy == pytest.approx(recalls.mean())
    assert found.macro_f1 == pytest.approx(sklearn.f1_score(truth, predicted, labels=range(10), average="macro"))
    in_top5 = (logits[~broken].topk(5).indices == truth[~broken][:, None]).any(1)
    assert found.top5_accuracy == pytest.approx(int(in_top5.sum()) / 30)
    assert found.as_json()["no_answer"] == int(broken.sum())
    assert "no answer (NaN)        8 images, counted as wrong" in page("broken", found)
    assert "no answer" not in page("whole", score_single_label(logits[~broken], truth[~broken], labels))


def test_a_label_without_an_answer_is_never_right():
    """NaN sorts before every number, and reaches no threshold: it must be neither the surest answer nor an absence."""
    targets = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    found = score_multi_label(torch.tensor([[math.nan], [1.0], [2.0], [math.nan]]), targets, ["red"])
    assert found.mean_average_precision == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert found.subset_accuracy == pytest.approx(1 / 4)
