"""Charts of experiments: readable in print and for every kind of colour vision (markers and dashes beside colours)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_memory.evaluation.statistics import Interval
from vit_memory.training.chart_style import COLOURS, FONT_POINTS, INK, LINE, SOFT, as_svg, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    axes.margins(x=0.12, y=0.1)
    for i, (x, y) in enumerate(dots.values()):
        axes.plot(x, y, MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)], markersize=7)
    _log_ticks(axes)
    _name_dots(axes, dots)
    return as_svg(figure, title + ": " + "; ".join(f"{name} {y:.1f}" for name, (_, y) in dots.items()) + ".")


def _log_ticks(axes: "Axes") -> None:
    """Ticks at powers of ten, or at 1, 2 and 5 of them where the axis covers little more than one; as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator  # noqa: PLC0415

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short_number(value)))
    axes.minorticks_off()
    axes.set_xlim(low, high)


def _short_number(value: float) -> str:
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _name_dots(axes: "Axes", dots: Mapping[str, tuple[float, float]]) -> None:
    """Write each name beside its dot, at the nearest place where it covers no dot and no other name.

    A name that had to move up or down is joined to its dot by a line.
    """
    from matplotlib.transforms import Bbox  # noqa: PLC0415

    points = 72 / axes.figure.dpi  # in a pixel
    font: dict[str, Any] = {"color": SOFT, "fontsize": FONT_POINTS - 1.5, "va": "center"}
    frame = axes.get_window_extent()
    places = {name: axes.transData.transform(dot) for name, dot in dots.items()}
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places.values()]
    for name, (x, y) in sorted(places.items(), key=lambda item: -item[1][1]):
        measured = axes.text(0, 0, name, **font)
        width, height = measured.get_window_extent().size
        measured.remove()
        nearest_first = [
            Bbox.from_bounds(x + right, y + up - height / 2, width, height)
            for up in sorted(range(-150, 151, 3), key=abs)
            for right in (9, -9 - width)
        ]
        inside = [box for box in nearest_first if frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0]
        box = next((box for box in inside if not box.count_overlaps(taken)), nearest_first[0])
        taken.append(box)
        up = (box.y0 + box.y1) / 2 - y
        line = {"arrowstyle": "-", "color": LINE, "shrinkA": 0, "shrinkB": 4} if abs(up) > height else None
        offset = (box.x0 - x) * points, up * points
        axes.annotate(name, dots[name], xytext=offset, textcoords="offset points", arrowprops=line, **font)
