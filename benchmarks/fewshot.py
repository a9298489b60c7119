"""Few images per class on a real backbone: head, class token and memory of several sizes, all trained at once.

    python -m benchmarks.fewshot PACK… --backbone FOLDER --json results/fewshot.json

For every seed, 20 training images of a class are drawn, and as many to choose the learning rate by; every size is
trained with every rate on the same batches and the same stored trunks, and the rate with the best validation accuracy
is read on the test images, once. The interval is Student's over the seeds, which draw the images, the order, the views
and the cells; it does not know that the test images are a sample too. `--stores` trains 5 cells from trunks kept in
each precision, and live.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import commit, write
from vit_memory import Backbone, MemoryViT, Recipe, fit, load_backbone, open_data
from vit_memory.data.loading import default_workers
from vit_memory.evaluation.inference import evaluate
from vit_memory.training.cache import Cache
from vit_memory.training.grid import Grid
from vit_memory.training.options import TrainingOptions

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles by number of seeds


def train(backbone: Backbone, pack: str, grid: Grid, recipe: Recipe, size: int, cache: Cache) -> dict[str, Any]:
    """Validation and test accuracy of the best rate of every size."""
    dataset = open_data(pack, seed=recipe.seed)
    learn, judge = (split.per_class(20, recipe.seed) for split in (dataset.train, dataset.validation))
    tasks = grid.tasks(backbone, "fewshot", dataset.labels, ())
    options = TrainingOptions(cache=cache, image_size=size, workers=default_workers())
    result = fit(backbone, tasks, learn, judge, recipe, options=options)
    best: dict[str, Any] = {}
    for found in result.settings:
        name = found.setting.name.split(",")[0]
        if found.score is not None and found.score > best.get(name, (-1.0, None))[0]:
            best[name] = (found.score, found)
    model = MemoryViT(backbone, [replace(found.task, name=name.replace(" ", "-")) for name, (_, found) in best.items()])
    scores = evaluate(model, dataset.splits["test"], dataset.labels, list(model.tasks), workers=default_workers())
    return {
        name: {
            "validation": accuracy,
            "test": scores[name.replace(" ", "-")].scores.accuracy,
            "rate": found.setting.learning_rate,
            "images": len(learn),
            "test_images": scores[name.replace(" ", "-")].scores.images,
        }
        for name, (accuracy, found) in best.items()
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over the seeds and its interval."""
    values = [run["test"] for run in runs]
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "half_interval": half, "runs": runs}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="+", help="DATA as in vit-memory data")
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--image-size", type=int, default=98)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stores", action="store_true", help="compare the precisions of the store instead")
    parser.add_argument("--json", type=Path, help="write the record here; rows of other cases in it are kept")
    asked = parser.parse_args()
    backbone = load_backbone(asked.backbone, name=Path(asked.backbone).name)
    rows = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
    for pack in asked.packs:
        for title, cache in _cases(asked.stores):
            grid = Grid(cells=(5,)) if asked.stores else Grid(("head", "memory"), (0, 1, 5, 20))
            runs = []
            for seed in range(asked.seeds):
                recipe = Recipe(steps=asked.steps, seed=seed, evaluate_every=asked.steps)
                runs.append(train(backbone, pack, replace(grid, seeds=(seed,)), recipe, asked.image_size, cache))
            for size in runs[0]:
                case = f"{Path(pack).name} {size}{title}"
                row = {"case": case, "commit": commit(), **summary([run[size] for run in runs])}
                print(f"{case:44} {100 * row['mean']:5.1f} ± {100 * row['half_interval']:.1f} %", flush=True)
                rows = [*(other for other in rows if other["case"] != case), row]
            if asked.json:
                write(asked.json, rows, image_size=asked.image_size, steps=asked.steps, per_class=20)


def _cases(stores: bool) -> list[tuple[str, Cache]]:
    if not stores:
        return [("", Cache("ram"))]
    kept = [(f" from {dtype}", Cache("ram", dtype)) for dtype in ("float32", "float16", "bfloat16")]  # type: ignore[arg-type]
    return [*kept, (" live", Cache("off"))]


if __name__ == "__main__":
    main()
