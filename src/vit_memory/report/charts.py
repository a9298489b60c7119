"""The charts of the page as inline SVG, in the style of the training curves. They hold no text of the user's."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vit_memory.evaluation.metrics.single_label import CALIBRATION_BINS
from vit_memory.report.elements import Markup, percent
from vit_memory.training.chart_style import COLOURS, FONT_POINTS, INK, as_svg, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.ticker import MaxNLocator

_WIDE, _HIGH = 4.9, 3.3  # inches
_MOST_POINTS = 800  # of a scatter plot


def reliability_chart(confidence: Tensor, right: Tensor) -> Markup:
    """Accuracy by confidence, above the number of images in every bin of confidence."""
    bins = (confidence.double() * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    images = torch.bincount(bins, minlength=CALIBRATION_BINS).double()
    accuracy = torch.bincount(bins, weights=right.double(), minlength=CALIBRATION_BINS) / images
    centres = (np.arange(CALIBRATION_BINS) + 0.5) / CALIBRATION_BINS * 100
    wide, high = 4.9, 4.1
    figure = new_figure(wide, high)
    upper = figure.add_axes((0.12, 0.37, 0.84, 0.54))
    lower = figure.add_axes((0.12, 0.12, 0.84, 0.16), sharex=upper)
    style_axes(upper, x_label="", y_label="", title="Accuracy by confidence, %")
    style_axes(lower, x_label="confidence, %", y_label="images")
    upper.bar(centres, 100 * np.nan_to_num(accuracy.numpy()), width=90 / CALIBRATION_BINS, color=COLOURS[0])
    upper.plot([0, 100], [0, 100], color=INK, linestyle=(0, (4, 2)), linewidth=1)
    upper.set(xlim=(0, 100), ylim=(0, 102))
    upper.tick_params(labelbottom=False)
    lower.bar(centres, images.numpy(), width=90 / CALIBRATION_BINS, color=COLOURS[6])
    lower.yaxis.set_major_locator(_few_whole_ticks())
    return Markup(as_svg(figure, "Bars: accuracy in each bin of confidence; below them, the number of images."))


def precision_recall_chart(probabilities: Tensor, targets: Tensor, point: tuple[float, float]) -> Markup:
    """Precision against recall over all labels of all images; `point` is (recall, precision) at the thresholds."""
    known = targets.isfinite()
    order = probabilities[known].argsort(descending=True)
    hits = (targets[known] == 1)[order].double().cumsum(0)
    precision, recall = hits / torch.arange(1, len(hits) + 1), hits / hits[-1:].clamp(min=1)
    some = torch.linspace(0, max(0, len(hits) - 1), min(len(hits), 300)).long()
    figure = new_figure(_WIDE, _HIGH)
    axes = figure.add_axes((0.12, 0.15, 0.84, 0.73))
    style_axes(axes, x_label="recall, %", y_label="", title="Precision over all labels, %")
    axes.plot(100 * recall[some], 100 * precision[some], color=COLOURS[0], linewidth=2)
    axes.plot(100 * point[0], 100 * point[1], "o", color=COLOURS[4], markersize=8, clip_on=False, zorder=5)
    left = point[0] > 0.6
    axes.annotate(
        "at the thresholds", (100 * point[0], 100 * point[1]), xytext=(-8 if left else 8, -14),
        textcoords="offset points", ha="right" if left else "left", color=INK, fontsize=FONT_POINTS,
    )  # fmt: skip
    axes.set(xlim=(0, 101), ylim=(0, 105))
    return Markup(
        as_svg(figure, f"Line: precision by recall. At the thresholds: {percent(point[1])} at {percent(point[0])}.")
    )


def scatter_chart(truth: Tensor, predicted: Tensor) -> Markup:
    """Predicted against true values, with the line on which both are equal."""
    order = torch.randperm(len(truth), generator=torch.Generator().manual_seed(0))[:_MOST_POINTS]
    figure = new_figure(_WIDE, 4.1)
    axes = figure.add_axes((0.15, 0.13, 0.81, 0.77))
    style_axes(axes, x_label="true value", y_label="", title="Predicted value")
    low, high = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
    space = 0.04 * (high - low) or 0.5
    axes.plot([low, high], [low, high], color=INK, linestyle=(0, (4, 2)), linewidth=1)
    axes.plot(truth[order], predicted[order], "o", color=COLOURS[0], markersize=4, alpha=0.55, markeredgewidth=0)
    axes.set(xlim=(low - space, high + space), ylim=(low - space, high + space))
    return Markup(as_svg(figure, "Points: predicted by true value. Dashed line: predicted = true."))


def residual_chart(residuals: Tensor) -> Markup:
    """How many images have which difference between predicted and true value."""
    figure = new_figure(_WIDE, 4.1)
    axes = figure.add_axes((0.12, 0.13, 0.84, 0.77))
    style_axes(axes, x_label="predicted − true", y_label="", title="Images by error")
    bins = min(40, max(8, round(len(residuals) ** 0.5)))
    axes.hist(residuals.numpy(), bins=bins, color=COLOURS[0], rwidth=0.92)
    axes.axvline(0, color=INK, linestyle=(0, (4, 2)), linewidth=1)
    axes.yaxis.set_major_locator(_few_whole_ticks(5))
    return Markup(as_svg(figure, "Bars: number of images by predicted minus true value."))


def _few_whole_ticks(most: int = 2) -> "MaxNLocator":
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    return MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10])
