"""vit-memory predict with Ray and without, on the same images: are the answers the same, and what does Ray cost?

    python -m benchmarks.ray_data --json results/ray_data.json

Small JPEGs, the bundled backbone, tasks of every kind. Both sides are the command, in a process of its own, with all
cores: without Ray one process that computes and others that decode, with Ray a process per core. Every round runs both,
in alternating order; the seconds include the start of Python, and of Ray. The answers of the first round are compared.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.measure import commit, seconds, write
from vit_memory import Backbone, Bundle, load_backbone, new_task
from vit_memory.task import Task

SIZE = (64, 48)
KINDS = {"pets": "single-label", "parts": "multi-label", "height": "regression"}


def main() -> None:
    """Make the images, run both sides, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root / "photos", options.images)
        backbone = load_backbone("bundled")
        tasks = [random_task(backbone, name, kind) for name, kind in KINDS.items()]
        Bundle.create(root / "zoo", backbone, tasks)
        times: dict[str, list[float]] = {"plain": [], "ray": []}
        for i in range(options.rounds):
            sides = {"plain": lambda: run_plain(root), "ray": lambda i=i: run_ray(root, root / f"out{i}")}
            for name in sorted(sides, reverse=bool(i % 2)):
                times[name].append(seconds(sides[name]))
                print(f"round {i + 1}: {name} {times[name][-1]:.1f} s", file=sys.stderr, flush=True)
        compared = compare(root / "plain.jsonl", root / "out0")
        again = seconds(lambda: run_ray(root, root / "out0"))
    row: dict[str, object] = {"case": f"{options.images} images", "images": options.images, "size": list(SIZE)}
    row |= {"tasks": len(tasks), "ray": version("ray"), **compared, "second_start_s": round(again, 1)}
    for name, each in times.items():
        row[f"{name}_s"] = {"median": round(statistics.median(each), 1), "all": [round(one, 1) for one in each]}
    row["ratio"] = round(statistics.median(a / b for a, b in zip(times["ray"], times["plain"], strict=True)), 3)
    print(json.dumps(row, indent=2))
    write(options.json, [{**row, "commit": commit()}])


def write_images(folder: Path, count: int) -> None:
    """Smooth random pictures, different for every number, a thousand per folder; every thousandth file is no image."""
    for i in range(count):
        path = folder / f"{i // 1000:03d}" / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 256, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize(SIZE, Image.Resampling.BILINEAR).save(path)
        if i % 1000 == 500:
            path.write_bytes(path.read_bytes()[:100])


def random_task(backbone: Backbone, name: str, kind: str) -> Task:
    """A task with a random head, so that answers differ from image to image."""
    import torch

    labels = ["metres"] if kind == "regression" else [f"{name} {i}" for i in range(10)]
    task = new_task(backbone, name, labels, kind=kind, cells=5)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return task.map(lambda tensor: torch.randn(tensor.shape, generator=generator) * 0.3)


def run_plain(root: Path) -> None:
    """The command without Ray."""
    with (root / "plain.jsonl").open("w") as lines:
        run(["predict", str(root / "photos"), "--bundle", str(root / "zoo"), "--format", "jsonl"], lines)


def run_ray(root: Path, out: Path) -> None:
    """The command with Ray."""
    with (root / "ray.log").open("w") as log:
        run(["predict", str(root / "photos"), "--bundle", str(root / "zoo"), "--ray", "--out", str(out)], log)


def run(words: Sequence[str], output: object) -> None:
    """Run the command; the log of one that fails is shown."""
    without_cluster = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "vit_memory", *words]
    done = subprocess.run(
        command,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env=without_cluster,
        check=False,  # type: ignore[call-overload]
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def compare(plain: Path, out: Path) -> dict[str, object]:
    """How the answers differ: other labels, other errors, and the largest difference of a number."""
    lines = [json.loads(line) for line in plain.read_text().splitlines()]
    rows = [row for part in sorted(out.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]
    assert [row["path"] for row in rows] == [line["image"] for line in lines]
    other_labels = other_errors = 0
    differences = [0.0]
    for row, line in zip(rows, lines, strict=True):
        other_errors += row["error"] != line.get("error")
        if row["error"] is not None:
            continue
        told = line["tasks"]
        present = {one["label"]: one["probability"] for one in told["parts"]["labels"]}
        found = dict(zip(row["parts"], row["parts probabilities"], strict=True))
        other_labels += (row["pets"] != told["pets"]["label"]) + (found.keys() != present.keys())
        differences.append(abs(row["pets confidence"] - told["pets"]["confidence"]))
        differences += [abs(found[label] - present[label]) for label in found.keys() & present.keys()]
        differences.append(abs(row["height metres"] - told["height"]["values"]["metres"]))
    assert all(map(math.isfinite, differences))
    errors = sum(row["error"] is not None for row in rows)
    facts: dict[str, object] = {"bad_images": errors, "other_errors": other_errors, "other_labels": other_labels}
    return {**facts, "largest_difference": max(differences)}


if __name__ == "__main__":
    main()
