"""Intervals over datasets, seeds and images: what they contain, and what a paired difference takes out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_memory.evaluation.statistics import RightAnswers, accuracy, difference, pack_bits, unpack_bits


def rows(method, right, dataset="a"):
    return [RightAnswers(dataset, method, seed, row) for seed, row in enumerate(right)]


def test_a_paired_difference_takes_out_what_is_hard_for_both():
    rng = np.random.default_rng(0)
    hard = rng.random((3, 400)) < 0.5  # half of the images are hard for both methods
    better = hard | (rng.random((3, 400)) < 0.1)
    tested = [*rows("plain", hard), *rows("better", better)]
    gap = difference(tested, "better", "plain")
    alone = accuracy(tested, "plain")
    assert gap.interval.mean == pytest.approx(better.mean() - hard.mean())
    assert gap.pairs == 3
    assert gap.interval.excludes_zero
    assert gap.interval.high - gap.interval.low < 0.7 * (alone.high - alone.low)


def test_datasets_count_equally_whatever_their_size():
    tested = [*rows("m", np.ones((2, 1000), bool), "large"), *rows("m", np.zeros((2, 10), bool), "small")]
    interval = accuracy(tested, "m")
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    assert accuracy(tested, "m", ["large", "missing"]) is None


def test_only_trainings_with_the_same_dataset_and_seed_are_compared():
    one, other = np.ones((3, 20), bool), np.zeros((1, 20), bool)
    gap = difference([*rows("a", one), *rows("b", other), *rows("a", one, "elsewhere")], "a", "b")
    assert (gap.pairs, gap.datasets, gap.interval.mean) == (1, ("a",), 1.0)
    assert difference(rows("a", one), "a", "b") is None


def test_the_order_of_datasets_does_not_change_an_interval():
    rng = np.random.default_rng(2)
    parts = [rows(m, rng.random((3, 200)) < 0.7, d) for d in ("b", "c", "a") for m in ("m", "other")]
    there, back = ([row for part in order for row in part] for order in (parts, parts[::-1]))
    for one, same in ((accuracy(there, "m"), accuracy(back, "m")), (_gap(there), _gap(back))):
        assert (one.low, one.high) == pytest.approx((same.low, same.high), abs=1e-12)


def _gap(tested):
    return difference(tested, "m", "other").interval


def test_the_interval_holds_the_true_accuracy_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        interval = accuracy(rows("m", rng.random((1, 300)) < 0.8), "m")
        held += interval.low <= 0.8 <= interval.high
    assert 88 <= held <= 100  # 95 expected; 88 is three standard deviations below


@given(st.lists(st.booleans(), min_size=1, max_size=70))
@settings(max_examples=50, deadline=None)
def test_bits_survive_the_record(right):
    array = np.array(right)
    assert np.array_equal(unpack_bits(pack_bits(array), len(array)), array)
