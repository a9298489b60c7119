"""Training curves: the loss and the validation score of every setting, read from the log of a run and drawn.

A method (what a task learns besides its head) has one colour; a learning rate has one line style and shade; the best
setting is bold. Lines are named at their ends where there is space for it.
"""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_memory.training.chart_style import COLOURS, FONT_POINTS, INK, SOFT, as_png, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vit_memory.training.results import FitResult
    from vit_memory.training.sweep import Setting

Points = Sequence[tuple[int, float]]  # step and value
_NAME_ALL = 8  # up to so many settings, every line has its name; of more, the best of every method
_MOST_NAMES = 14
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (7, 1.6, 1.2, 1.6)), (0, (2.6, 2.6)))


@dataclass(frozen=True, slots=True)
class Curve:
    """One setting's loss and validation score over the steps."""

    method: str  # what the task learns besides the head: see `Task.method`
    learning_rate: float
    variant: str  # weight decay, start and seed, where they are not the usual ones
    losses: Points
    scores: Points
    best: bool = False
    stopped_at: int | None = None  # the step at which it diverged

    @property
    def name(self) -> str:
        """The whole setting in one line."""
        return ", ".join(part for part in (self.method, f"rate {self.learning_rate:g}", self.variant) if part)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's log.jsonl; a power cut may have left one incomplete."""
    content = path.read_bytes() if path.exists() else b""
    lines = []
    for line in content.split(b"\n"):
        try:
            row = json.loads(line.decode())
        except ValueError:  # no JSON, or no UTF-8
            continue
        if isinstance(row, dict) and {"step", "time", "losses", "metric", "scores"} <= row.keys():
            lines.append(row)
    return lines


def read_curves(log: Path, result: "FitResult") -> list[Curve]:
    """The curve of every setting, in their order. Of two lines of the log for one step, the later counts."""
    rows = {line["step"]: line for line in read_log(log)}

    def points(key: str, i: int) -> Points:
        values = ((step, rows[step][key][i]) for step in sorted(rows))
        return [(step, value) for step, value in values if value is not None and math.isfinite(value)]

    return [
        Curve(
            method=one.setting.method,
            learning_rate=one.setting.learning_rate,
            variant=_variant(one.setting),
            losses=points("losses", i),
            scores=points("scores", i),
            best=one is result.best,
            stopped_at=one.stopped_at,
        )
        for i, one in enumerate(result.settings)
    ]


def _variant(setting: "Setting") -> str:
    recipe = setting.task.record.recipe
    parts = [f"decay {setting.weight_decay:g}"] if setting.weight_decay else []
    if recipe.get("start") == "normal" and setting.task.class_token is not None:
        parts.append("random token")
    return ", ".join(parts + ([f"seed {recipe['task_seed']}"] if recipe.get("task_seed") else []))


def draw_curves(curves: Sequence[Curve], metric: str) -> bytes:
    """Two panels as PNG: the training loss and the validation `metric` of every setting."""
    wide, high, left_margin = 11.6, 4.7, 0.75  # inches
    names_width = 0.35 + 0.068 * max(map(len, _labels(curves)), default=0)
    width = wide / 2 - left_margin - names_width
    figure = new_figure(wide, high)
    for i, score in enumerate((None, metric)):
        axes = figure.add_axes(((i * wide / 2 + left_margin) / wide, 0.27, width / wide, 0.62))
        draw_panel(axes, curves, score)
    draw_rate_key(figure, curves, (left_margin / wide, 0.1))
    lines = textwrap.wrap(caption(curves), 150)[:2]
    figure.text(left_margin / wide, 0.075, "\n".join(lines), va="top", color=SOFT, fontsize=FONT_POINTS)
    return as_png(figure)


def curve_figure(curves: Sequence[Curve], metric: str | None) -> "Figure":
    """One panel as a figure of its own, for a page: the validation `metric`, or without one the training loss."""
    wide, high, left_margin, columns = 4.9, 3.3, 0.62, 3
    names_width = 0.3 + 0.068 * max(map(len, _labels(curves)), default=0)
    key_rows = math.ceil(len(_keyed_rates(curves)) / columns)
    key_height = 0.19 * key_rows + 0.1 * bool(key_rows)
    figure = new_figure(wide, high + key_height)
    bottom, height = (size / (high + key_height) for size in (0.15 * high + key_height, 0.73 * high))
    axes = figure.add_axes((left_margin / wide, bottom, (wide - left_margin - names_width) / wide, height))
    draw_panel(axes, curves, metric)
    draw_rate_key(figure, curves, (left_margin / wide, 0.05 / (high + key_height)), columns)
    return figure


def draw_panel(axes: "Axes", curves: Sequence[Curve], metric: str | None) -> None:
    """The validation `metric` of every setting on the axes, or without a metric the training loss."""
    percent = metric is not None and metric.endswith("accuracy")
    title = "Training loss" if metric is None else f"Validation {metric}"
    style_axes(axes, x_label="optimiser step", y_label="", title=title + (", %" if percent else ""))
    lines = [_scaled(curve.losses if metric is None else curve.scores, 100 if percent else 1) for curve in curves]
    _set_limits(axes, curves, lines, metric)
    top = axes.get_ylim()[1]
    for curve, line, style in zip(curves, lines, _line_styles(curves), strict=True):
        if not line:
            continue
        steps, values = [step for step, _ in line], [value for _, value in line]
        if curve.stopped_at is not None:
            values = [min(value, top) for value in values]
            cross: dict[str, Any] = {"markersize": 8, "markeredgewidth": 2, "clip_on": False, "zorder": 5}
            axes.plot(steps[-1], values[-1], "x", color=style["color"], **cross)
        marker = "o" if len(line) <= 12 else ""
        axes.plot(steps, values, marker=marker, markersize=4.6 if curve.best else 3.2, **style)
    _name_lines(axes, curves, lines)


def caption(curves: Sequence[Curve]) -> str:
    """Which setting is best, and which diverged."""
    best = [f"Best, in bold: {curve.name}." for curve in curves if curve.best]
    diverged = [f"{curve.name} (step {curve.stopped_at})" for curve in curves if curve.stopped_at is not None]
    more = f" and {len(diverged) - 3} more" if len(diverged) > 3 else ""
    return " ".join(best + ([f"Diverged (×): {'; '.join(diverged[:3])}{more}."] if diverged else []))


def draw_rate_key(figure: "Figure", curves: Sequence[Curve], place: tuple[float, float], columns: int = 8) -> None:
    """The line style of every learning rate, where lines do not carry their rate at their end."""
    from matplotlib.lines import Line2D  # noqa: PLC0415

    rates = _keyed_rates(curves)
    if not rates:
        return
    handles = [Line2D([], [], color=SOFT, linestyle=_DASHES[i % len(_DASHES)]) for i in range(len(rates))]
    names = [f"rate {rate:g}" for rate in rates]
    key = figure.legend(
        handles, names, loc="lower left", bbox_to_anchor=place, ncols=min(columns, len(names)), frameon=False,
        fontsize=FONT_POINTS, handlelength=2.6, borderpad=0, borderaxespad=0, columnspacing=1.6, labelcolor=SOFT,
    )  # fmt: skip
    key.set_in_layout(False)


def _scaled(points: Points, factor: float) -> list[tuple[int, float]]:
    return [(step, factor * value) for step, value in points]


def _rates(curves: Sequence[Curve]) -> list[float]:
    """From the highest, which is drawn solid."""
    return sorted({curve.learning_rate for curve in curves}, reverse=True)


def _keyed_rates(curves: Sequence[Curve]) -> list[float]:
    """The rates that the key lists; none if there is one rate only, or if every line carries its rate at its end."""
    rates = _rates(curves)
    return rates if len(rates) > 1 and len(curves) > _NAME_ALL else []


def _line_styles(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """How every line is drawn: colour by method, dashes and shade by learning rate, the best one bold."""
    methods, rates = list(dict.fromkeys(curve.method for curve in curves)), _rates(curves)
    many = len(curves) > _NAME_ALL
    styles = []
    for curve in curves:
        rank = rates.index(curve.learning_rate)
        shade = 1 - 0.55 * rank / max(1, len(rates) - 1)
        styles.append(
            {
                "color": COLOURS[methods.index(curve.method) % len(COLOURS)],
                "linestyle": _DASHES[rank % len(_DASHES)],
                "alpha": 1.0 if curve.best else shade * (0.6 if many else 1),
                "linewidth": 3.2 if curve.best else 1.1 if many else 1.6,
                "zorder": 4 if curve.best else 3,
                "solid_capstyle": "round",
            }
        )
    return styles


def _set_limits(axes: "Axes", curves: Sequence[Curve], lines: Sequence[Points], metric: str | None) -> None:
    """Limits that fit the settings that did not diverge: a diverging loss would flatten all others."""
    living = [line for curve, line in zip(curves, lines, strict=True) if curve.stopped_at is None and line]
    points = [point for line in living or lines for point in line]
    values = [value for _, value in points] or [0.0, 1.0]
    low, high = min(values), max(values)
    if metric == "R²" and high > 0:
        low = max(low, -0.5)  # the first evaluations can be far below zero
    space = max(0.06 * (high - low), (0.1 * max(abs(low), abs(high)) - (high - low)) / 2) or 0.5
    axes.set_ylim(max(low - space, 0.0) if low >= 0 else low - space, high + space)
    axes.set_xlim(0, 1.01 * max((step for line in lines for step, _ in line), default=1))


def _labels(curves: Sequence[Curve]) -> list[str]:
    """A short name for every curve, of the parts in which they differ; empty where a line gets no name."""
    many = len(curves) > _NAME_ALL
    parts = [
        (curve.method, f"rate {curve.learning_rate:g}" if not many or curve.best else "", curve.variant)
        for curve in curves
    ]
    differ = [len({part[i] for part in parts}) > 1 for i in range(3)]
    differ[0] |= not any(differ)
    if many:
        differ = [True, True, False]
    named = _named(curves)
    return [
        ", ".join(text for text, shown in zip(part, differ, strict=True) if shown and text) if i in named else ""
        for i, part in enumerate(parts)
    ]


def _named(curves: Sequence[Curve]) -> set[int]:
    """Which curves are named at their ends: all of a few, of many the best of every method."""
    living = [i for i, curve in enumerate(curves) if curve.stopped_at is None and curve.scores]
    if len(curves) <= _NAME_ALL:
        return set(living)
    ranked = sorted(living, key=lambda i: (curves[i].best, curves[i].scores[-1][1]), reverse=True)
    first: dict[str, int] = {}
    for i in ranked:
        first.setdefault(curves[i].method, i)
    return set(list(first.values())[:_MOST_NAMES])


def _name_lines(axes: "Axes", curves: Sequence[Curve], lines: Sequence[Points]) -> None:
    """Names beside the ends of the lines, moved apart where they would overlap."""
    labels, styles = _labels(curves), _line_styles(curves)
    chosen = sorted((i for i, label in enumerate(labels) if label and lines[i]), key=lambda i: lines[i][-1][1])
    if not chosen:
        return
    height = 72 / axes.figure.dpi * axes.get_window_extent().height  # points
    low, high = axes.get_ylim()
    ends = [height * (min(max(lines[i][-1][1], low), high) - low) / (high - low) for i in chosen]
    for i, end, place in zip(chosen, ends, spread(ends, 1.3 * FONT_POINTS, height), strict=True):
        step, value = lines[i][-1]
        axes.annotate(
            labels[i],
            xy=(step, min(max(value, low), high)),
            xytext=(14, place - end),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=FONT_POINTS,
            fontweight="bold" if curves[i].best else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": styles[i]["color"], "linewidth": 0.9, "shrinkA": 1, "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )  # fmt: skip


def spread(places: Sequence[float], gap: float, height: float) -> list[float]:
    """Ascending places moved as little as needed to be `gap` apart, centred where they meet, inside 0 to `height`."""
    groups: list[tuple[float, int]] = []  # centre and size of places that touch
    for place in places:
        centre, size = place, 1
        while groups and centre - groups[-1][0] < gap * (size + groups[-1][1]) / 2:
            other, count = groups.pop()
            centre, size = (centre * size + other * count) / (size + count), size + count
        groups.append((centre, size))
    moved = [centre + gap * (i - (size - 1) / 2) for centre, size in groups for i in range(size)]
    last = len(moved) - 1
    return [max(min(place, height - gap * (last - i)), gap * i) for i, place in enumerate(moved)]
