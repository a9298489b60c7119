"""Several processes that train as one: each looks at its share of every batch, and their gradients are added up.

Through accelerate, which sets up the processes that `torchrun` or `accelerate launch` start. A process that is not one
of several works alone, and nothing of this is imported.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vit_memory.errors import TrainingError

Kind = Literal["ram", "disk", "off"]


@dataclass(frozen=True, slots=True)
class Crew:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    here: int = 1  # how many of them share this machine's memory and disk
    accelerator: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """Where this process computes: of several on one machine, each has a GPU of its own."""
        return str(self.accelerator.device) if self.size > 1 and asked == "cuda" else asked

    def share(self, count: int) -> list[int]:
        """Which of `count` images this process looks at: the same in every batch and every epoch."""
        return list(range(self.rank, count, self.size))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over the processes: one message for all."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
        summed = self.accelerator.reduce(flat, reduction="sum")
        for tensor, part in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.data.copy_(part.view_as(tensor))

    def agreed(self, kind: Kind) -> Kind:
        """What all can do where each would do this: a store only where all have room for one."""
        if self.size == 1:
            return kind
        votes = torch.tensor([float(kind == choice) for choice in ("ram", "disk", "off")])
        self.sum([votes])
        ram, disk, _ = votes.tolist()
        if ram == self.size:
            return "ram"
        return "disk" if disk == self.size else "off"

    def any(self, flag: bool) -> bool:
        """Whether it is so for one of them: all stop at the same step, or the others would wait for ever."""
        if self.size == 1:
            return flag
        votes = torch.tensor([float(flag)])
        self.sum([votes])
        return bool(votes > 0)

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            self.accelerator.wait_for_everyone()


def join_crew(device: str = "cpu") -> Crew:
    """The crew that this process was started into, as its environment tells."""
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if expected == 1:
        return Crew()
    try:
        from accelerate import Accelerator  # noqa: PLC0415 - only where there are several processes
    except ImportError as error:
        raise TrainingError(
            f"started as one of {expected} processes, which needs accelerate: pip install 'vit-memory[distributed]'"
        ) from error
    accelerator = Accelerator(cpu=device == "cpu")
    if accelerator.num_processes != expected:  # separate copies would train in silence, each on everything
        raise TrainingError(
            f"started as one of {expected} processes, but accelerate sees {accelerator.num_processes}. "
            f"Start them with torchrun or accelerate launch."
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", expected))
    return Crew(accelerator.process_index, accelerator.num_processes, here, accelerator)
