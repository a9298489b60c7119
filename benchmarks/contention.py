"""What is left of training, storing and predicting on a busy machine, and what that costs on an idle one.

    python -m benchmarks.contention --json out.json

On the bundled backbone, with default options. Busy means one spinning process per core. Every round measures two ways
of using the cores, idle and busy: `pieces`, as the commands do it (a thread computes a piece of the batch), and
`operations`, torch's own (every operation is cut up). On the idle machine each way is measured twice, in the order
pieces, operations, operations, pieces, so that a drift of the machine's speed within a round favours neither. A fair
share beside one busy process per core is 0.5.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import write
from vit_memory import Backbone, MemoryViT, Recipe, fit, load_backbone, new_task, open_data
from vit_memory.data.loading import default_workers
from vit_memory.data.sources import Dataset
from vit_memory.evaluation.inference import predict
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.options import TrainingOptions

CLASSES, PER_CLASS, SIZE = 4, 96, 160
STEPS, SKIPPED = 90, 10  # steps that are timed, and those before that warm up: new threads touch new memory
TARGETS = {"busy_share": 0.40, "idle_against_operations": 0.97}
WAYS: dict[str, int | None] = {"pieces": None, "operations": 1}  # the argument `threads` of what is measured
Rates = dict[str, float]


def write_images(folder: Path) -> None:
    """Pictures of noise, as JPEG: what they show does not matter here."""
    rng = np.random.default_rng(0)
    for i in range(CLASSES * PER_CLASS):
        path = folder / f"class {i % CLASSES}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        small.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(path, quality=90)


def train(backbone: Backbone, dataset: Dataset, threads: int | None) -> Rates:
    """Views stored per second, with the default number of loading processes, and steps per second after that."""
    seen: dict[str, list[tuple[float, int]]] = {"storing": [], "training": []}
    recipe = Recipe(steps=SKIPPED + STEPS, views=1, evaluate_every=1000)
    fit(
        backbone,
        [new_task(backbone, "busy", dataset.labels)],
        dataset.train,
        dataset.validation,
        recipe,
        options=TrainingOptions(cache=Cache("ram"), workers=default_workers(), threads=threads),
        callbacks=Callbacks(lambda progress: note(seen, progress)),
    )
    return {"storing": rate(seen["storing"]), "training": rate(seen["training"][SKIPPED:])}


def note(seen: dict[str, list[tuple[float, int]]], progress: Progress) -> None:
    """Remember when how much was done."""
    if progress.scores is None:  # the last step ends with an evaluation
        seen[progress.stage].append((time.perf_counter(), progress.step))


def rate(marks: list[tuple[float, int]]) -> float:
    """Units per second between the first mark and the last."""
    (began, first), (ended, last) = marks[0], marks[-1]
    return (last - first) / (ended - began)


def predict_all(model: MemoryViT, paths: list[str], threads: int | None) -> Rates:
    """Images per second, from the first answers to the last, with the default number of loading processes."""
    answers = predict(model, paths, list(model.tasks), workers=default_workers(), threads=threads)
    began = time.perf_counter()
    count = sum(1 for _ in answers)
    return {"predict": count / (time.perf_counter() - began)}


@contextmanager
def busy_cores() -> Iterator[None]:
    """One spinning process per core, ended by their own handles."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


ORDERS = (
    ("idle", nullcontext, ("pieces", "operations", "operations", "pieces")),
    ("busy", busy_cores, ("pieces", "operations")),
)


def measure(rounds: int) -> dict[str, dict[tuple[str, str], list[float]]]:
    """Rates by what is done, by way and by state of the machine, one per round."""
    collected: dict[str, dict[tuple[str, str], list[float]]] = {}
    backbone = load_backbone("bundled")
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        dataset = open_data(folder)
        paths = sorted(map(str, Path(folder).glob("*/*.jpg")))
        tasks = [new_task(backbone, f"task-{i}", dataset.labels) for i in range(3)]
        model = MemoryViT(backbone, tasks)
        works: tuple[Callable[[int | None], Rates], ...] = (
            lambda threads: train(backbone, dataset, threads),
            lambda threads: predict_all(model, paths, threads),
        )
        for number in range(rounds + 1):
            for work in works:
                for state, machine, order in ORDERS:
                    measured: dict[tuple[str, str], list[float]] = {}
                    for way in order:
                        with machine():
                            rates = work(WAYS[way])
                        for name, value in rates.items():
                            measured.setdefault((name, way), []).append(value)
                    for (name, way), values in measured.items() if number else ():  # the first round warms up
                        collected.setdefault(name, {}).setdefault((way, state), []).append(statistics.fmean(values))
            print(f"round {number} of {rounds}", file=sys.stderr)
    return collected


def spread(values: list[float]) -> dict[str, object]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)], "rounds": len(values)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = []
    for name, rates in measure(options.rounds).items():
        row: dict[str, object] = {"case": name}
        for way in ("pieces", "operations"):
            idle, busy = rates[way, "idle"], rates[way, "busy"]
            row[way] = {
                "idle_per_s": spread(idle),
                "busy_per_s": spread(busy),
                "busy_share": spread([b / i for b, i in zip(busy, idle, strict=True)]),
            }
        pairs = zip(rates["pieces", "idle"], rates["operations", "idle"], strict=True)
        row["idle_against_operations"] = spread([ours / theirs for ours, theirs in pairs])
        rows.append(row)
        print(name, row)
    write(options.json, rows, targets=TARGETS, torch_threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
