"""How a task is trained: one frozen value, checked whole when it is made."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from vit_memory.data.transforms import Augment
from vit_memory.errors import TrainingError

Optimiser = Literal["sgd", "adamw"]
# What a newcomer's training tries at once: around the best rates on three packs of 20 images per class.
AUTO_RATES: Mapping[str, tuple[float, ...]] = {"sgd": (0.03, 0.1, 0.3), "adamw": (1e-3, 3e-3, 1e-2)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides a training besides the data, the backbone and the tasks.

    The schedule counts optimiser steps: linear warm-up, then a cosine to zero. Every learning rate is trained with
    every weight decay, at once; the best by validation score is kept. The default suits small data: a few hundred
    steps, and rates around the one that was best on three packs of 20 images per class.

    >>> Recipe(steps=100, warmup=4).rate_share(4)
    1.0
    """

    steps: int = 300
    batch: int = 64
    optimiser: Optimiser = "sgd"
    learning_rates: tuple[float, ...] = AUTO_RATES["sgd"]
    weight_decays: tuple[float, ...] = (0.0,)
    momentum: float = 0.9  # SGD's; AdamW's are 0.9 and 0.999
    clip: float | None = 1.0  # norm of a setting's whole gradient
    warmup: int = 5
    label_smoothing: float = 0.0
    balance: bool = False  # weigh classes, or presence and absence of a label, as if there were equally many of each
    augment: Augment = "inception"
    flip: bool = True  # not for digits, letters or anything that has a left and a right
    area: tuple[float, float] = (0.35, 1.0)  # of an inception crop
    views: int | None = 8  # fixed views of every image, in turn by epoch, which can be stored; None: always new ones
    evaluate_every: int = 50
    patience: int | None = None  # evaluations without a better score before it ends; settings keep their best weights
    chunk: int | None = None  # images whose trunk is held at a time; larger batches are walked in chunks. None: by size
    seed: int = 0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {getattr(self, name)!r}; expected {expected}"
            for name, expected, fine in (
                ("steps", "1 or more", self.steps >= 1),
                ("batch", "1 or more", self.batch >= 1),
                ("optimiser", " or ".join(get_args(Optimiser)), self.optimiser in get_args(Optimiser)),
                ("learning_rates", "one or more, all above 0", _all(self.learning_rates, lambda r: r > 0)),
                ("weight_decays", "one or more, none below 0", _all(self.weight_decays, lambda d: d >= 0)),
                ("momentum", "0 up to 1", 0 <= self.momentum < 1),
                ("clip", "a norm above 0, or None", self.clip is None or self.clip > 0),
                ("warmup", "0 or more", self.warmup >= 0),
                ("label_smoothing", "0 up to 1", 0 <= self.label_smoothing < 1),
                ("augment", ", ".join(get_args(Augment)), self.augment in get_args(Augment)),
                ("area", "0 < smallest <= largest <= 1", 0 < self.area[0] <= self.area[1] <= 1),
                ("views", "1 or more, or None", self.views is None or self.views >= 1),
                ("evaluate_every", "1 or more", self.evaluate_every >= 1),
                ("patience", "1 or more, or None", self.patience is None or self.patience >= 1),
                ("chunk", "1 or more, or None", self.chunk is None or self.chunk >= 1),
                ("seed", "0 or more", self.seed >= 0),
            )
            if not fine
        ]
        if faults:
            raise TrainingError(f"the recipe cannot be followed: {'; '.join(faults)}.")

    @classmethod
    def paper(cls) -> "Recipe":
        """The paper's: batch 512, 20 000 steps, SGD with momentum, clipping, 5 steps of warm-up, Inception crops.

        Momentum, the clipping norm, the schedule's shape and the rates are ours; the paper does not tell them.
        """
        return replace(cls(), steps=20_000, batch=512, area=(0.08, 1.0), views=None, evaluate_every=1000)

    @property
    def fixed_views(self) -> int | None:
        """How many views an image has in all; None: without end."""
        return 1 if self.augment == "none" else self.views

    def rate_share(self, step: int) -> float:
        """What share of the learning rate step number `step` (from 0) takes."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if step == self.warmup or self.steps <= self.warmup:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))


def _all(values: tuple[float, ...], fine: Callable[[float], bool]) -> bool:
    return bool(values) and all(math.isfinite(value) and fine(value) for value in values)
