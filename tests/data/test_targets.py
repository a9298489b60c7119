"""Labels of every kind become targets, and unusable ones are refused with their rows."""

import numpy as np
import pytest

from vit_memory.data.sources import open_data
from vit_memory.data.targets import RawLabels, read_targets
from vit_memory.errors import DataError


def test_labels_become_targets_and_bad_ones_are_named_with_their_rows():
    def read(values, columns=("label",), kind="auto", classes=None):
        return read_targets("t", {"all": RawLabels(values)}, columns, classes, kind)

    targets = read(["red;round", "", ";", "round"])
    assert (targets.kind, targets.labels) == ("multi-label", ("red", "round"))
    assert np.array_equal(targets.values["all"], [[1, 1], [np.nan] * 2, [0, 0], [0, 1]], equal_nan=True)
    targets = read([("1", "0"), ("", "yes"), ("false", "1.0")], ("a", "b"))
    assert np.array_equal(targets.values["all"], [[1, 0], [np.nan, 1], [0, 1]], equal_nan=True)
    targets = read(["1.5", None, 2])
    assert targets.kind == "regression"
    assert np.array_equal(targets.values["all"], [[1.5], [np.nan], [2.0]], equal_nan=True)
    assert read(["7", "8", "9"]).kind == "single-label"
    assert read([str(i) for i in range(40)]).kind == "regression"
    with pytest.raises(DataError, match=r"2 label cells cannot be used. row 1: b is 'x'; expected 0 or 1"):
        read([("1", "0"), ("1", "x"), ("2", "0")], ("a", "b"), "multi-label")
    with pytest.raises(DataError, match="row 0: label is 'inf'; expected a number"):
        read(["inf"], kind="regression")
    with pytest.raises(DataError, match="2 label columns .* but a single-label task has one label per image"):
        read([("1", "0")], ("a", "b"), "single-label")


def test_cells_that_are_neither_labels_nor_numbers_are_refused():
    def read(values, columns=("label",), kind="auto"):
        return read_targets("t", {"all": RawLabels(values)}, columns, None, kind)

    with pytest.raises(DataError, match=r"t: row 0: a list contains 1.5; expected labels"):
        read([[1.5, 0.2]])
    with pytest.raises(DataError, match="t: the columns a, b are empty"):
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
