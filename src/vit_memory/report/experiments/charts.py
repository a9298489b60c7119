"""Charts of experiments: readable in print and for every kind of colour vision (markers and dashes beside colours)."""

from collections.abc import Mapping, Sequence

from vit_memory.evaluation.statistics import Interval
from vit_memory.training.chart_style import COLOURS, FONT_POINTS, INK, SOFT, as_svg, new_figure, style_axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def interval_chart(title: str, rows: Mapping[str, Interval]) -> str:
    """A dot with its interval for every method, from the top down."""
    height = 0.9 + 0.28 * len(rows)
    figure = new_figure(6.4, height)
    axes = figure.add_axes((0.40, 0.45 / height, 0.55, 1 - 0.9 / height))
    style_axes(axes, x_label="test accuracy, %", y_label="", title=title)
    axes.grid(axis="x", color="#d9d7d0", linewidth=0.8)
    axes.grid(axis="y", visible=False)
    for place, interval in enumerate(rows.values()):
        values = [100 * value for value in (interval.low, interval.mean, interval.high)]
        axes.plot([values[0], values[2]], [place, place], color=COLOURS[0], linewidth=2)
        axes.plot(values[1], place, "o", color=COLOURS[0], markersize=6)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    words = "; ".join(f"{name} {100 * interval.mean:.1f}" for name, interval in rows.items())
    return as_svg(figure, f"{title}: {words}.")


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    log_x: bool = False,
    ticks: Sequence[float] | None = None,
) -> str:
    """Lines with a marker at every value, named in a legend below."""
    rows = (len(lines) + 1) // 2
    height = 3.2 + 0.22 * rows
    figure = new_figure(5.6, height)
    bottom = (0.62 + 0.22 * rows) / height
    axes = figure.add_axes((0.11, bottom, 0.85, 0.9 - bottom))
    style_axes(axes, x_label=x_label, y_label=y_label, title=title)
    if log_x:
        axes.set_xscale("log")
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    for i, (name, (x, y)) in enumerate(lines.items()):
        marker, dash = MARKERS[i % len(MARKERS)], DASHES[i % len(DASHES)]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(x, y, color=colour, marker=marker, linestyle=dash, linewidth=1.8, markersize=5, label=name)
    figure.legend(
        loc="lower left", bbox_to_anchor=(0.02, 0.0), ncols=2, frameon=False, fontsize=FONT_POINTS, labelcolor=INK
    )
    ends = "; ".join(f"{name}: {y[0]:.1f} to {y[-1]:.1f}" for name, (_, y) in lines.items() if len(y))
    return as_svg(figure, f"{title}. {ends}.")


def scatter_chart(title: str, x_label: str, y_label: str, dots: Mapping[str, tuple[float, float]]) -> str:
    """A named dot for every method; x is logarithmic."""
    figure = new_figure(5.6, 4.0)
    axes = figure.add_axes((0.11, 0.13, 0.85, 0.77))
    style_axes(axes, x_label=x_label, y_label=y_label, title=title)
    axes.set_xscale("log")
    axes.minorticks_off()
    for i, (x, y) in enumerate(dots.values()):
        axes.plot(x, y, MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)], markersize=7)
    for name, (x, y), offset in zip(dots, dots.values(), _label_offsets(list(dots.values())), strict=True):
        axes.annotate(
            name, (x, y), xytext=(6, offset), textcoords="offset points", color=SOFT, fontsize=FONT_POINTS - 1.5
        )
    axes.margins(x=0.18, y=0.1)
    return as_svg(figure, title + ": " + "; ".join(f"{name} {y:.1f}" for name, (_, y) in dots.items()) + ".")


def _label_offsets(dots: Sequence[tuple[float, float]]) -> list[float]:
    """Points by which labels move up or down, so that those of close neighbours do not cover each other."""
    order = sorted(range(len(dots)), key=lambda i: dots[i][1])
    span = max(1e-9, max(y for _, y in dots) - min(y for _, y in dots))
    offsets, last = [0.0] * len(dots), -1e9
    for i in order:
        place = 220 * (dots[i][1] - dots[order[0]][1]) / span  # the axes are about 220 points high
        label = max(place - 3, last + 9)
        offsets[i], last = label - place, label
    return offsets
