"""Targets of every kind; splits of multi-label and regression targets are stratified, by content and seed alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_memory.data.images import ImageArray
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split, draw_split, why_empty
from vit_memory.data.targets import RawLabels, read_targets
from vit_memory.errors import DataError


def split_of(targets, kind, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (len(targets), 2, 2, 3), dtype=np.uint8)
    return Split.of(ImageArray.whole("noise", pixels), targets, kind)


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


def test_numbers_are_drawn_from_their_whole_range():
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


def test_cells_become_numbers_and_bad_ones_are_named_with_their_rows():
    def read(values, columns=("label",), kind="auto", classes=None):
        return read_targets("t", {"all": RawLabels(values)}, columns, classes, kind)

    found = read(["red;round", "", ";", "round"])
    assert (found.kind, found.labels) == ("multi-label", ("red", "round"))
    assert np.array_equal(found.values["all"], [[1, 1], [np.nan] * 2, [0, 0], [0, 1]], equal_nan=True)
    found = read([("1", "0"), ("", "yes"), ("false", "1.0")], ("a", "b"))
    assert np.array_equal(found.values["all"], [[1, 0], [np.nan, 1], [0, 1]], equal_nan=True)
    found = read(["1.5", None, 2])
    assert found.kind == "regression"
    assert np.array_equal(found.values["all"], [[1.5], [np.nan], [2.0]], equal_nan=True)
    assert read(["7", "8", "9"]).kind == "single-label"
    assert read([str(i) for i in range(40)]).kind == "regression"
    with pytest.raises(DataError, match=r"2 label cells cannot be used. row 1: b is 'x'; expected 0 or 1"):
        read([("1", "0"), ("1", "x"), ("2", "0")], ("a", "b"), "multi-label")
    with pytest.raises(DataError, match="row 0: label is 'inf'; expected a number"):
        read(["inf"], kind="regression")
    with pytest.raises(DataError, match="2 label columns .* but a single-label task has one label per image"):
        read([("1", "0")], ("a", "b"), "single-label")


def test_values_that_few_images_have_are_in_every_part():
    values = np.full((60, 1), np.nan)
    values[:20, 0] = np.arange(20)
    drawn = draw_split(split_of(values, "regression"), "test", 0)[1]
    assert np.isfinite(drawn.targets).sum() == 4
    assert len(draw_split(split_of(np.arange(30.0)[:, None], "regression"), "test", 0)[1]) == 6


def test_cells_that_are_no_labels_or_numbers_are_refused():
    def read(values, columns=("label",), kind="auto"):
        return read_targets("t", {"all": RawLabels(values)}, columns, None, kind)

    with pytest.raises(DataError, match=r"t: row 0: a list contains 1.5; expected labels"):
        read([[1.5, 0.2]])
    with pytest.raises(DataError, match="the columns a, b are empty"):
        read([("", None)], ("a", "b"))
    with pytest.raises(DataError, match="expected a number"):
        read([10**400], kind="regression")
    with pytest.raises(DataError, match="row 1: label is 'inf'; expected a number"):  # and not learned as a label
        read(["0.5", "inf", "1.5"])


def test_tables_whose_columns_or_labels_are_ambiguous_are_refused(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("file,label,label\na.png,1,2\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"table.csv: line 1 has duplicate columns: label"):
        open_data(table)
    images = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "pack.npz", x_train=images, y_train=np.arange(4) * 1j)
    with pytest.raises(DataError, match=r"y_train is \(4,\) complex128"):
        open_data(tmp_path / "pack.npz")


@pytest.mark.parametrize("kind", ["single-label", "multi-label", "regression"])
def test_a_split_without_images_is_explained_in_the_words_of_its_kind(kind):
    words = {"single-label": "classes", "multi-label": "labels that at least two", "regression": "a known value"}
    assert words[kind] in why_empty(kind)
    assert ("class" in why_empty(kind)) == (kind == "single-label")
