"""Regression metrics: MAE, RMSE and R² of every value in the user's units, each with its interval."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vit_memory.evaluation.metrics.intervals import Interval, bootstrap_interval, finite_or_none


@dataclass(frozen=True, slots=True, eq=False)
class ValueScores:
    """Scores of one value of a regression task, in the user's units; the fields are keys in JSON."""

    images: int  # whose value is known
    mae: float
    mae_interval: Interval
    rmse: float
    rmse_interval: Interval
    r2: float
    r2_interval: Interval

    def as_json(self) -> dict[str, Any]:
        """The scores as JSON values; R² of values that are all the same is undefined, and null."""
        return {field.name: finite_or_none(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class RegressionScores:
    """Scores of a regression task."""

    images: int
    per_value: Mapping[str, ValueScores]

    @property
    def r2(self) -> float:
        """The mean over the values."""
        return math.fsum(scores.r2 for scores in self.per_value.values()) / max(1, len(self.per_value))

    @property
    def headline(self) -> str:
        """The main metric, in a few words."""
        return f"R² {self.r2:.3f}"

    def as_json(self) -> dict[str, Any]:
        """The scores as JSON values."""
        return {
            "kind": "regression",
            "images": self.images,
            "r2": finite_or_none(self.r2),
            "per_value": {name: scores.as_json() for name, scores in self.per_value.items()},
        }


def score_regression(outputs: Tensor, targets: Tensor, names: Sequence[str]) -> RegressionScores:
    """Score the values (n, C) of a regression task against targets (n, C), NaN if unknown.

    >>> scores = score_regression(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [2.0]]), ["height"])
    >>> scores.per_value["height"].mae
    0.5
    """
    per_value = {}
    for name, predicted, true in zip(names, outputs.double().T, targets.double().T, strict=True):
        known = true.isfinite()
        if bool(known.any()):
            per_value[name] = _score_value(predicted[known], true[known])
    return RegressionScores(len(targets), per_value)


def _score_value(predicted: Tensor, true: Tensor) -> ValueScores:
    error = predicted - true

    def mae(indices: Tensor) -> float:
        return float(error[indices].abs().mean())

    def rmse(indices: Tensor) -> float:
        return math.sqrt(float(error[indices].square().mean()))

    def r2(indices: Tensor) -> float:
        chosen = true[indices]
        spread = float((chosen - chosen.mean()).square().sum())
        constant = spread <= 1e-12 * float(chosen.square().sum())  # the same image drawn again and again
        return math.nan if constant else 1 - float(error[indices].square().sum()) / spread

    def with_interval(score: Callable[[Tensor], float]) -> tuple[float, Interval]:
        return score(torch.arange(len(true))), bootstrap_interval(score, len(true))

    return ValueScores(len(true), *with_interval(mae), *with_interval(rmse), *with_interval(r2))
