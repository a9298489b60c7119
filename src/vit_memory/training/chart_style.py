"""The style of every chart: colours, ticks and fonts, and figures as PNG or inline SVG.

Figures are made without pyplot and without changing matplotlib's settings, so threads can draw at the same time and a
user's own plots are left alone. matplotlib is imported when the first figure is made.
"""

import hashlib
import html
import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE = "#1d2430", "#5d6675", "#d9d7d0"  # text and best lines; labels; grid
# Okabe and Ito's colours for all kinds of colour vision, without yellow and black; ordered so that neighbours also
# differ in grey.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a8a")
FONT_POINTS = 9.0
# In SVG, colours become CSS variables of the page, so that a dark page has light charts.
_VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line"} | {c: f"--c{i + 1}" for i, c in enumerate(COLOURS)}


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of that size in inches, with a transparent background."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only drawing waits for it

    figure = Figure(figsize=(width, height))
    figure.patch.set_alpha(0)
    return figure


def style_axes(axes: "Axes", *, x_label: str, y_label: str, title: str = "") -> None:
    """Round ticks, a light horizontal grid, no box."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    axes.patch.set_alpha(0)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=FONT_POINTS, length=0, pad=4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(x_label, color=SOFT, fontsize=FONT_POINTS)
    axes.set_ylabel(y_label, color=SOFT, fontsize=FONT_POINTS)
    if title:
        axes.set_title(title, color=INK, fontsize=FONT_POINTS + 2, fontweight="bold", loc="left", pad=10)


def as_png(figure: "Figure", dots_per_inch: int = 150) -> bytes:
    """The figure on white."""
    content = io.BytesIO()
    figure.patch.set_alpha(1)
    figure.savefig(content, format="png", dpi=dots_per_inch, facecolor="white")
    return content.getvalue()


def as_svg(figure: "Figure", description: str) -> str:
    """The figure as an <svg> element for a page: scalable, in the page's colours, described for screen readers."""
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata=_NO_METADATA)
    svg = content.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # Identifiers must be unique in the page, and the same every time; matplotlib's are partly random.
    numbers = {name: i for i, name in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]*)"', svg)))}
    svg = re.sub(r'(\bid="|href="#|url\(#)([^")]*)', lambda found: f"{found[1]}ID{numbers.get(found[2], 0)}", svg)
    svg = svg.replace("ID", "f" + hashlib.sha256((svg + description).encode()).hexdigest()[:8] + "-")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable}, {colour})")
    view = re.search(r'viewBox="([^"]*)"', svg)
    opening = f'<svg viewBox="{view[1] if view else ""}" role="img" aria-label="{html.escape(description)}">'
    return opening + re.sub(r"\n\s*", "\n", svg[svg.index(">") + 1 :])


_NO_METADATA: dict[str, Any] = {"Creator": None, "Date": None, "Format": None, "Type": None}
