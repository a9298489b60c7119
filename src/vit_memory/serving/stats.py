"""What an engine tells of itself: counts to ask for, and events to be told of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vit_memory.serving.answers import Answer
from vit_memory.serving.task_set import TaskSet

Refusal = Literal["queue full", "deadline", "closed", "bad image", "cancelled", "failed"]


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
    compute_seconds: float  # of those passes, each from its first to its last moment; two may overlap
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


@dataclass(slots=True)
class Counts:
    """The counts behind `EngineStats`, changed on the event loop only."""

    admitted: int = 0
    answered: int = 0
    refused: dict[Refusal, int] = field(default_factory=dict)
    passes: int = 0
    images: int = 0
    compute_seconds: float = 0.0
    last_batch: int = 0
    largest_batch: int = 0
    changes: int = 0
    cost: float | None = None
    failures: int = 0  # passes that failed since the last one that did not
    failed_at: float = 0.0  # when the last of them did, in seconds of the monotonic clock

    def computed(self, images: int, seconds: float) -> None:
        """Count a pass."""
        self.passes += 1
        self.images += images
        self.compute_seconds += seconds
        self.last_batch = images
        self.largest_batch = max(self.largest_batch, images)
