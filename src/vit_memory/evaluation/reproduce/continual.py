"""Tasks that arrive one after another: accuracy on the earlier ones over time, against full fine-tuning's forgetting.

    vit-memory reproduce continual --data DATASETS --backbone BACKBONE

The datasets arrive in their order. With memory and readers, each new task is attached beside the earlier ones. With
full fine-tuning, the backbone that the previous task left is trained further, and the earlier heads are kept. To
expect: with memory and readers, accuracy on every task is the same from its arrival on; with full fine-tuning, it
falls with every further task.

Every arrival of full fine-tuning is kept until the last one is recorded, so that a run that was stopped goes on there.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit_memory.atomic import write_atomic
from vit_memory.backbone import Backbone
from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import BOTH, FULL, Method, cells
from vit_memory.evaluation.reproduce.runner import Runner, Training
from vit_memory.evaluation.statistics import pack_bits
from vit_memory.files.backbonefile import load_tuned_backbone, save_tuned_backbone
from vit_memory.files.taskfile import backbone_file, load_task, save_task
from vit_memory.model import MemoryViT
from vit_memory.outputs import Outputs
from vit_memory.task import Task, new_task
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.fit import fit
from vit_memory.trunk import run_originals

METHODS: tuple[Method, ...] = (cells(5), BOTH)
_BATCH = 64


def trainings(plan: Plan) -> list[Training]:
    """Our tasks, and full fine-tuning on the first dataset and, for its rates, on the others."""
    return plan.trainings(METHODS) + [one for one in plan.trainings((FULL,)) if one.seed == plan.scale.seeds[0]]


def measure(runner: Runner, plan: Plan) -> None:
    """Accuracy on every earlier task after each arrival. Full fine-tuning has one seed: a step costs twenty-fold."""
    for method in (*METHODS, FULL):
        for seed in plan.scale.seeds if method is not FULL else plan.scale.seeds[:1]:
            chosen = [Training(dataset, method, seed, plan.scale.per_class) for dataset in plan.datasets]
            records = runner.train(chosen)
            identity = runner.identity_of_all("continual", chosen)
            settings = {"trainings": [[record.identity, record.settings] for record in records]}
            if runner.records.find(identity, settings) is not None:
                continue
            start = time.perf_counter()
            if method is FULL:
                rates = [record.result["rate"] for record in records]
                rows = _fine_tune_in_turn(runner, chosen, rates, runner.weights_folder(identity, settings))
            else:
                rows = _attach_in_turn(runner, chosen)
            runner.record(
                identity, settings, {"order": list(plan.datasets), "after": rows}, time.perf_counter() - start
            )
            shutil.rmtree(runner.weights_folder(identity, settings), ignore_errors=True)


def _attach_in_turn(runner: Runner, chosen: Sequence[Training]) -> list[dict[str, Any]]:
    model = MemoryViT(runner.backbone)
    rows = []
    for count, training in enumerate(chosen, 1):
        model.add(runner.load(training)[0])

        def answer(images: Tensor, earlier: Training) -> Tensor:
            outputs: Outputs = model(images)
            return outputs[earlier.task_name]

        rows.append(_score(runner, chosen[:count], answer))
    return rows


def _fine_tune_in_turn(
    runner: Runner, chosen: Sequence[Training], rates: Sequence[float], folder: Path
) -> list[dict[str, Any]]:
    """Accuracy on all tasks so far after each arrival; arrivals that an earlier run left in the folder are taken."""
    backbone, rows = runner.backbone, []
    heads: dict[str, Task] = {}
    for count, (training, rate) in enumerate(zip(chosen, rates, strict=True), 1):
        head_file, row_file = folder / f"{count}.safetensors", folder / f"{count}.json"
        if row_file.exists():  # written last
            heads[training.dataset] = head = load_task(head_file)
            backbone = load_tuned_backbone(runner.backbone, backbone_file(head_file), head.backbone.fingerprint)
            rows.append(json.loads(row_file.read_text(encoding="utf-8")))
            continue
        backbone, heads[training.dataset] = _fine_tune(runner, backbone, training, rate)

        def answer(images: Tensor, earlier: Training, backbone: Backbone = backbone) -> Tensor:
            with torch.no_grad():
                return heads[earlier.dataset].answer(run_originals(backbone.roles, images).feature)

        rows.append(_score(runner, chosen[:count], answer))
        folder.mkdir(parents=True, exist_ok=True)
        save_tuned_backbone(backbone, training.task_name, backbone_file(head_file))
        save_task(heads[training.dataset], head_file)
        write_atomic(row_file, [json.dumps(rows[-1]).encode()])
    return rows


def _fine_tune(runner: Runner, backbone: Backbone, training: Training, rate: float) -> tuple[Backbone, Task]:
    """Train the whole backbone further; returns it with the new head."""
    images = runner.images(training)
    recipe = replace(runner.scale.recipes["full"], seed=training.seed, learning_rates=(rate,))
    task = new_task(backbone, "task", images.labels, regime="full")
    callbacks = Callbacks(runner.on_progress, should_stop=runner.should_stop)
    options = replace(runner.options, cache=Cache("off"))  # the backbone changes with every step
    best = fit(backbone, [task], images.train, images.validation, recipe, options=options, callbacks=callbacks).best
    assert best.backbone is not None
    return best.backbone, best.task


def _score(runner: Runner, chosen: Sequence[Training], answer: Any) -> dict[str, Any]:
    """Accuracy on the test images of every task so far."""
    row: dict[str, Any] = {}
    for training in chosen:
        test = runner.images(training).test
        parts = [answer(images, training).argmax(1) == targets for images, targets in runner.batches(test, _BATCH)]
        right = torch.cat(parts).cpu().numpy()
        row[training.dataset] = {"test": float(right.mean()), "test_images": len(right), "right": pack_bits(right)}
    return row


CONTINUAL = Experiment("continual", "What happens to earlier tasks when new ones arrive?", trainings, measure)
