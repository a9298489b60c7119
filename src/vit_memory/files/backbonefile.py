"""The backbone that was trained with a task of regime `full`: its weights, by the library's own names."""

import copy
from pathlib import Path

from vit_memory.backbone import Backbone
from vit_memory.errors import BackboneMismatch
from vit_memory.files.container import read_container, write_container

FORMAT = "vit-memory-backbone/1"


def save_tuned_backbone(backbone: Backbone, task: str, path: Path) -> None:
    """Write the weights of a backbone that was trained with the task of that name, whole or not at all."""
    weights = {key: value.detach().cpu() for key, value in backbone.model.state_dict().items()}
    write_container(path, {"format": FORMAT, "backbone": backbone.name, "task": task}, weights)


def load_tuned_backbone(backbone: Backbone, path: Path, fingerprint: str) -> Backbone:
    """A copy of the backbone with the weights of the file.

    Raises BackboneMismatch if they are not weights of it, or not those with this fingerprint.
    """
    _, weights = read_container(path)
    model = copy.deepcopy(backbone.model)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise BackboneMismatch(f"{path}: these are not weights of {backbone.name} ({error}).") from error
    tuned = Backbone(model, backbone.family, backbone.name, backbone.preprocessing)
    if tuned.fingerprint != fingerprint:
        raise BackboneMismatch(f"{path}: not the backbone that its task was trained with.")
    return tuned
