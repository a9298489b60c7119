"""What an engine answers, and what it tells of itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vit_memory.explanation import Explanation
from vit_memory.serving.task_set import TaskSet

Refusal = Literal["queue full", "deadline", "closed", "bad image", "cancelled", "failed"]


@dataclass(frozen=True, slots=True, eq=False)
class OriginalAnswer:
    """What the backbone itself says of an image."""

    feature: Tensor  # (D,) float32, on the CPU
    logits: Tensor | None  # (classes,) float32, where the backbone has a head
    identical: bool | None  # whether the batch equals the library's own forward to the bit; None: not compared


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The answer of some tasks for one image, all of one version of the task set."""

    version: str
    outputs: Mapping[str, Tensor]  # task -> (C,), float32, on the CPU: logits, or values of a regression task
    digests: Mapping[str, str]  # of the tasks answered
    explanations: Mapping[str, Explanation]  # of the tasks that were to be explained
    original: OriginalAnswer
    batch: int  # images in its pass
    stages: Mapping[str, float]  # seconds: decode, queue, compute


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start of an engine."""

    version: str  # of the current task set
    waiting: int  # images admitted that the model has not taken
    running: int  # images admitted that have no answer yet, the waiting ones included
    admitted: int
    answered: int
    refused: Mapping[Refusal, int]  # images without an answer, by reason
    passes: int
    images: int  # computed in those passes
    compute_seconds: float  # of those passes
    last_batch: int  # images in the last pass
    largest_batch: int
    changes: int  # of the task set
    cost: float | None  # seconds of a pass with all tasks as a multiple of the plain backbone's; None: not measured
    uptime: float  # seconds


class Observer:
    """Told by an engine what happens, on its event loop. Override what you need; do not block."""

    def answered(self, answer: Answer) -> None:
        """An image was answered."""

    def refused(self, reason: Refusal) -> None:
        """An image got no answer."""

    def computed(self, images: int, tasks: int, seconds: float) -> None:
        """A pass over some images for some tasks has ended."""

    def changed(self, task_set: TaskSet) -> None:
        """A new version of the task set is served from now on."""
