"""What a training step costs, as a ratio to the plain forward pass of the same images in the same interleaved run.

    pip install peft vit-pytorch          # the peers; absent ones are left out and named
    python -m benchmarks.training --json out.json

ViT-B/32 at 224 pixels from a configuration, float32, random weights, 100 classes, 5 cells. A step is forward, backward
and optimiser, from images (live) or from a float16 store in memory (stored). Peers train the same number of images:
peft's LoRA (r = 8 on queries and values, as its examples have it), vit-pytorch's memory adapter on a ViT of equal size,
full fine-tuning, and a linear probe. Steps of a learned reader (rank 8 with gains, AdamW) are measured against the same
step with 5 cells; steps of a branch (rank 8 on q and v of the last 4 blocks or of all, from stored tokens) against
LoRA's on the same number of images. Memory is the peak above the resident backbone, each side in a process of its own.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Work, commit, compare, kept_rows, write
from vit_memory import Preprocessing, load_backbone, new_branch, new_task
from vit_memory.data.images import ImageArray
from vit_memory.data.loading import Loader
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.graph import TaskGraph
from vit_memory.parallel import ChunkThreads, chunk_slices
from vit_memory.training.batch_plan import PlannedBatch
from vit_memory.training.batches import Chunk, stored_chunks
from vit_memory.training.branch_sweep import BranchSweep
from vit_memory.training.cache import Cache
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Setting
from vit_memory.training.trunk_shape import TrunkShape
from vit_memory.training.trunk_store import TrunkStore
from vit_memory.training.trunk_sweep import TrunkSweep

CLASSES, CELLS = 100, 5
TARGETS = {
    "live-1": 1.15,
    "live-16": 1.7,
    "stored-1": 0.065,
    "stored-12": 0.40,
    "memory-live-1": 1.3,
    "reader-live-1": 1.1,
    "reader-stored-1": 1.1,
    "branch4-stored": 0.45,
}
MEMORY_BATCH = 64
FACTS = Preprocessing((224, 224), None, (0.5,) * 3, (0.5,) * 3, "bilinear")
LABELS = tuple(str(i) for i in range(CLASSES))


def library_vit() -> nn.Module:
    """The model that everybody is measured against."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    return ViTModel(ViTConfig(patch_size=32), add_pooling_layer=False).eval()


def batch_of(count: int) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 3, 224, 224, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def plain(model: nn.Module, count: int) -> Work:
    """The baseline: the library's own forward pass, without a graph."""
    images, _ = batch_of(count)

    def forward() -> None:
        with torch.no_grad():
            model(images)

    return forward


def sweep_of(model: nn.Module, settings: int, reader: bool = False) -> TrunkSweep:
    """So many settings of five cells, or of a learned reader, each with a learning rate of its own."""
    backbone = load_backbone(model)
    method: dict[str, Any] = {"regime": "reader", "rank": 8, "gains": True} if reader else {"cells": CELLS}
    tasks = [
        new_task(backbone, "bench", LABELS, generator=torch.Generator().manual_seed(i), **method)
        for i in range(settings)
    ]
    recipe = Recipe(steps=10**6, optimiser="adamw" if reader else "sgd")
    return TrunkSweep(backbone, [Setting(task, 1e-4) for task in tasks], TaskGraph(), recipe)


def live(model: nn.Module, count: int, settings: int, reader: bool = False) -> Work:
    """Our step from images."""
    sweep = sweep_of(model, settings, reader)
    images, labels = batch_of(count)
    threads = torch.get_num_threads()
    backbone = sweep.backbone
    at_most = TrunkShape.of(backbone, (224, 224)).live_chunk(backbone.dtype, threads)
    chunks = [
        Chunk(partial(sweep.encode, images[part]), labels[part], torch.arange(count)[part])
        for part in chunk_slices(count, threads, at_most)
    ]
    step = stepper(sweep)
    return lambda: step(chunks)


def stepper(sweep: TrunkSweep) -> Callable[[Sequence[Chunk]], None]:
    """A step as the loop takes it; between steps torch has its threads back, for the other side of the race."""
    number = torch.get_num_threads()
    threads = ChunkThreads(sweep.backbone.device).__enter__()  # stays open: its threads keep their buffers
    torch.set_num_threads(number)

    def step(chunks: Sequence[Chunk]) -> None:
        torch.set_num_threads(1 if number > 1 else number)
        losses = torch.zeros(len(sweep.settings))
        sweep.leaves()
        for some in threads.rounds(chunks):
            for loss, gradients in threads.map(lambda chunk: sweep.backward(chunk.encode(), chunk.targets), some):
                losses += loss
                sweep.accumulate(gradients)
        sweep.step(0, losses, sum(len(chunk.indices) for chunk in chunks))
        torch.set_num_threads(number)

    return step


def branch_sweep_of(model: nn.Module, blocks: int) -> BranchSweep:
    """A branch of rank 8 on q and v, and a head on it: what LoRA trains, in the last blocks."""
    backbone = load_backbone(model)
    branch = new_branch(backbone, "bench", blocks=blocks, rank=8, generator=torch.Generator().manual_seed(0))
    task = new_task(backbone, "bench", LABELS, regime="head", branch=branch)
    recipe = Recipe(steps=10**6, optimiser="adamw")
    return BranchSweep(backbone, [Setting(task, 1e-4, branch=branch)], TaskGraph(), recipe)


def stored(model: nn.Module, count: int, settings: int, reader: bool = False) -> Work:
    """Our step from a float16 store in memory, as the loop takes it: the next rows are gathered meanwhile."""
    return stored_step(sweep_of(model, settings, reader), count)


def stored_step(sweep: TrunkSweep, count: int) -> Work:
    """The same for any sweep."""
    rng = np.random.default_rng(0)
    images = 2 * count  # more than a batch, so that gathering is a gathering
    pixels = rng.integers(0, 256, (images, 224, 224, 3), dtype=np.uint8)
    split = Split.of(ImageArray.whole("noise", pixels), rng.integers(0, CLASSES, images))
    loader = Loader(split, EvalTransform(FACTS), 64)
    rows = sweep.stored_rows((224, 224))
    store = TrunkStore(sweep.backbone, loader, 1, 0, Cache("ram"), range(images), rows).open(disk=False)
    store.fill()
    threads = torch.get_num_threads()
    batches = store.batches(PlannedBatch(0, rng.permutation(images)[:count].tolist()) for _ in iter(int, 1))

    step, at_most = stepper(sweep), sweep.stored_chunk(store.stored.shape, threads)
    return lambda: step(stored_chunks(store, *next(batches), threads, at_most))


def torch_step(answer: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], count: int) -> Work:
    """A peer's step: whatever it is, with SGD on its own parameters."""
    images, labels = batch_of(count)
    optimiser = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(answer(images), labels).backward()
        optimiser.step()

    return step


def probe(model: nn.Module, count: int) -> Work:
    """A linear head on the class token."""
    head = nn.Linear(768, CLASSES)

    def answer(images: Tensor) -> Tensor:
        with torch.no_grad():
            feature = model(images).last_hidden_state[:, 0]
        return head(feature)

    return torch_step(answer, list(head.parameters()), count)


def full(model: nn.Module, count: int) -> Work:
    """Everything is trained."""
    tuned, head = library_vit(), nn.Linear(768, CLASSES)
    return torch_step(
        lambda images: head(tuned(images).last_hidden_state[:, 0]), [*tuned.parameters(), *head.parameters()], count
    )


def lora(model: nn.Module, count: int) -> Work:
    """peft's LoRA on queries and values."""
    from peft import LoraConfig, get_peft_model

    names = [name for name, _ in library_vit().named_modules()]
    targets = ["q_proj", "v_proj"] if any(name.endswith("q_proj") for name in names) else ["query", "value"]
    adapted = get_peft_model(library_vit(), LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    head = nn.Linear(768, CLASSES)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    return torch_step(
        lambda images: head(adapted(images).last_hidden_state[:, 0]), [*trained, *head.parameters()], count
    )


def vit_pytorch(model: nn.Module, count: int) -> Work:
    """vit-pytorch's memory adapter: its own ViT of the same size, one task."""
    from vit_pytorch.learnable_memory_vit import Adapter, ViT

    theirs = ViT(image_size=224, patch_size=32, num_classes=1000, dim=768, depth=12, heads=12, mlp_dim=3072)
    adapter = Adapter(vit=theirs, num_classes=CLASSES, num_memories_per_layer=CELLS)
    trained = [p for p in adapter.parameters() if p.requires_grad]
    return torch_step(adapter, trained, count)


CASES: dict[str, Callable[[nn.Module, int], Work]] = {
    "live-1": lambda model, count: live(model, count, 1),
    "live-16": lambda model, count: live(model, count, 16),
    "stored-1": lambda model, count: stored(model, count, 1),
    "stored-12": lambda model, count: stored(model, count, 12),
    "reader-live-1": lambda model, count: live(model, count, 1, reader=True),
    "reader-stored-1": lambda model, count: stored(model, count, 1, reader=True),
    "branch4-stored": lambda model, count: stored_step(branch_sweep_of(model, 4), count),
    "branch12-stored": lambda model, count: stored_step(branch_sweep_of(model, 12), count),
    "probe": probe,
    "lora": lora,
    "vit-pytorch": vit_pytorch,
    "full": full,
}

# What a case is measured against; the others against the plain forward pass.
BASELINES = {
    "reader-live-1": "live-1",
    "reader-stored-1": "stored-1",
    "branch4-stored": "lora",
    "branch12-stored": "lora",
}


def peak_above(case: str) -> float:
    """MB above the resident backbone that a few calls of a case reach, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", "--peak", case], capture_output=True, text=True, check=True
    )
    return float(run.stdout)


def print_peak(case: str) -> None:
    """The other end of `peak_above`: everything resident first, then the work."""
    model = library_vit()
    work = plain(model, MEMORY_BATCH) if case == "plain" else CASES[case](model, MEMORY_BATCH)
    plain(model, 1)()  # the libraries' own buffers
    for parameter in model.parameters():
        parameter.sum()
    reset = Path("/proc/self/clear_refs")
    reset.write_text("5")  # begin the peak anew
    resident = _memory("VmRSS")
    for _ in range(2):
        work()
    sys.stdout.write(f"{(_memory('VmHWM') - resident) / 1e3:.1f}\n")


def _memory(field: str) -> int:
    """Kilobytes of this process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(rf"{field}:\s+(\d+)", status.read_text())[1])  # type: ignore[index]


def measure(case: str, count: int, budget_s: float) -> dict[str, object]:
    """One row; a peer that is not installed is a row too."""
    row: dict[str, object] = {"case": f"{case}-batch{count}", "target": TARGETS.get(case), "commit": commit()}
    try:
        model = library_vit()
        baseline = CASES[BASELINES[case]](model, count) if case in BASELINES else plain(model, count)
        found = compare(CASES[case](model, count), baseline, budget_s=budget_s, least=3)
    except ImportError as error:
        return {**row, "absent": str(error)}
    return {**row, "ratio": found.median, "spread": found.spread, "repeats": found.repeats}


def measure_memory() -> list[dict[str, object]]:
    """Peak memory of a step of 64 images over that of plain inference."""
    base = peak_above("plain")
    rows: list[dict[str, object]] = []
    for case in ("live-1", "lora"):
        row: dict[str, object] = {"case": f"memory-{case}-batch{MEMORY_BATCH}", "commit": commit()}
        row["target"] = TARGETS.get(f"memory-{case}")
        try:
            peak = peak_above(case)
        except subprocess.CalledProcessError as error:
            rows.append({**row, "absent": error.stderr.strip().splitlines()[-1]})
            continue
        rows.append({**row, "ratio": peak / base, "megabytes": peak, "plain_megabytes": base})
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--only", default="", help="cases whose names match this pattern")
    parser.add_argument("--keep", action="store_true", help="keep the other rows of an earlier record")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds per row")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peak:
        print_peak(asked.peak)
        return
    rows: list[dict[str, object]] = []
    wanted = [(case, count) for count in (16, 128) for case in CASES if count == 128 or "stored-" not in case]
    for case, count in wanted:
        if re.search(asked.only, f"{case}-batch{count}"):
            rows.append(measure(case, count, asked.budget))
            _show(rows[-1])
    if re.search(asked.only, f"memory-live-1-batch{MEMORY_BATCH}"):
        rows += measure_memory()
        for row in rows[-2:]:
            _show(row)
    if asked.json:
        kept = kept_rows(asked.json, [row["case"] for row in rows]) if asked.keep else []
        write(asked.json, [*kept, *rows], classes=CLASSES, cells=CELLS)
    else:
        print(json.dumps(rows, indent=2))


def _show(row: dict[str, object]) -> None:
    if "absent" in row:
        print(f"{row['case']:24} not installed: {row['absent']}", flush=True)
        return
    target = f"  target {row['target']}" if row["target"] else ""
    spread = f"  ({row['spread'][0]:.3f}-{row['spread'][1]:.3f})" if "spread" in row else ""  # type: ignore[index]
    print(f"{row['case']:24} {row['ratio']:.3f}{spread}{target}", flush=True)


if __name__ == "__main__":
    main()
