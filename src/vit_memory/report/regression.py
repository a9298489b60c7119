"""The report of a regression task: scores of every value, predicted against true, errors, worst images."""

import math

import torch
from torch import Tensor

from vit_memory.evaluation.inference import Evaluated
from vit_memory.evaluation.metrics import RegressionScores
from vit_memory.evaluation.metrics.intervals import Interval
from vit_memory.report.charts import residual_chart, scatter_chart
from vit_memory.report.elements import (
    Markup,
    bold,
    charts,
    count,
    join,
    number,
    paragraph,
    picture,
    pictures,
    section,
    table,
)
from vit_memory.report.pictures import NO_PICTURES, Pictures

_MOST_VALUES = 6  # with charts


def headline(scores: RegressionScores) -> list[tuple[str, str]]:
    """The figures at the top."""
    values = list(scores.per_value.values())
    if len(values) == 1:
        (one,) = values
        low, high = (_number(end, 3) for end in one.r2_interval)
        return [
            (_number(one.r2, 3), f"R² (95 % interval {low} to {high})"),
            (number(scores.images), f"images, {number(one.images)} with a known value"),
            (_number(one.mae), f"MAE (95 % interval {_interval(one.mae_interval)})"),
            (_number(one.rmse), f"RMSE (95 % interval {_interval(one.rmse_interval)})"),
        ]
    return [
        (_number(scores.r2, 3), f"R², mean of {len(values)} values"),
        (number(scores.images), "images"),
    ]


def sections(evaluated: Evaluated, shown: Pictures) -> list[Markup]:
    """Everything below the headline."""
    scores = evaluated.scores
    assert isinstance(scores, RegressionScores)
    outputs, targets = evaluated.outputs.double(), evaluated.targets.double()
    return [
        _values(scores),
        _charts(evaluated.task.labels, outputs, targets),
        _worst(evaluated, shown, outputs, targets),
        _examples(evaluated, shown, outputs, targets),
    ]


def _values(scores: RegressionScores) -> Markup:
    rows = [
        [
            name,
            str(one.images),
            _with_interval(one.r2, one.r2_interval, 3),
            _with_interval(one.mae, one.mae_interval),
            _with_interval(one.rmse, one.rmse_interval),
        ]
        for name, one in scores.per_value.items()
    ]
    text = paragraph(
        "R²: share of the variance explained. MAE and RMSE: mean absolute and root mean square error, in the units of "
        "the value. In brackets: 95 % interval, from 500 bootstrap samples of the images.",
        style="soft",
    )
    return section("Values", text, table(("value", "images", "R²", "MAE", "RMSE"), rows, {1, 2, 3, 4}, more="values"))


def _charts(names: tuple[str, ...], outputs: Tensor, targets: Tensor) -> Markup:
    parts: list[Markup] = []
    for i, name in enumerate(names[:_MOST_VALUES]):
        known = targets[:, i].isfinite() & outputs[:, i].isfinite()
        if not bool(known.any()):
            continue
        truth, predicted = targets[known, i], outputs[known, i]
        if len(names) > 1:
            parts.append(paragraph(bold(name)))
        mean = float((predicted - truth).mean())
        text = f"Mean error {_number(mean)}: on average, predictions are too {'high' if mean > 0 else 'low'}."
        note = "Dashed: predicted = true." + (" A sample of 800 images." if len(truth) > 800 else "")
        parts.append(charts([(scatter_chart(truth, predicted), note), (residual_chart(predicted - truth), text)]))
    if len(names) > _MOST_VALUES:
        parts.append(paragraph(f"Charts of the first {_MOST_VALUES} of {len(names)} values.", style="soft"))
    return section("Predicted and true values", *parts)


def _worst(evaluated: Evaluated, shown: Pictures, outputs: Tensor, targets: Tensor) -> Markup:
    known = targets.isfinite()
    error = (outputs - targets).abs().masked_fill(~known, 0)
    spread = _deviation(targets)
    order = (error / spread).max(1).values.argsort(descending=True, stable=True)
    chosen = [i for i in order.tolist() if bool(known[i].any())][: shown.per_section]
    if not chosen:
        return section("Largest errors", paragraph(NO_PICTURES))
    unit = ", measured in standard deviations of each value" if targets.shape[1] > 1 else ""
    text = f"The {len(chosen)} images with the largest error{unit}."
    figures = [_figure_of(evaluated, shown, i, outputs, targets) for i in chosen]
    return section("Largest errors", paragraph(text, style="soft"), pictures(figures))


def _examples(evaluated: Evaluated, shown: Pictures, outputs: Tensor, targets: Tensor) -> Markup:
    chosen = shown.choose(targets.isfinite().any(1).nonzero()[:, 0])
    if not chosen:
        return section("Predictions", paragraph(NO_PICTURES))
    text = f"{count(len(chosen), 'image')} drawn at random, good and bad predictions alike."
    figures = [_figure_of(evaluated, shown, i, outputs, targets) for i in chosen]
    return section("Predictions", paragraph(text, style="soft"), pictures(figures))


def _figure_of(evaluated: Evaluated, shown: Pictures, i: int, outputs: Tensor, targets: Tensor) -> Markup:
    names, place = evaluated.task.labels, int(evaluated.indices[i])
    lines = []
    for j, name in enumerate(names[:_MOST_VALUES]):
        title = f"{name}: " if len(names) > 1 else ""
        truth = float(targets[i, j])
        known = ", true value not known" if math.isnan(truth) else f", true {_number(truth)}"
        lines.append(join([title, bold(_number(float(outputs[i, j]))), known, Markup("<br>")]))
    return picture(shown.uri(place), join(lines), shown.name(place))


def _deviation(targets: Tensor) -> Tensor:
    """The standard deviation of every value over the images where it is known; 1 where all are the same."""
    known = targets.isfinite()
    numbers = known.sum(0).clamp(min=1)
    mean = torch.where(known, targets, 0.0).sum(0) / numbers
    variance = torch.where(known, (targets - mean).square(), 0.0).sum(0) / numbers
    return torch.where(variance > 0, variance.sqrt(), 1.0)


def _number(value: float, decimals: int | None = None) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"


def _interval(interval: Interval, decimals: int | None = None) -> str:
    return f"{_number(interval[0], decimals)} to {_number(interval[1], decimals)}"


def _with_interval(value: float, interval: Interval, decimals: int | None = None) -> str:
    return f"{_number(value, decimals)} ({_interval(interval, decimals)})"
