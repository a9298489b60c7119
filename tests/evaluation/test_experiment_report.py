"""The report of experiments: what it may compare, and what it says of few records."""

import numpy as np
import pytest

from vit_memory.errors import FileError
from vit_memory.evaluation.reproduce.records import Record
from vit_memory.evaluation.reproduce.scale import SCALES
from vit_memory.evaluation.statistics import pack_bits
from vit_memory.report.document import Table
from vit_memory.report.experiments import evidence_of, experiment_sections
from vit_memory.report.experiments.charts import DASHES, MARKERS

IMAGES = 40
MADE = {"command": "vit-memory reproduce table2 --seeds 0", "commit": "0" * 40}


def bits(right):
    return pack_bits(np.arange(IMAGES) < right)


def training(method, right, dataset="pets", seed=0, **settings):
    identity = {"kind": "training", "backbone": "tiny", "dataset": dataset, "label": None, "method": method}
    facts = {"backbone_fingerprint": "f" * 64, "preprocessing": "32 px", "data": {"test": "t"}, "images": {"train": 9}}
    recipe = {"steps": 200, "evaluate_every": 100, "batch": 4, "views": 8}
    result = {"right": bits(right), "test_images": IMAGES, "parameters": 100, "curve": [0.5, 0.6]}
    return Record(
        {**identity, "per_class": 20, "seed": seed, "extends": []},
        {**facts, "recipe": recipe, **settings},
        result,
        MADE,
    )


def arrivals(method, *after):
    """`after` each arrival, how many test images of every task so far were right."""
    order = ["pets", "birds", "cars"][: len(after)]
    rows = [
        {
            name: {"test": n / IMAGES, "test_images": IMAGES, "right": bits(n)}
            for name, n in zip(order, row, strict=False)
        }
        for row in after
    ]
    identity = {"kind": "continual", "backbone": "tiny", "method": method, "datasets": order, "seed": 0}
    return Record(identity, {}, {"order": order, "after": rows}, MADE)


def sections(*records):
    return {section.title: section.markdown() for section in experiment_sections(evidence_of(list(records)))}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"preprocessing": "64 px"}, "preprocessing: 32 px and 64 px"),
        ({"backbone_fingerprint": "e" * 64}, "weights"),
        ({"data": {"test": "other"}}, "test images of pets"),
    ],
)
def test_records_that_are_not_comparable_are_refused(changed, named):
    with pytest.raises(FileError, match=f"differ in {named}.*--out"):
        evidence_of([training("head", 20), training("5 cells", 30, **changed)])


def test_memory_stands_beside_lora_whichever_other_methods_were_trained():
    found = sections(training("head", 20), training("5 cells", 30), training("LoRA", 36))["What was found"]
    assert "| 5 cells | -15.0" in found
    assert "| LoRA | lower |" in found


def test_what_was_forgotten_has_one_number_for_the_tasks_before_the_last():
    record = arrivals(
        "full", [30], [20, 30], [10, 30, 40]
    )  # 30 to 10 of 40 images, and 30 to 30: 25 points on the mean
    report = sections(training("head", 20), record)
    assert "full -25.0." in report["What was found"]
    assert "| -25.0 | -50.0 |" in report["Tasks that arrive one after another"]


def test_one_task_has_nothing_to_forget():
    report = sections(training("head", 20), arrivals("full", [30]))
    assert "Tasks that arrive one after another" not in report
    assert "nan" not in "".join(report.values())


def test_every_table_says_how_many_images_and_which_command():
    records = [training(name, n) for name, n in (("head", 20), ("class", 22), ("5 cells", 30), ("LoRA", 36))]
    for section in experiment_sections(evidence_of([*records, arrivals("5 cells", [30], [30, 30])])):
        for part in section.parts:
            if isinstance(part, Table) and section.title != "Where the numbers come from":
                assert "n = " in part.note
                assert "vit-memory reproduce table2" in part.note


def test_every_method_has_three_learning_rates():
    assert {len(recipe.rates) for scale in SCALES.values() for recipe in scale.recipes.values()} == {3}


def test_ten_lines_of_a_chart_differ_without_colour():
    assert len({(MARKERS[i % len(MARKERS)], DASHES[i % len(DASHES)]) for i in range(10)}) == 10
