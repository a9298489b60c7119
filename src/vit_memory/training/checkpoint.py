"""Checkpoints: everything needed to resume a training to the same weights, and a key to refuse other trainings."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.splits import Split
from vit_memory.errors import DamagedFile, TrainingError
from vit_memory.files.container import parse_json, read_container, write_container
from vit_memory.files.description import check_format
from vit_memory.preprocessing import Preprocessing
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Sweep

FORMAT, VERSION = "vit-memory-checkpoint", 2
# The fields that the file calls otherwise.
_FILE_NAMES = {"loss_steps": "counted", "best_scores": "best", "stale_evaluations": "waited"}


@dataclass(slots=True)
class TrainingState:
    """The state of a training besides the sweep's tensors."""

    loss_sums: Tensor  # (T,) since the last evaluation
    threads: int = 1  # how many chunks a batch is cut into; another number would round differently
    step: int = 0  # optimiser steps done
    stopped: dict[int, int] = field(default_factory=dict)  # settings that diverged, and at which step
    loss_steps: int = 0  # steps in loss_sums
    best_scores: list[float | None] = field(default_factory=list)  # each setting's best score so far
    scores: list[float | None] = field(default_factory=list)  # of the last evaluation; None for stopped settings
    thresholds: list[list[float]] | None = None  # multi-label: each setting's, of the weights it will end with
    part_scores: list[list[float]] | None = None  # several datasets: each setting's score on each, of those weights
    stale_evaluations: int = 0  # in a row, without any setting improving

    @classmethod
    def new(cls, settings: int, threads: int) -> "TrainingState":
        """Before the first step."""
        return cls(torch.zeros(settings), threads, best_scores=[None] * settings)

    def record(self) -> dict[str, Any]:
        """All but the tensor, by the file's names."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "loss_sums"}
        return {_FILE_NAMES.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], loss_sums: Tensor) -> "TrainingState":
        """The inverse of `record`. Raises KeyError or TypeError if a name is missing or unknown."""
        names = {file_name: name for name, file_name in _FILE_NAMES.items()}
        values = {names.get(name, name): value for name, value in record.items()}
        values["stopped"] = {int(setting): int(step) for setting, step in values["stopped"].items()}
        return cls(loss_sums, **values)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The checkpoint file of one training."""

    path: Path
    key: str  # of the training: see `training_key`

    def write(self, sweep: Sweep, state: TrainingState) -> None:
        """Replace the file; an interrupted write leaves the previous one."""
        record = json.dumps({"key": self.key, **state.record()}, sort_keys=True)
        tensors = {**sweep.state_dict(), "losses": state.loss_sums}
        write_container(self.path, {"format": f"{FORMAT}/{VERSION}", "standing": record}, tensors)

    def read(self, sweep: Sweep) -> TrainingState:
        """Restore the sweep and return the rest of the state. Raises TrainingError if the key is another one."""
        metadata, tensors = read_container(self.path)
        check_format(self.path, metadata.get("format", ""), FORMAT, VERSION)
        if metadata["format"] == f"{FORMAT}/1":
            raise TrainingError(
                f"{self.path}: an earlier version of vit-memory wrote this checkpoint, and this one cannot resume it. "
                f"Start again without resuming."
            )
        try:
            record = parse_json(metadata["standing"])
            key = record.pop("key")
            state = TrainingState.from_record(record, tensors.pop("losses").clone())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(f"{self.path}: the checkpoint's description lacks or mistypes {error}.") from None
        if key != self.key:
            raise TrainingError(
                f"{self.path}: it belongs to another training: other images, tasks, parents, recipe or backbone. "
                f"Resume with the same ones, or start again without resuming."
            )
        sweep.load_state_dict(tensors, state.stopped)
        return state


def training_key(
    backbone: Backbone,
    recipe: Recipe,
    sweep: Sweep,
    splits: tuple[Split, Split],
    preprocessing: Preprocessing,
    precision: str,
) -> str:
    """A digest of everything that decides the weights.

    `splits` are those of training and validation. `precision` is the dtype in which trunks are stored, or "live".
    """
    train, validation = splits
    content: dict[str, Any] = {
        "backbone": backbone.fingerprint,
        "dtype": str(backbone.dtype),
        "recipe": recipe.record(),
        "settings": [[s.task.name, s.task.digest, s.learning_rate, s.weight_decay] for s in sweep.settings],
        "parents": {name: sweep.parents[name].digest for name in sweep.parents},
        "train": train.digest(),
        "validation": validation.digest(),
        # The order of the images decides the batches; the digest of a split does not depend on it.
        "order": hashlib.sha256(b"".join(train.digests)).hexdigest(),
        "preprocessing": asdict(preprocessing),
        "precision": precision,
    }
    if any(setting.branch is not None for setting in sweep.settings):
        content["trained_with_a_branch"] = [setting.branch is not None for setting in sweep.settings]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
