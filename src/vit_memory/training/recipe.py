"""The recipe of a training: optimiser, schedule, augmentation. One frozen value that is checked when it is created."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from vit_memory.choices import Augment, Optimiser
from vit_memory.errors import TrainingError

# The default learning rates, all trained at once: around the best on three datasets of 20 images per class.
AUTO_RATES: Mapping[str, tuple[float, ...]] = {"sgd": (0.03, 0.1, 0.3), "adamw": (1e-3, 3e-3, 1e-2)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is learned, besides the data, the backbone and the tasks.

    The schedule counts optimiser steps: linear warm-up, then a cosine to zero. Every learning rate is trained with
    every weight decay, at once, and the best by validation score is kept. The defaults suit small datasets.

    >>> Recipe(steps=100, warmup=4).lr_factor(4)
    1.0
    """

    steps: int = 300
    batch: int = 64
    optimiser: Optimiser = "sgd"
    learning_rates: tuple[float, ...] = AUTO_RATES["sgd"]
    weight_decays: tuple[float, ...] = (0.0,)
    momentum: float = 0.9  # SGD's; AdamW's are 0.9 and 0.999
    clip: float | None = 1.0  # largest norm of a setting's gradient
    warmup: int = 5
    label_smoothing: float = 0.0
    balance: bool = False  # weigh classes, or presence and absence of a label, as if they were equally frequent
    augment: Augment = "inception"
    flip: bool = True  # switch it off for digits, letters and anything with a left and a right
    area: tuple[float, float] = (0.35, 1.0)  # share of the image that an inception crop covers
    views: int | None = 8  # fixed views of every image, one per epoch in turn, which can be stored; None: new ones
    evaluate_every: int = 50
    patience: int | None = None  # end after so many evaluations without a better score, with the best weights
    chunk: int | None = None  # images per thread at a time; larger batches are computed in chunks. None: by memory
    seed: int = 0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {getattr(self, name)!r}; expected {expected}"
            for name, expected, valid in (
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
            if not valid
        ]
        if faults:
            raise TrainingError(f"the recipe is not valid: {'; '.join(faults)}.")

    @classmethod
    def paper(cls) -> "Recipe":
        """The paper's recipe: batch 512, 20 000 steps, SGD with momentum, clipping, 5 warm-up steps, Inception crops.

        The paper does not state momentum, clipping norm, schedule and learning rates; those are ours.
        """
        return replace(cls(), steps=20_000, batch=512, area=(0.08, 1.0), views=None, evaluate_every=1000)

    @property
    def fixed_views(self) -> int | None:
        """How many views an image has; None: a new one in every epoch."""
        return 1 if self.augment == "none" else self.views

    def lr_factor(self, step: int) -> float:
        """The factor on the learning rate at step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if step == self.warmup or self.steps <= self.warmup:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))


def _all(values: tuple[float, ...], valid: Callable[[float], bool]) -> bool:
    return bool(values) and all(math.isfinite(value) and valid(value) for value in values)
