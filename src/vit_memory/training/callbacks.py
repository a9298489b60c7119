"""Functions that a training calls: to report progress, and to ask whether it should stop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vit_memory.choices import Storage


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is."""

    step: int  # optimiser steps done, or views stored
    steps: int
    losses: tuple[float, ...] = ()  # each setting's mean since the last evaluation; NaN if the setting was stopped
    scores: tuple[float, ...] | None = None  # on the validation images, if this step was evaluated; NaN as above
    metric: str = "accuracy"  # the name of the scores
    stage: Literal["storing", "training"] = "training"


def _ignore(event: object) -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions that `fit` calls during a training.

    >>> Callbacks(on_progress=lambda progress: print(progress.step, progress.losses)).should_stop()
    False
    """

    on_progress: Callable[[Progress], None] = _ignore  # after every step, and while views are stored
    on_storage: Callable[[Storage], None] = _ignore  # once, after all checks: where trunks will be stored
    should_stop: Callable[[], bool] = _never  # after every step; True saves a checkpoint and raises TrainingStopped
