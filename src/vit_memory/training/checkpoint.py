"""Where a training stands, on disk: enough to go on to the same weights, and to refuse to go on with anything else."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.splits import Split
from vit_memory.errors import DamagedFile, TrainingError
from vit_memory.files.container import parse_json, read_container, write_container
from vit_memory.files.taskfile import check_format
from vit_memory.preprocessing import Preprocessing
from vit_memory.training.sweep import Sweep

FORMAT, VERSION = "vit-memory-checkpoint", 2


@dataclass(slots=True)
class Standing:
    """What the loop knows besides the tensors."""

    step: int  # optimiser steps done
    stopped: dict[int, int]  # settings that diverged, and at which step
    threads: int = 1  # how many pieces a batch is cut into: another number would round differently
    counted: int = 0  # steps since the last evaluation
    best: list[float | None] = field(default_factory=list)  # every setting's best score so far
    scores: list[float | None] = field(default_factory=list)  # of the last evaluation; None for settings stopped
    thresholds: list[list[float]] | None = None  # multi-label: of the weights that each setting will end with
    waited: int = 0  # evaluations since any of them improved


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
    if metadata["format"] == f"{FORMAT}/1":
        raise TrainingError(f"{path}: an earlier version began this training, and this one cannot go on with it.")
    try:
        told = parse_json(metadata["standing"])
        found = told.pop("key")
        told["stopped"] = {int(setting): int(at) for setting, at in told["stopped"].items()}
        standing = Standing(**told)
        losses = tensors.pop("losses").clone()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: the checkpoint's description lacks or mistypes {error}.") from None
    if found != key:
        raise TrainingError(
            f"{path}: it belongs to another training: other images, tasks, parents, recipe or backbone. "
            f"Resume with what it was begun with, or begin anew without resuming."
        )
    sweep.load_state(tensors, standing.stopped)
    return losses, standing
