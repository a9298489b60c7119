"""Branches on real images: accuracy against k, the number of blocks, beside LoRA and readers.

    python -m benchmarks.branches --json results/branches.json         # resumes: rows in the record are kept
    python -m benchmarks.branches --json results/branches.json --domain    # one branch for two packs, a third on it
    python -m benchmarks.branches --json results/branches.json --timing    # seconds per step, on a quiet machine
    python -m benchmarks.branches --table results/branches.json            # as Markdown, beside results/readers.json

The packs, images, views, batches and steps of `benchmarks.readers`; a branch of rank 8 on q and v of the last k of 12
blocks, and a head on its class token. The search is LoRA's there: AdamW for 100 steps, three learning rates on seed 0,
the best by validation accuracy for the other seeds, the weights of the best evaluation. The low-rank part acts as LoRA
with scaling 1, where peft's has 2.

`--domain` trains one branch on two packs of scenes at once, with a class token and a head for each, and then tasks of
every default method for a third pack, aerial scenes, on the frozen branch and on the original trunk, with the same
recipe; the best by validation accuracy is read on the test images.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
from benchmarks.readers import LORA_RATES, time_table
from vit_memory import Backbone, Recipe, fit, new_branch, new_task, open_data
from vit_memory.data.loading import default_workers
from vit_memory.data.sources import Dataset
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.fit_branch import TaskData, fit_branch
from vit_memory.training.grid import DEFAULT_GRID
from vit_memory.training.options import TrainingOptions

BLOCKS, STEPS, RANK = (2, 4, 6, 12), 100, 8
READER = "rank 8 + gains"  # of benchmarks.readers, the one that branches are compared with


def method_of(blocks: int) -> str:
    """The name of a row's method."""
    return f"branch of {blocks} blocks"


def train_branch(
    backbone: Backbone, dataset: Dataset, blocks: int, rates: Sequence[float], seed: int
) -> dict[str, Any]:
    """A row: the rate with the best validation accuracy, read on the test images."""
    train, validation = images_of(dataset, seed)
    generator = torch.Generator().manual_seed(seed)
    branch = new_branch(backbone, "branch", blocks=blocks, rank=RANK, generator=generator)
    task = new_task(backbone, "task", dataset.labels, regime="head", branch=branch)
    recipe = replace(
        Recipe.reader(),
        steps=STEPS,
        batch=BATCH,
        seed=seed,
        evaluate_every=EVALUATE_EVERY,
        learning_rates=tuple(rates),
    )
    curves: list[Progress] = []
    result = fit(
        backbone,
        [task],
        train,
        validation,
        recipe,
        branches=[branch],
        train_branches=True,
        options=TrainingOptions(cache=Cache("ram"), image_size=PIXELS, workers=default_workers()),
        callbacks=Callbacks(lambda progress: curves.append(progress) if progress.scores else None),
    )
    best = result.best
    assert best.branch is not None
    place = next(i for i, one in enumerate(result.settings) if one is best)
    curve = [progress.scores[place] for progress in curves if progress.scores]
    right = right_answers(backbone, dataset.splits["test"], {"task": best.task}, [best.branch])["task"]
    return {
        "method": method_of(blocks),
        "blocks": blocks,
        "rate": best.setting.learning_rate,
        "steps": STEPS,
        "optimiser": "adamw",
        "searched": {f"{one.setting.learning_rate:g}": one.score for one in result.settings},
        "validation": best.score,
        "kept_step": EVALUATE_EVERY * (curve.index(best.score) + 1),
        "curve": curve,
        "parameters": best.parameters,
        "bytes": file_bytes(best.task, best.branch),
        "images": len(train),
        **tested_row(right),
    }


DOMAIN, THIRD, DOMAIN_BLOCKS = ("sun8", "miniplaces40"), "aid30", 6


def train_domain(backbone: Backbone, shared: Path, seed: int) -> Iterator[dict[str, Any]]:
    """A row for the third pack on the original trunk, and one on a branch of the two others."""
    options = TrainingOptions(cache=Cache("ram"), image_size=PIXELS, workers=default_workers())
    recipe = replace(Recipe.reader(), batch=BATCH, seed=seed, evaluate_every=EVALUATE_EVERY)
    data = []
    for pack in DOMAIN:
        dataset = open_data(str(shared / "data" / pack), seed=seed)
        task = new_task(backbone, pack, dataset.labels, regime="class")
        data.append(TaskData(task, *images_of(dataset, seed)))
    generator = torch.Generator().manual_seed(seed)
    untrained = new_branch(backbone, "scenes", blocks=DOMAIN_BLOCKS, rank=RANK, generator=generator)
    scenes = fit_branch(backbone, [untrained], data, recipe, options=options).best
    assert scenes.branch is not None
    third = open_data(str(shared / "data" / THIRD), seed=seed)
    train, validation = images_of(third, seed)
    for branch in (None, scenes.branch):
        branches = [] if branch is None else [branch]
        tasks = replace(DEFAULT_GRID, seeds=(seed,)).tasks(backbone, "third", third.labels, (), branch=branch)
        best = fit(backbone, tasks, train, validation, recipe, branches=branches, options=options).best
        right = right_answers(backbone, third.splits["test"], {"third": best.task}, branches)["third"]
        on_branch = f"branch of {DOMAIN_BLOCKS} blocks trained on {' and '.join(DOMAIN)}"
        where = "original trunk" if branch is None else on_branch
        yield {
            "method": f"third task on the {where}",
            "kept": best.setting.name,
            "validation": best.score,
            "domain_scores": None if branch is None else dict(scenes.branch.record.metrics),
            **tested_row(right),
        }


def run_domain(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The rows of the domain that are not in the record yet."""
    backbone = load_dinov2(asked.shared)
    for seed in range(asked.seeds):
        if any("domain_scores" in row and row["seed"] == seed for row in rows):
            continue
        new = []
        for row in train_domain(backbone, asked.shared, seed):
            new.append({"case": f"domain, {row['method']}, seed {seed}", "seed": seed, **row, "commit": commit()})
            print(f"{new[-1]['case']:90} {100 * row['test']:5.1f} %  {row['kept']}", flush=True)
        add_rows(asked.json, new, **NOTES)


def time_steps(backbone: Backbone, shared: Path) -> Iterator[dict[str, Any]]:
    """Seconds per step of branches, and of storing the tokens of a view, on a machine that is idle."""
    dataset = open_data(str(shared / "data" / TIMED_PACK), seed=0)
    train, validation = images_of(dataset, 0)
    recipe = replace(Recipe.reader(), steps=TIMED_STEPS, batch=BATCH, evaluate_every=10**6, learning_rates=(1e-3,))
    options = TrainingOptions(cache=Cache("ram"), image_size=PIXELS, workers=default_workers())
    for blocks in BLOCKS:
        branch = new_branch(backbone, "branch", blocks=blocks, rank=RANK)
        tasks = [new_task(backbone, "task", dataset.labels, regime="head", branch=branch)]
        training = partial(fit, backbone, tasks, train, validation, replace(recipe, views=1), branches=[branch])
        training = partial(training, train_branches=True, options=options)
        store, step = time_training(lambda c, run=training: run(callbacks=c), len(train) + len(validation))  # type: ignore[misc]
        for method, seconds in ((method_of(blocks), step), (f"storing a view for {method_of(blocks)}", store)):
            yield {"case": f"timing, {method}", "method": method, "seconds": seconds}


def table(rows: Sequence[Mapping[str, Any]], readers: Sequence[Mapping[str, Any]]) -> str:
    """Test accuracy by pack, and differences on the mean over packs to LoRA and to a reader."""
    peers = {
        name: [row for row in readers if row.get("method") == name and "right" in row]
        for name in ("5 cells", READER, "LoRA")
    }
    every = [*peers["5 cells"], *peers[READER], *sorted(rows, key=lambda row: row["blocks"]), *peers["LoRA"]]
    lines = [
        f"| method | passes (products) | parameters | {' | '.join(PACKS)} | mean | against {READER} | against LoRA |",
        "|---|---|---|" + "---|" * (len(PACKS) + 3),
    ]
    for method in dict.fromkeys(row["method"] for row in every):
        own = [row for row in every if row["method"] == method]
        cost = f"{1 + own[0]['blocks'] / 12:.2f}" if "blocks" in own[0] else "1 and a token"
        cost = "a pass of its own" if method == "LoRA" else cost
        sizes = sorted({row["parameters"] for row in own})
        parameters = " to ".join(dict.fromkeys(f"{size / 1e3:.0f} k" for size in (sizes[0], sizes[-1])))
        cells = [percent(mean_accuracy(own, method, pack)) for pack in (*PACKS, None)]
        differences = ["" if method == other else compare(every, method, other) for other in (READER, "LoRA")]
        lines.append(f"| {method} | {cost} | {parameters} | {' | '.join([*cells, *differences])} |")
    seeds = {(row["method"], row["seed"]) for row in every}
    counts = {method: sum(m == method for m, _ in seeds) for method in dict.fromkeys(row["method"] for row in every)}
    lines.append(f"\nSeeds: {', '.join(f'{method} {count}' for method, count in counts.items())}.")
    return "\n".join(lines)


def missing(rows: Sequence[Mapping[str, Any]], asked: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    """Seed, pack and blocks of every row that is not in the record."""
    for seed in range(asked.seeds):
        for blocks in asked.blocks:
            for pack in asked.packs:
                if not any(is_row(row, pack, method_of(blocks), seed) for row in rows):
                    yield seed, pack, blocks


def run(asked: argparse.Namespace) -> None:
    """Everything that is not in the record yet."""
    rows: list[dict[str, Any]] = json.loads(asked.json.read_text())["rows"] if asked.json.exists() else []
    if asked.domain:
        run_domain(asked, rows)
        return
    backbone = load_dinov2(asked.shared)
    if asked.timing:
        timed = [{**row, "commit": commit()} for row in time_steps(backbone, asked.shared)]
        add_rows(asked.json, timed, **NOTES)
        return
    for seed, pack, blocks in list(missing(rows, asked)):
        start = time.perf_counter()
        dataset = open_data(str(asked.shared / "data" / pack), seed=seed)
        first = [row["rate"] for row in rows if is_row(row, pack, method_of(blocks), 0)]
        rates = LORA_RATES if seed == 0 or not first else first[:1]
        row = train_branch(backbone, dataset, blocks, rates, seed)
        case = f"{pack}, {row['method']}, seed {seed}"
        rows.append({"case": case, "pack": pack, "seed": seed, **row, "commit": commit()})
        took = time.perf_counter() - start
        print(f"{case:50} {100 * row['test']:5.1f} %  rate {row['rate']:g}  {took:.0f} s", flush=True)
        add_rows(asked.json, rows[-1:], **NOTES)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the record; rows in it are kept")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder of data/ and weights/")
    parser.add_argument("--packs", nargs="+", default=list(PACKS))
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--domain", action="store_true", help="one branch for two packs, and a third task on it")
    parser.add_argument("--timing", action="store_true", help="measure seconds per step instead")
    parser.add_argument("--table", type=Path, help="print a record as Markdown instead")
    parser.add_argument("--readers", type=Path, default=Path("results/readers.json"), help="record with LoRA's rows")
    asked = parser.parse_args()
    if asked.table:
        readers = json.loads(asked.readers.read_text())["rows"] if asked.readers.exists() else []
        rows = json.loads(asked.table.read_text())["rows"]
        print(table([row for row in rows if "blocks" in row], readers))
        print(f"\n{time_table([*readers, *(row for row in rows if 'domain_scores' not in row)])}")
        return
    if asked.json is None:
        parser.error("give --json: the record is how it resumes.")
    run(asked)


if __name__ == "__main__":
    main()
