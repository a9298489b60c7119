"""StandaloneModel: one task that changes the backbone's own output and therefore answers without others beside it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.errors import UnknownTask
from vit_memory.model import check_trained_on
from vit_memory.outputs import Outputs
from vit_memory.task import Task
from vit_memory.trunk import run_originals
from vit_memory.unmasked import run_unmasked


class StandaloneModel(nn.Module):
    """A backbone and one task of a regime that does not compose, called like a MemoryViT.

    The backbone must be the one that the task was trained on; for the regime `full`, the one trained with it.
    """

    def __init__(self, backbone: Backbone, task: Task) -> None:
        super().__init__()
        check_trained_on(task, backbone)
        self.backbone, self.task = backbone, task
        self.tasks: Mapping[str, Task] = _OneTask({task.name: task})

    @torch.no_grad()
    def forward(self, images: Tensor, tasks: Sequence[str] | None = None) -> Outputs:
        """The task's output (B, C). `original` is the backbone's output as the task changed it."""
        for name in tasks or ():
            self.tasks[name]  # raises UnknownTask
        task, roles = self.task, self.backbone.roles
        images = self.backbone.check_images(images)
        if task.class_token is None:  # `full`: the backbone is the task's own
            original = run_originals(roles, images)
            return Outputs(original, {task.name: task.answer(original.feature)})
        token, cells = task.class_token[None].to(images), task.memory.to(images)
        original, features = run_unmasked(roles, images, token, cells, task.regime, raw=task.raw_memory)
        return Outputs(original, {task.name: task.answer(features[:, 0])})


class _OneTask(dict[str, Task]):
    def __missing__(self, name: str) -> Task:
        raise UnknownTask(f"no task {name!r}. Attached: {', '.join(self)}.")
