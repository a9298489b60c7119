"""Every kind of task through the commands, with default options: tables, training, scores, predictions."""

import csv
import io
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from data.test_sources import as_png
from vit_memory import load_task
from vit_memory.cli import app
from vit_memory.errors import TrainingError

LABELS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Sixty small pictures with a tint, and tables that say so in every way."""
    root = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(60):
        present = rng.random(3) < 0.5
        pixels = (rng.integers(40, 120, (24, 24, 3)) + 100 * present).astype(np.uint8)
        (root / f"{i}.png").write_bytes(as_png(pixels))
        rows.append((f"{i}.png", present, float(pixels.mean())))
    names = np.array(LABELS)
    with (root / "cells.csv").open("w", newline="") as file:
        cells = [(name, ";".join(names[present]) or ";") for name, present, _ in rows]
        csv.writer(file).writerows([("file", "label"), *cells])
    with (root / "columns.csv").open("w", newline="") as file:
        flags = [(name, *(int(p) for p in present)) for name, present, _ in rows]
        csv.writer(file).writerows([("file", *LABELS), *flags])
    with (root / "lists.jsonl").open("w") as file:
        file.writelines(json.dumps({"file": n, "label": names[p].tolist()}) + "\n" for n, p, _ in rows)
    with (root / "value.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("file", "level", "double"), *((n, f"{v:.3f}", f"{2 * v:.3f}") for n, _, v in rows)]
        )
    return root


QUICK = ("--steps", "8", "--views", "1", "--evaluate-every", "4", "--lr", "0.1")


def command(place, *words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.mark.parametrize(
    ("table", "columns"),
    [("cells.csv", ()), ("lists.jsonl", ()), ("columns.csv", ("--label-column", "red,green,blue"))],
)
def test_several_labels_per_image_from_every_layout(place, tmp_path, table, columns):
    data = place / table
    result = command(place, "train", data, "--name", "tint", "--out", tmp_path / "run", *QUICK, *columns)
    assert "kind: multi-label" in result.output
    assert "validation mAP" in result.output
    file = tmp_path / "run/tint.safetensors"
    task = load_task(file)
    assert (task.kind, set(task.labels)) == ("multi-label", set(LABELS))
    assert len(task.thresholds) == 3
    assert task.record.metrics.keys() == {"validation_map"}
    scores = json.loads(command(place, "evaluate", file, "--data", data, "--json").stdout)["tasks"]["tint"]
    assert scores["kind"] == "multi-label"
    assert set(scores["per_label"]) == set(LABELS)
    assert "mAP" in command(place, "evaluate", file, "--data", data).stdout
    assert "thresholds" in command(place, "inspect", file, "--json").stdout
    lines = command(place, "predict", place / "0.png", "--bundle", file, "--format", "jsonl").stdout.splitlines()
    assert "labels" in json.loads(lines[-1])["tasks"]["tint"]


def test_numbers_per_image_are_answered_in_their_units_beside_other_kinds(place, tmp_path):
    data = place / "value.csv"
    columns = ("--label-column", "level,double")
    command(place, "train", place / "cells.csv", "--name", "tint", "--out", tmp_path / "tint", *QUICK)
    parent = tmp_path / "tint/tint.safetensors"
    out = ("--out", tmp_path / "run")
    result = command(place, "train", data, "--name", "level", *out, "--extends", parent, *QUICK, *columns)
    assert "kind: regression (the columns level, double contain numbers)" in result.output
    file = tmp_path / "run/level.safetensors"
    assert load_task(file).target_scale is not None
    folder = tmp_path / "zoo"
    command(place, "bundle", "create", folder, parent, file)
    scores = json.loads(command(place, "evaluate", folder, "--task", "level", "--data", data, "--json").stdout)
    assert set(scores["tasks"]["level"]["per_value"]) == {"level", "double"}
    page = command(place, "evaluate", folder, "--task", "level", "--data", data).stdout
    assert all(title in page for title in ("R²", "MAE", "RMSE", "95 % interval"))
    table = command(place, "predict", place / "0.png", place / "1.png", "--bundle", folder, "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(table[table.index("image,") :])))
    assert set(rows[0]) == {"image", "tint", "tint probabilities", "level level", "level double", "error"}
    assert 40 < float(rows[0]["level level"]) < 260
    assert "level 1" in command(place, "predict", place / "0.png", "--bundle", folder).stdout.replace("level: ", "")


def test_every_task_of_a_bundle_is_scored_with_the_columns_it_was_trained_with(place, tmp_path):
    table = tmp_path / "all.csv"
    with (place / "value.csv").open() as values, (place / "cells.csv").open() as cells:
        rows = [
            (place / value["file"], cell["label"], value["level"], value["double"], "a" if i % 2 else "b")
            for i, (value, cell) in enumerate(zip(csv.DictReader(values), csv.DictReader(cells), strict=True))
        ]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "tint", "level", "twice, exactly", "side"), *rows])
    columns = {"tint": "tint", "level": 'level,"twice, exactly"', "side": "side"}
    for name, column in columns.items():
        words = ("--name", name, "--label-column", column, "--out", tmp_path / name, *QUICK)
        command(place, "train", table, *words)
    zoo = tmp_path / "zoo"
    command(place, "bundle", "create", zoo, *(tmp_path / name / f"{name}.safetensors" for name in columns))
    tasks = json.loads(command(place, "evaluate", zoo, "--data", table, "--json").stdout)["tasks"]
    assert {name: task["kind"] for name, task in tasks.items()} == {
        "tint": "multi-label", "level": "regression", "side": "single-label",
    }  # fmt: skip
    assert set(tasks["level"]["per_value"]) == {"level", "twice, exactly"}

    some = command(place, "evaluate", zoo, "--data", table, "--label-column", "level")
    assert "level: R²" in some.stdout
    assert "not scored: side. task 'side' is single-label, but the images are regression" in some.stderr
    # A table that lacks the columns of some tasks scores the others; one that lacks them all says which there were.
    partly = command(place, "evaluate", zoo, "--data", place / "value.csv", "--label-column", "level", "--json")
    assert set(json.loads(partly.stdout)["tasks"]) == {"level"}
    refused = CliRunner().invoke(app, ["evaluate", str(zoo), "--data", str(place / "columns.csv")])
    assert "level was trained with level, twice, exactly; name other columns" in str(refused.exception)


def test_kinds_are_told_by_the_cells_and_can_be_said(place, tmp_path):
    result = json.loads(command(place, "data", place / "value.csv", "--label-column", "level", "--json").stdout)
    assert (result["kind"], result["labels"]) == ("regression", ["level"])
    assert result["values"]["level"]["min"] < result["values"]["level"]["max"]
    table = tmp_path / "t.csv"
    table.write_text("file,label\n" + "".join(f"{place / f'{i}.png'},{i % 3}\n" for i in range(30)))
    assert json.loads(command(place, "data", table, "--json").stdout)["kind"] == "single-label"  # class numbers
    assert json.loads(command(place, "data", table, "--kind", "regression", "--json").stdout)["kind"] == "regression"
    table.write_text(table.read_text().replace(",0\n", ",\n"))
    result = json.loads(command(place, "data", table, "--kind", "regression", "--json").stdout)
    assert sum(split["unknown"] for split in result["splits"].values()) == 10
    wrong = CliRunner().invoke(app, ["data", str(place / "cells.csv"), "--kind", "regression"])
    assert "label cells cannot be used. line 2: label is" in str(wrong.exception)


def test_the_papers_recipe_and_randaugment_can_be_asked_for(place, tmp_path):
    pytest.importorskip("torchvision")
    words = ("--augment", "randaugment", "--recipe", "paper", "--steps", "2", "--batch", "16", "--evaluate-every", "2")
    command(place, "train", place / "cells.csv", "--name", "tint", "--out", tmp_path / "run", "--lr", "0.1", *words)
    recipe = json.loads((tmp_path / "run/config.json").read_text())["recipe"]
    assert (recipe["augment"], recipe["views"], recipe["area"], recipe["steps"]) == (
        "randaugment",
        None,
        [0.08, 1.0],
        2,
    )


def test_a_label_that_was_never_learned_is_never_reported(place, tmp_path):
    table = tmp_path / "t.csv"
    rows = (place / "columns.csv").read_text().splitlines()
    lines = [f"{place}/{line}," for line in rows[1:]]
    table.write_text("\n".join([rows[0] + ",unknown", *lines]) + "\n")
    columns = ("--label-column", "red,green,blue,unknown")
    command(place, "train", table, "--name", "tint", "--out", tmp_path / "run", *QUICK, *columns)
    result = command(place, "predict", place, "--bundle", tmp_path / "run/tint.safetensors", "--format", "jsonl").stdout
    answers = [json.loads(line) for line in result.splitlines() if line.startswith("{")]
    assert len(answers) == 60
    assert "unknown" not in {one["label"] for answer in answers for one in answer["tasks"]["tint"]["labels"]}


def test_a_training_that_is_refused_leaves_no_folder(place, tmp_path):
    words = ["train", str(place / "cells.csv"), "--name", "tint", "--out", str(tmp_path / "run"), *QUICK]
    refused = CliRunner().invoke(app, [*words, "--cache", "ram", "--views", "0"])
    assert "nothing can be stored" in str(refused.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("columns", ["level", "red,green"])
def test_splits_without_anything_known_are_refused_before_training_and_scoring(place, tmp_path, columns):
    table = tmp_path / "t.csv"
    parts = ["train"] * 40 + ["val"] * 10 + ["test"] * 10
    cells = ["1" if i % 2 else "0" for i in range(60)] if "," in columns else [f"{i}.5" for i in range(60)]
    blank = "," * columns.count(",")

    def write(empty):
        rows = [
            f"{place}/{i}.png,{part}," + (blank if part == empty else ",".join([cell] * len(columns.split(","))))
            for i, (part, cell) in enumerate(zip(parts, cells, strict=True))
        ]
        table.write_text("\n".join([f"file,split,{columns}", *rows]) + "\n")

    words = ["train", table, "--name", "tint", "--out", tmp_path / "run", "--label-column", columns, *QUICK]
    write("val")
    refused = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(refused.exception, TrainingError)
    assert "no validation image" in str(refused.exception)
    write("test")
    command(place, *words)
    refused = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run/tint.safetensors"), "--data", str(table)])
    assert "not one of 10 images has a known" in str(refused.exception)
