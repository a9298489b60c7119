"""What a linear classifier reads off the bundled backbone, beside raw pixels and the same backbone untrained.

    python -m benchmarks.probe --shared ../shared --json results/probe.json
    python -m benchmarks.probe --table results/probe.json          (the table of the card, from a record)

Ridge classification on standardised features of the pack's training images; its strength is chosen on a fifth of them,
drawn by content; then all of them train. `token` reads the class token's output (256 numbers), `tokens` all final
tokens (16 640, about as many as there are pixel values). `untrained` is the class token of the same network with random
weights. Intervals are Wilson's, 95 %, of `token`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import write
from vit_memory import Backbone, load_backbone
from vit_memory.data.loading import Loader
from vit_memory.data.sources import open_data
from vit_memory.data.transforms import EvalTransform
from vit_memory.evaluation.metrics.intervals import wilson_interval
from vit_memory.families.bundled import PREPROCESSING, BundledViT

HELD_OUT = ("flowers30", "aid30", "trashnet6", "signdigits10", "brainmri4")
STRENGTHS = tuple(10.0**power for power in (-3, -2, -1, 0, 1, 2))
Features = Callable[[torch.Tensor], torch.Tensor]


def untrained() -> Backbone:
    """The bundled backbone as it is before training."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BundledViT()
        for parameter in (model.class_token, model.class_position, model.patch_positions):
            torch.nn.init.trunc_normal_(parameter, std=0.02)
    return load_backbone(model)


def features(dataset: Any, read: Features) -> list[np.ndarray]:
    """(n, dimensions) of the training, validation and test images."""
    loaders = [Loader(split, EvalTransform(PREPROCESSING), batch_size=64) for split in dataset.splits.values()]
    with torch.inference_mode():
        return [torch.cat([read(batch.images) for batch in loader.batches()]).numpy() for loader in loaders]


def probe(dataset: Any, found: list[np.ndarray]) -> float:
    """Test accuracy of a ridge classifier (least squares to one-hot labels), its strength chosen on validation."""
    x, held, test = found
    y, held_y = dataset.train.targets, dataset.validation.targets
    chosen = STRENGTHS[int(np.argmax(accuracies(x, y, held, held_y, STRENGTHS)))]
    everything, every_y = np.concatenate([x, held]), np.concatenate([y, held_y])
    return accuracies(everything, every_y, test, dataset.test.targets, [chosen])[0]


def accuracies(
    x: np.ndarray, y: np.ndarray, judged: np.ndarray, truth: np.ndarray, strengths: Sequence[float]
) -> list[float]:
    """Of each strength, by way of the images' products with each other: dimensions may outnumber images."""
    centre, scale = x.mean(0), x.std(0) + 1e-6
    x, judged = (x - centre) / scale, (judged - centre) / scale
    wanted = np.eye(int(max(y.max(), truth.max())) + 1)[y]
    mean = wanted.mean(0)
    among = (x @ x.T / x.shape[1]).astype(np.float64)
    to = (judged @ x.T / x.shape[1]).astype(np.float64)
    answers = [to @ np.linalg.solve(among + s * np.eye(len(x)), wanted - mean) + mean for s in strengths]
    return [float((answer.argmax(1) == truth).mean()) for answer in answers]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| pack | classes | raw pixels | untrained | class token | all tokens |", "|---|---|---|---|---|---|"]
    for row in rows:
        name = row["case"] if row["held_out"] else f"{row['case']} (its training images were seen)"
        low, high = row["interval"]
        below = " | ".join(f"{100 * row[key]:.1f}" for key in ("pixels", "untrained"))
        token = f"**{100 * row['token']:.1f}** ({100 * low:.1f}–{100 * high:.1f})"
        lines.append(f"| {name} | {row['classes']} | {below} | {token} | {100 * row['tokens']:.1f} |")
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
    trained, random = load_backbone("bundled"), untrained()
    rows = []
    packs = sorted(path.parent.name for path in (asked.shared / "data").glob("*/test.parquet"))
    for pack in sorted(packs, key=lambda name: (name not in HELD_OUT, name)):
        dataset = open_data(asked.shared / "data" / pack)
        tokens = features(dataset, lambda images: trained.model(images).flatten(1))  # the class token is the first
        token = probe(dataset, [part[:, : trained.width] for part in tokens])
        row = {
            "case": pack,
            "held_out": pack in HELD_OUT,
            "classes": len(dataset.labels),
            "train_images": len(dataset.train) + len(dataset.validation),
            "test_images": len(dataset.test),
            "pixels": probe(dataset, features(dataset, lambda images: images.flatten(1))),
            "untrained": probe(dataset, features(dataset, lambda images: random.model(images)[:, 0])),
            "token": token,
            "tokens": probe(dataset, tokens),
            "interval": wilson_interval(token, len(dataset.test)),
        }
        print(table([row]).splitlines()[-1], flush=True)
        rows.append(row)
    if asked.json:
        write(asked.json, rows, fingerprint=trained.fingerprint)


if __name__ == "__main__":
    main()
