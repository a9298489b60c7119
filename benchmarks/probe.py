"""What a linear classifier reads off the bundled backbone, beside raw pixels and the same backbone untrained.

    python -m benchmarks.probe --shared ../shared --json results/probe.json
    python -m benchmarks.probe --table results/probe.json          (the table of the card, from a record)

Logistic regression on standardised features of the pack's training images; its regularisation is chosen on a fifth of
them, drawn by content; then all of them train, and the test images are read once. `untrained` is the mean over three
random initialisations. Intervals are Wilson's, 95 %.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from benchmarks.measure import write
from vit_memory import Backbone, load_backbone
from vit_memory.data.loading import Loader
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import Evaluation
from vit_memory.evaluation.metrics import wilson
from vit_memory.families.bundled import PREPROCESSING, BundledViT

HELD_OUT = ("flowers30", "aid30", "trashnet6", "signdigits10", "brainmri4")
STRENGTHS = tuple(10.0**power for power in (-4, -3, -2, -1))
Features = Callable[[torch.Tensor], torch.Tensor]


def untrained(seed: int) -> Backbone:
    """The bundled backbone as it is before training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BundledViT()
        for parameter in (model.class_token, model.class_position, model.patch_positions):
            torch.nn.init.trunc_normal_(parameter, std=0.02)
    return load_backbone(model)


def class_token(backbone: Backbone) -> Features:
    """The class token's final output."""
    return lambda images: backbone.model(images)[:, 0]


def features(split: Split, read: Features) -> np.ndarray:
    """(n, dimensions)."""
    loader = Loader(split, Evaluation(PREPROCESSING), batch_size=64)
    with torch.inference_mode():
        return torch.cat([read(batch.images) for batch in loader.batches()]).numpy().astype(np.float64)


def probe(dataset: Any, read: Features) -> float:
    """Test accuracy of a linear classifier."""
    x, held, test = (features(split, read) for split in (dataset.train, dataset.validation, dataset.test))
    y, held_y = dataset.train.labels, dataset.validation.labels
    everything, every_y = np.concatenate([x, held]), np.concatenate([y, held_y])
    # Logistic regression with a quadratic penalty does not change under rotation: with fewer images than dimensions,
    # the directions the images span are all there is.
    centre, scale = everything.mean(0), everything.std(0) + 1e-8
    everything, test = (everything - centre) / scale, (test - centre) / scale
    if everything.shape[1] > len(everything):
        _, _, directions = np.linalg.svd(everything, full_matrices=False)
        everything, test = everything @ directions.T, test @ directions.T
    x, held = everything[: len(y)], everything[len(y) :]

    def fitted(strength: float, a: np.ndarray, b: np.ndarray) -> LogisticRegression:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return LogisticRegression(C=strength, max_iter=100).fit(a, b)

    best = max(STRENGTHS, key=lambda strength: fitted(strength, x, y).score(held, held_y))
    return float(fitted(best, everything, every_y).score(test, dataset.test.labels))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| pack | classes | raw pixels | untrained | bundled | 95 % interval |", "|---|---|---|---|---|---|"]
    for row in rows:
        name = row["case"] if row["held_out"] else f"{row['case']} (its training images were seen)"
        low, high = row["interval"]
        shares = " | ".join(f"{100 * row[key]:.1f}" for key in ("pixels", "untrained", "bundled"))
        lines.append(f"| {name} | {row['classes']} | {shares} | {100 * low:.1f}–{100 * high:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with data/")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--table", type=Path, help="print the table of this record and measure nothing")
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads(asked.table.read_text())["rows"]))
        return
    if asked.shared is None:
        parser.error("give --shared, or --table with a record")
    trained = load_backbone("bundled")
    rows = []
    packs = sorted(path.parent.name for path in (asked.shared / "data").glob("*/test.parquet"))
    for pack in sorted(packs, key=lambda name: (name not in HELD_OUT, name)):
        dataset = open_data(asked.shared / "data" / pack)
        bundled = probe(dataset, class_token(trained))
        row = {
            "case": pack,
            "held_out": pack in HELD_OUT,
            "classes": len(dataset.labels),
            "train_images": len(dataset.train) + len(dataset.validation),
            "test_images": len(dataset.test),
            "pixels": probe(dataset, lambda images: images.flatten(1)),
            "untrained": float(np.mean([probe(dataset, class_token(untrained(seed))) for seed in range(3)])),
            "bundled": bundled,
            "interval": wilson(bundled, len(dataset.test)),
        }
        print(table([row]).splitlines()[-1], flush=True)
        rows.append(row)
    if asked.json:
        write(asked.json, rows, fingerprint=trained.fingerprint)


if __name__ == "__main__":
    main()
