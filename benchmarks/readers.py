"""Learned readers on real images, beside memory, linear heads and LoRA.

    python -m benchmarks.readers --json results/readers.json                   # resumes: rows in the record are kept
    python -m benchmarks.readers --json results/readers.json --only LoRA       # some groups of methods
    python -m benchmarks.readers --json results/readers.json --timing          # seconds per step, on a quiet machine
    python -m benchmarks.readers --table results/readers.json                  # the record as Markdown

The five packs of ../shared/data that no backbone of ours was trained on, 20 training images per class, on the DINOv2-S
of ../shared/weights at 98 pixels, 32 images a step. Every method has the same images, views, batches and evaluations.
Its learning rate is one of three, chosen by the validation accuracy of seed 0 and used for the other seeds; the weights
are those of its best evaluation on validation images. Test images are read once per method, pack and seed, and each
row keeps which of them were right, so that methods are compared on the same images.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import add_rows, commit
from benchmarks.packs import (
    BATCH,
    EVALUATE_EVERY,
    NOTES,
    PACKS,
    PIXELS,
    TIMED_PACK,
    TIMED_STEPS,
    compare,
    file_bytes,
    images_of,
    is_row,
    load_dinov2,
    mean_accuracy,
    percent,
    right_answers,
    tested_row,
    time_training,
)
from benchmarks.reader_sweeps import SWEEPS, Sweep
from vit_memory import Backbone, Recipe, Task, fit, new_task, open_data
from vit_memory.data.loading import default_workers
from vit_memory.data.sources import Dataset
from vit_memory.evaluation.reproduce import lora
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.fit import training_preprocessing
from vit_memory.training.options import TrainingOptions

LORA, LORA_RATES = "LoRA", (1e-3, 3e-3, 1e-2)
LORA_RECIPE = Recipe(steps=100, batch=BATCH, evaluate_every=EVALUATE_EVERY)
MEMORY = ("5 cells", "20 cells", "5 cells, SGD", "20 cells, SGD")


def train_sweep(
    backbone: Backbone, dataset: Dataset, sweep: Sweep, rates: Mapping[str, Sequence[float]], seed: int
) -> Iterator[dict[str, Any]]:
    """One row per method: the rate with the best validation accuracy, read on the test images."""
    train, validation = images_of(dataset, seed)
    recipe = Recipe(
        steps=sweep.steps,
        batch=BATCH,
        optimiser=sweep.optimiser,
        seed=seed,
        evaluate_every=EVALUATE_EVERY,
        keep_best=True,
        **sweep.recipe,
    )
    chosen: dict[str, tuple[float, Any, list[tuple[int, float]], dict[str, float]]] = {}
    for one_rates in sorted({tuple(rates[method]) for method in rates}):  # all methods of the same rates at once
        methods = [method for method in rates if tuple(rates[method]) == one_rates]
        tasks = [_task(backbone, f"task-{i}", dataset.labels, sweep.methods[m], seed) for i, m in enumerate(methods)]
        curves: list[Progress] = []
        result = fit(
            backbone,
            tasks,
            train,
            validation,
            replace(recipe, learning_rates=one_rates),
            options=TrainingOptions(cache=Cache("disk"), image_size=PIXELS, workers=default_workers()),
            callbacks=Callbacks(lambda progress, curves=curves: curves.append(progress) if progress.scores else None),  # type: ignore[misc]
        )
        for i, setting in enumerate(result.settings):
            method = methods[i // len(one_rates)]
            if setting.score is None:
                continue
            curve = [(progress.step, progress.scores[i]) for progress in curves if progress.scores]
            searched = {
                **(chosen[method][3] if method in chosen else {}),
                f"{setting.setting.learning_rate:g}": setting.score,
            }
            if method not in chosen or setting.score > chosen[method][0]:
                chosen[method] = (setting.score, setting, curve, searched)
            else:
                chosen[method] = (*chosen[method][:3], searched)
    tested = right_answers(
        backbone, dataset.splits["test"], {m: setting.task for m, (_, setting, _, _) in chosen.items()}
    )
    for method, (score, setting, curve, searched) in chosen.items():
        yield {
            "method": method,
            "rate": setting.setting.learning_rate,
            "steps": sweep.steps,
            "optimiser": sweep.optimiser,
            "searched": searched,
            "validation": score,
            "kept_step": next(step for step, value in curve if value == score),
            "curve": [value for _, value in curve],
            "parameters": setting.task.parameters,
            "bytes": file_bytes(setting.task),
            "images": len(train),
            **tested_row(tested[method]),
        }


def _task(backbone: Backbone, name: str, labels: Sequence[str], arguments: Mapping[str, Any], seed: int) -> Task:
    arguments = dict(arguments)
    blocks = arguments.pop("blocks", None)
    task = new_task(backbone, name, labels, generator=torch.Generator().manual_seed(seed), **arguments)
    return task if blocks is None else _updated_in(task, blocks)


def _updated_in(task: Task, blocks: Sequence[int]) -> Task:
    """The task with low-rank updates in these blocks only.

    In the others A and B are zero, so the gradient of both is zero and they stay so.
    """
    assert task.reader is not None
    kept = torch.zeros(task.memory.shape[0], 1, 1)
    kept[list(blocks)] = 1
    return replace(task, reader=task.reader.map(lambda tensor: tensor * kept))


def train_lora(backbone: Backbone, dataset: Dataset, rates: Sequence[float], seed: int) -> dict[str, Any]:
    """The same for LoRA, which has a pass of its own."""
    train, validation = images_of(dataset, seed)
    recipe = replace(LORA_RECIPE, seed=seed)
    preprocessing = training_preprocessing(backbone, PIXELS)
    results = [
        lora.train_lora(backbone, train, validation, len(dataset.labels), recipe, preprocessing, rate) for rate in rates
    ]
    best = max(results, key=lambda result: result.score)
    right = lora.correct(best.model, dataset.splits["test"], preprocessing, backbone).numpy()
    return {
        "method": LORA,
        "rate": best.rate,
        "steps": recipe.steps,
        "optimiser": "adamw",
        "searched": {f"{result.rate:g}": result.score for result in results},
        "validation": best.score,
        "kept_step": next(step for step, value in best.curve if value == best.score),
        "curve": [value for _, value in best.curve],
        "parameters": best.parameters,
        "bytes": 4 * best.parameters,
        "images": len(train),
        **tested_row(right),
    }


# -------------------------------------------------------------------------------------------------------- what it costs


def time_steps(backbone: Backbone, shared: Path) -> Iterator[dict[str, Any]]:
    """Seconds per step of every method trained alone, and of storing a view: medians, on a machine that is idle."""
    dataset = open_data(str(shared / "data" / TIMED_PACK), seed=0)
    train, validation = images_of(dataset, 0)
    methods = [(method, sweep) for sweep in SWEEPS.values() for method in sweep.methods]
    for i, (method, sweep) in enumerate(methods):
        tasks = [_task(backbone, "task", dataset.labels, sweep.methods[method], 0)]
        recipe = Recipe(steps=TIMED_STEPS, batch=BATCH, optimiser=sweep.optimiser, evaluate_every=10**6)
        recipe = replace(recipe, learning_rates=(1e-3,), views=1)
        options = TrainingOptions(cache=Cache("disk"), image_size=PIXELS, workers=default_workers())
        training = partial(fit, backbone, tasks, train, validation, recipe, options=options)
        store, step = time_training(lambda c, run=training: run(callbacks=c), len(train) + len(validation))  # type: ignore[misc]
        if i == 0:  # the others find the store
            yield {"case": "timing, storing a view", "method": "storing a view", "seconds": store}
        yield {"case": f"timing, {method}", "method": method, "seconds": step}
    times: list[float] = []
    recipe, preprocessing = replace(LORA_RECIPE, steps=6), training_preprocessing(backbone, PIXELS)
    few = validation.select(range(8))  # evaluated once, at the end

    def at_end(step: int) -> None:
        times.append(time.perf_counter())

    lora.train_lora(backbone, train, few, len(dataset.labels), recipe, preprocessing, 1e-4, at_end)
    yield {"case": f"timing, {LORA}", "method": LORA, "seconds": float(np.median(np.diff(times)))}


def seconds_to(rows: Sequence[Mapping[str, Any]], pack: str, method: str, accuracy: float) -> float | None:
    """Training time until the validation accuracy, mean over seeds, reaches `accuracy`; None if it never does.

    Methods that read a store pay for storing eight views of every image first.
    """
    own = [row for row in rows if row.get("pack") == pack and row["method"] == method]
    cost = {row["method"]: row["seconds"] for row in rows if row["case"].startswith("timing")}
    view = cost.get(f"storing a view for {method}", cost["storing a view"])
    if not own or method not in cost:
        return None
    curve = np.mean([row["curve"] for row in own], axis=0)
    reached = np.flatnonzero(curve >= accuracy - 1e-9)
    if not len(reached):
        return None
    steps = EVALUATE_EVERY * (int(reached[0]) + 1)
    epochs = math.ceil(steps / math.ceil(own[0]["images"] / BATCH))
    views = 0 if method == LORA else min(8, epochs) * own[0]["images"]
    return float(steps * cost[method] + views * view)


def time_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds to the validation accuracy that the best memory setting ends with, by pack."""
    tested = [row for row in rows if "right" in row]
    timed = {row["method"]: row["seconds"] for row in rows if row["case"].startswith("timing")}
    memory = best_memory(tested)
    lines = [f"| method | s per step | {' | '.join(PACKS)} |", "|---|---|" + "---|" * len(PACKS)]
    for method in dict.fromkeys(row["method"] for row in tested if row["method"] in timed):
        times = []
        for pack in PACKS:
            ends = [row["curve"][-1] for row in tested if (row.get("pack"), row["method"]) == (pack, memory)]
            seconds = seconds_to(rows, pack, method, float(np.mean(ends)))
            times.append("never" if seconds is None else f"{seconds:.0f} s")
        lines.append(f"| {method} | {timed[method]:.3f} | {' | '.join(times)} |")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- what it says


def best_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """The memory setting with the highest mean test accuracy: the hardest to beat."""
    trained = {row["method"] for row in rows}
    return max((method for method in MEMORY if method in trained), key=lambda method: mean_accuracy(rows, method))


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown: test accuracy by pack, and differences on the mean over packs."""
    rows = [row for row in record["rows"] if "right" in row]
    tried = {method for sweep in SWEEPS.values() if sweep.seeds == 1 for method in sweep.methods}
    methods = [method for method in dict.fromkeys(row["method"] for row in rows) if method not in tried]
    memory = best_memory(rows)
    lines = [
        f"| method | parameters | file | {' | '.join(PACKS)} | mean | against {memory} | against LoRA |",
        "|---|---|---|" + "---|" * (len(PACKS) + 3),
    ]
    for method in methods:
        own = [row for row in rows if row["method"] == method]
        sizes = [min(own, key=lambda row: row["parameters"]), max(own, key=lambda row: row["parameters"])]
        parameters = " to ".join(dict.fromkeys(f"{row['parameters'] / 1e3:.0f} k" for row in sizes))
        size = " to ".join(dict.fromkeys(f"{row['bytes'] / 1e3:.0f} kB" for row in sizes))
        cells = [percent(mean_accuracy(own, method, pack)) for pack in (*PACKS, None)]
        differences = ["" if method == other else compare(rows, method, other) for other in (memory, LORA)]
        lines.append(f"| {method} | {parameters} | {size} | {' | '.join([*cells, *differences])} |")
    seeds = {method: len({row["seed"] for row in rows if row["method"] == method}) for method in methods}
    lines.append(f"\nSeeds: {', '.join(f'{method} {count}' for method, count in seeds.items())}.")
    return "\n".join(lines)


def table_of_changes(record: Mapping[str, Any]) -> str:
    """What was tried with the first seed only, as Markdown: validation and test accuracy against rank 8 (+ gains)."""
    rows = [row for row in record["rows"] if row.get("seed") == 0 and "right" in row]
    lines = [
        f"| changed | validation | {' | '.join(PACKS)} | mean | against the same without the change |",
        "|---|---|" + "---|" * (len(PACKS) + 2),
    ]
    changed = [m for name, sweep in SWEEPS.items() if name not in ("readers", "memory") for m in sweep.methods]
    for method in ("rank 8", "rank 8 + gains", *changed):
        own = [row for row in rows if row["method"] == method]
        if not own:
            continue
        base = method.removesuffix(", 400 steps") if method.endswith(", 400 steps") else "rank 8 + gains"
        base = "rank 8" if method.endswith("of the blocks") else base
        complete = {row["pack"] for row in own} == set(PACKS)
        validation = percent(float(np.mean([row["validation"] for row in own])) if complete else math.nan)
        cells = [percent(mean_accuracy(own, method, pack)) for pack in (*PACKS, None)]
        gap = "" if method in ("rank 8", base) else compare(rows, method, base)
        lines.append(f"| {method} | {validation} | {' | '.join(cells)} | {gap} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- the runs


def cases(only: Sequence[str], seed: int) -> Iterator[str]:
    """Groups of methods that are trained with that seed, composable ones first."""
    yield from (name for name, sweep in SWEEPS.items() if name in only and seed < sweep.seeds)
    yield from (name for name in (LORA,) if name in only)


def run(asked: argparse.Namespace) -> None:
    """Everything that is not in the record yet."""
    rows: list[dict[str, Any]] = json.loads(asked.json.read_text())["rows"] if asked.json.exists() else []
    backbone = load_dinov2(asked.shared)
    if asked.timing:
        timed = [{**row, "commit": commit()} for row in time_steps(backbone, asked.shared)]
        for row in timed:
            print(f"{row['case']:60} {row['seconds']:.4f} s", flush=True)
        add_rows(asked.json, timed, **NOTES)
        return
    for seed in range(asked.seeds):
        for pack in asked.packs:
            dataset = open_data(str(asked.shared / "data" / pack), seed=seed)
            for group in cases(asked.only, seed):
                methods = tuple(SWEEPS[group].methods) if group in SWEEPS else (group,)
                missing = [m for m in methods if not any(is_row(row, pack, m, seed) for row in rows)]
                if not missing:
                    continue
                start = time.perf_counter()
                rates = {method: _rates(rows, group, pack, method, seed) for method in missing}
                found = (
                    train_sweep(backbone, dataset, SWEEPS[group], rates, seed)
                    if group in SWEEPS
                    else [train_lora(backbone, dataset, rates[group], seed)]
                )
                new = []
                for row in found:
                    case = f"{pack}, {row['method']}, seed {seed}"
                    new.append({"case": case, "pack": pack, "seed": seed, **row, "commit": commit()})
                    print(f"{case:60} {100 * row['test']:5.1f} %  rate {row['rate']:g}", flush=True)
                print(f"  {group}: {time.perf_counter() - start:.0f} s", flush=True)
                add_rows(asked.json, new, **NOTES)
                rows += new


def _rates(rows: Sequence[Mapping[str, Any]], group: str, pack: str, method: str, seed: int) -> tuple[float, ...]:
    """All rates for the first seed, the one that it chose for the others."""
    first = [row["rate"] for row in rows if is_row(row, pack, method, 0)]
    every = SWEEPS[group].rates if group in SWEEPS else LORA_RATES
    return every if seed == 0 or not first else (first[0],)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the record; rows in it are kept")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder of data/ and weights/")
    parser.add_argument("--packs", nargs="+", default=list(PACKS))
    parser.add_argument("--seeds", type=int, default=3)
    groups = [*SWEEPS, LORA]
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, help="some groups of methods")
    parser.add_argument("--timing", action="store_true", help="measure seconds per step instead")
    parser.add_argument("--table", type=Path, help="print a record as Markdown instead")
    asked = parser.parse_args()
    if asked.table:
        record = json.loads(asked.table.read_text())
        print(f"{table(record)}\n\n{table_of_changes(record)}\n\n{time_table(record['rows'])}")
        return
    if asked.json is None:
        parser.error("give --json: the record is how it resumes.")
    run(asked)


if __name__ == "__main__":
    main()
