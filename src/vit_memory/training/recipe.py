"""The recipe of a training: optimiser, schedule, augmentation. One frozen value that is checked when it is created."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, get_args

from vit_memory.choices import Augment, Optimiser, Part, Regime
from vit_memory.errors import TrainingError
from vit_memory.regimes import REGIMES

# The default learning rates, all trained at once: around the best on datasets of 20 images per class.
AUTO_RATES: Mapping[str, tuple[float, ...]] = {"sgd": (0.03, 0.1, 0.3), "adamw": (2e-3, 6e-3)}


@dataclass(frozen=True, slots=True)
class RateFactors:
    """Each part of a task learns at the learning rate times its factor.

    >>> Recipe(optimiser="adamw", rate_factors=RateFactors(token=3, cells=3, gains=5)).rate_factor("gains")
    5.0
    """

    head: float = 1.0
    token: float = 1.0
    cells: float = 1.0
    gains: float = 1.0
    low_rank: float = 1.0


# AdamW's steps do not depend on the size of the gradient, so parts of different scale need different rates. SGD's do,
# and it was tuned with one rate for all.
RATE_FACTORS: Mapping[Optimiser, RateFactors] = {
    "sgd": RateFactors(),
    "adamw": RateFactors(token=3.0, cells=3.0, gains=10.0),
}


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
    learning_rates: tuple[float, ...] | None = None  # None: those of the optimiser in AUTO_RATES
    rate_factors: RateFactors | None = None  # None: those of the optimiser in RATE_FACTORS
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
    keep_best: bool = False  # end with the weights of each setting's best evaluation, not with the last ones
    patience: int | None = None  # end after so many evaluations without a better score, with the best weights
    chunk: int | None = None  # images per thread at a time; larger batches are computed in chunks. None: by memory
    seed: int = 0

    def __post_init__(self) -> None:
        if self.learning_rates is None:
            object.__setattr__(self, "learning_rates", AUTO_RATES.get(self.optimiser, ()))
        faults = [
            f"{name} is {getattr(self, name)!r}; expected {expected}"
            for name, expected, valid in (
                ("steps", "1 or more", self.steps >= 1),
                ("batch", "1 or more", self.batch >= 1),
                ("optimiser", " or ".join(get_args(Optimiser)), self.optimiser in get_args(Optimiser)),
                ("learning_rates", "one or more, all above 0", _all(self.rates, lambda r: r > 0)),
                (
                    "rate_factors",
                    "factors of 0 or more",
                    all(
                        math.isfinite(factor) and factor >= 0 for factor in astuple(self.rate_factors or RateFactors())
                    ),
                ),
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
    def reader(cls) -> "Recipe":
        """The recipe for learned readers and branches: AdamW, fewer steps, and the weights of the best evaluation.

        Longer training gained little on the validation images of three small datasets.
        """
        return cls(steps=125, optimiser="adamw", evaluate_every=25, keep_best=True)

    @classmethod
    def for_regimes(cls, regimes: Iterable[Regime], *, train_branches: bool = False) -> "Recipe":
        """The recipe for tasks of these regimes, alone or with branches, where none is given."""
        return cls.reader() if train_branches or any(REGIMES[regime].reader for regime in regimes) else cls()

    @classmethod
    def paper(cls) -> "Recipe":
        """The paper's recipe: batch 512, 20 000 steps, SGD with momentum, clipping, 5 warm-up steps, Inception crops.

        The paper does not state momentum, clipping norm, schedule and learning rates; those are ours.
        """
        return replace(cls(), steps=20_000, batch=512, area=(0.08, 1.0), views=None, evaluate_every=1000)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that are trained."""
        return self.learning_rates or ()

    @property
    def keeps_best(self) -> bool:
        """Whether settings end with their best weights."""
        return self.keep_best or self.patience is not None

    def rate_factor(self, part: Part | None) -> float:
        """The factor on the learning rate of one part of a task; 1 for a backbone's weights."""
        factors = self.rate_factors or RATE_FACTORS[self.optimiser]
        return 1.0 if part is None else float(getattr(factors, part))

    def record(self) -> dict[str, Any]:
        """Everything that decides the weights, as JSON values.

        The fields that the first runs did not know are left out where they change nothing: those runs can be resumed.
        """
        values = asdict(self)
        factors = asdict(self.rate_factors or RATE_FACTORS[self.optimiser])
        del values["rate_factors"]
        if set(factors.values()) != {1.0}:
            values["rate_factors"] = factors
        if not self.keep_best:
            del values["keep_best"]
        return values

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
