"""Where a training stands, on disk: enough to go on to the same weights, and to refuse to go on with anything else."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.splits import Split
from vit_memory.errors import DamagedFile, TrainingError
from vit_memory.families.roles import Preprocessing
from vit_memory.files.container import parse_json, read_container, write_container
from vit_memory.files.taskfile import check_format
from vit_memory.training.sweep import Sweep

FORMAT, VERSION = "vit-memory-checkpoint", 1


@dataclass(slots=True)
class Standing:
    """What the loop knows besides the tensors."""

    step: int  # optimiser steps done
    stopped: dict[int, int]  # settings that diverged, and at which step
    counted: int = 0  # steps since the last look
    best: list[float] = field(default_factory=list)  # every setting's best accuracy so far
    accuracies: list[float] = field(default_factory=list)  # those of the last look; -1 for settings that were stopped
    waited: int = 0  # looks since any of them improved


def training_key(
    backbone: Backbone, sweep: Sweep, train: Split, validation: Split, facts: Preprocessing, precision: str
) -> str:
    """A digest of all that decides the weights. A checkpoint of another key is not continued.

    `precision` is what trunks pass through on their way: the dtype they are stored in, or none.
    """
    told = {
        "backbone": backbone.fingerprint,
        "dtype": str(backbone.dtype),
        "recipe": asdict(sweep.recipe),
        "settings": [[s.task.name, s.task.digest, s.learning_rate, s.weight_decay] for s in sweep.settings],
        "parents": {name: sweep.parents[name].digest for name in sweep.parents},
        "train": train.digest(),
        "validation": validation.digest(),
        # The order of the images decides the batches; the digest of a split does not know it.
        "order": hashlib.sha256(b"".join(train.digests)).hexdigest(),
        "preprocessing": asdict(facts),
        "precision": precision,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def write_checkpoint(path: Path, key: str, sweep: Sweep, losses: Tensor, standing: Standing) -> None:
    """Write it whole, or leave the last good one."""
    told = {"key": key, **asdict(standing)}
    tensors = {**sweep.state(), "losses": losses}
    write_container(path, {"format": f"{FORMAT}/{VERSION}", "standing": json.dumps(told, sort_keys=True)}, tensors)


def read_checkpoint(path: Path, key: str, sweep: Sweep) -> tuple[Tensor, Standing]:
    """Put a sweep where the checkpoint left it; returns the losses since the last report, and the standing."""
    metadata, tensors = read_container(path)
    check_format(path, metadata.get("format", ""), FORMAT, VERSION)
    try:
        told = parse_json(metadata["standing"])
        found, step, counted = told["key"], int(told["step"]), int(told["counted"])
        stopped = {int(setting): int(at) for setting, at in told["stopped"].items()}
        best, last = ([float(accuracy) for accuracy in told[name]] for name in ("best", "accuracies"))
        waited = int(told["waited"])
        losses = tensors.pop("losses").clone()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: the checkpoint's description lacks or mistypes {error}.") from None
    if found != key:
        raise TrainingError(
            f"{path}: it belongs to another training: other images, tasks, parents, recipe or backbone. "
            f"Resume with what it was begun with, or begin anew without resuming."
        )
    sweep.load_state(tensors, stopped)
    return losses, Standing(step, stopped, counted, best, last, waited)
