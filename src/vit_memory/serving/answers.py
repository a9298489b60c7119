"""What an engine answers for one image."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from vit_memory.explanation import Explanation


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
