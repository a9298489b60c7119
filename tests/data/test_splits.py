"""Splits are stratified and follow content and seed, nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.test_sources import pictures, write_folder
from vit_memory.data.images import ImageArray
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split, draw_split, why_empty


def split_of(targets, kind, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (len(targets), 2, 2, 3), dtype=np.uint8)
    return Split.of(ImageArray.whole("noise", pixels), targets, kind)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    copies=st.integers(0, 8),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_a_drawn_split_is_stratified_keeps_copies_together_and_does_not_depend_on_the_order(sizes, copies, seed, data):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    pixels = np.arange(len(labels), dtype=np.uint16)[:, None, None] + np.zeros((1, 1, 1), np.uint16)
    for _ in range(copies):  # a copy of some image, under its own or another label
        i = data.draw(st.integers(0, len(labels) - 1))
        labels.append(data.draw(st.sampled_from([labels[i], *range(len(sizes))])))
        pixels = np.concatenate([pixels, pixels[i : i + 1]])
    order = np.array(data.draw(st.permutations(range(len(labels)))))
    straight = Split.of(ImageArray.whole("a", pixels), labels)
    shuffled = Split.of(ImageArray.whole("b", pixels[order]), np.array(labels)[order])
    rest, drawn = draw_split(straight, "test", seed)
    assert [s.digest() for s in draw_split(shuffled, "test", seed)] == [rest.digest(), drawn.digest()]
    assert len(rest) + len(drawn) == len(labels)
    assert not set(rest.digests) & set(drawn.digests)
    for label in range(len(sizes)):
        of_label = {d for d, k in zip(straight.digests, straight.targets, strict=True) if k == label}
        of_others = {d for d, k in zip(straight.digests, straight.targets, strict=True) if k != label}
        drawn_of_label = {d for d, k in zip(drawn.digests, drawn.targets, strict=True) if k == label}
        count = len(of_label - of_others)
        assert len(drawn_of_label) == (max(1, round(0.2 * count)) if count > 1 else 0)


def test_another_seed_draws_another_split_and_another_few_per_class(tmp_path):
    write_folder(tmp_path, pictures())
    first, again, other = (open_data(tmp_path, seed=seed) for seed in (0, 0, 1))
    assert first.record() == again.record()
    assert first.test.digest() != other.test.digest()
    few = first.train.per_class(3, seed=0)
    assert np.bincount(few.targets).tolist() == [3, 3, 3]
    assert few.digest() == again.train.per_class(3, seed=0).digest() != again.train.per_class(3, seed=1).digest()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(20, 150), labels=st.integers(1, 8), seed=st.integers(0, 100))
def test_every_label_is_drawn_in_proportion_whatever_the_order(n, labels, seed):
    rng = np.random.default_rng(seed)
    targets = (rng.random((n, labels)) < rng.uniform(0.05, 0.6, labels)).astype(np.float32)
    whole = split_of(targets, "multi-label", seed)
    rest, drawn = draw_split(whole, "test", 0)
    assert len(rest) + len(drawn) == n
    assert abs(len(drawn) - 0.2 * n) <= 0.1 * n + labels
    for label in range(labels):
        count = targets[:, label].sum()
        assert abs((drawn.targets[:, label] == 1).sum() - 0.2 * count) <= 0.15 * count + 2
        if count > 1:
            assert (rest.targets[:, label] == 1).any()
    order = rng.permutation(n)
    again = draw_split(whole.select(order), "test", 0)[1]
    assert sorted(again.digests) == sorted(drawn.digests)


def test_regression_values_are_drawn_from_their_whole_range():
    values = np.random.default_rng(0).lognormal(size=(200, 1))
    rest, drawn = draw_split(split_of(values, "regression"), "test", 0)
    assert len(drawn) == pytest.approx(40, abs=2)
    for share in (0.25, 0.5, 0.75):
        assert np.quantile(drawn.targets, share) == pytest.approx(np.quantile(rest.targets, share), rel=0.25)


def test_copies_with_other_labels_are_never_drawn_and_copies_stay_together():
    targets = (np.random.default_rng(0).random((40, 2)) < 0.5).astype(np.float32)
    whole = split_of(targets, "multi-label")
    twice = whole.select([*range(40), 0, 1])
    twice.targets[40] = 1 - twice.targets[0]  # image 0 again, with other labels; image 1 again as it was
    for seed in range(20):
        _, drawn = draw_split(twice, "test", seed)
        assert whole.digests[0] not in drawn.digests
        assert drawn.digests.count(whole.digests[1]) in (0, 2)


def test_values_that_few_images_have_are_in_every_split():
    values = np.full((60, 1), np.nan)
    values[:20, 0] = np.arange(20)
    drawn = draw_split(split_of(values, "regression"), "test", 0)[1]
    assert np.isfinite(drawn.targets).sum() == 4
    assert len(draw_split(split_of(np.arange(30.0)[:, None], "regression"), "test", 0)[1]) == 6


@pytest.mark.parametrize("kind", ["single-label", "multi-label", "regression"])
def test_an_empty_split_is_explained_in_the_words_of_its_kind(kind):
    words = {"single-label": "classes", "multi-label": "labels that at least two", "regression": "a known value"}
    assert words[kind] in why_empty(kind)
    assert ("class" in why_empty(kind)) == (kind == "single-label")
