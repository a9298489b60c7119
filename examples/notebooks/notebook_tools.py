"""What the notebooks share: a split as tensors, accuracy with its interval, counted cost, tables and charts."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter
from matplotlib_inline.backend_inline import set_matplotlib_formats
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vit_memory import Preprocessing

INK, SOFT, GRID = "#1d2430", "#5d6675", "#d9d7d0"
# Okabe and Ito's colours for all kinds of colour vision; every series has its own marker and dashes too, for print.
SERIES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", ":"), ("#cc79a7", "D", "-."))

warnings.filterwarnings("ignore", "IProgress not found")  # no page here draws a progress bar
set_matplotlib_formats("retina")  # twice the pixels: sharp on a screen, and in print
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.titlesize": 10})


@dataclass(frozen=True)
class Accuracy:
    """The share of correct answers on n images, with its 95 % interval by Wilson."""

    share: float
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """It covers the choice of test images, and not the randomness of training."""
        z, p, n = 1.96, self.share, self.n
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.share:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def accuracy(logits: Tensor, targets: Tensor) -> Accuracy:
    """Of logits (n, C) for true classes (n,)."""
    return Accuracy((logits.argmax(-1) == targets).double().mean().item(), len(targets))


def difference(logits: Tensor, others: Tensor, targets: Tensor) -> str:
    """By how many points `logits` are more accurate than `others` on the same images, with a 95 % interval."""
    gains = (logits.argmax(-1) == targets).double() - (others.argmax(-1) == targets).double()  # (n,) of -1, 0, 1
    mean, half = 100 * gains.mean().item(), 196 * gains.std().item() / math.sqrt(len(gains))
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


def as_tensors(split: Any, preprocessing: Preprocessing) -> tuple[Tensor, Tensor]:
    """A split of `digits`: images as the backbone wants them, (n, 3, height, width), and their classes (n,)."""
    grey = torch.from_numpy(np.stack([split.images.read(i) for i in range(len(split))]))  # (n, 8, 8) uint8
    resized = F.interpolate(grey[:, None], preprocessing.crop, mode=preprocessing.interpolation, antialias=True)
    mean, std = torch.tensor(preprocessing.mean)[:, None, None], torch.tensor(preprocessing.std)[:, None, None]
    return (resized / 255 - mean) / std, torch.from_numpy(split.targets)


def operations(model: nn.Module, images: Tensor) -> float:
    """Billions of multiplications and additions in one pass: counted, so the same on every machine."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # attention in parts that the counter knows
        model(images)  # the first pass of a shape also tries which products can be joined
        with FlopCounterMode(display=False) as counter:
            model(images)
    return counter.get_total_flops() / 1e9


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Markdown:
    """The first column to the left, all others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


@contextmanager
def chart(title: str, x: str = "", y: str = "", height: float = 3.0) -> Iterator[Axes]:
    """Axes to draw on, shown at the end."""
    _, axes = plt.subplots(figsize=(5.4, height), layout="constrained")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=SOFT)
    yield axes
    plt.show()


def legend_below(axes: Axes, columns: int) -> None:
    """Under the chart, where it takes no width from it: pages are read on phones too."""
    axes.figure.legend(frameon=False, loc="outside lower center", ncols=columns)


def accuracy_chart(title: str, series: Mapping[str, Mapping[str, Accuracy]]) -> None:
    """One row per task or method, one marker per series, with intervals."""
    rows = list(dict.fromkeys(row for values in series.values() for row in values))
    with chart(
        title, "test accuracy in %, with 95 % interval", height=1.1 + 0.18 * len(rows) * (1 + len(series))
    ) as axes:
        for i, (name, values) in enumerate(series.items()):
            colour, marker, _ = SERIES[i]
            shift = (i - (len(series) - 1) / 2) * 0.22
            for row, value in values.items():
                low, high = value.interval
                axes.plot([100 * low, 100 * high], [rows.index(row) + shift] * 2, color=colour, linewidth=1.6)
            centres = [100 * value.share for value in values.values()]
            places = [rows.index(row) + shift for row in values]
            axes.plot(centres, places, marker, color=colour, label=name, markeredgecolor="white", markersize=7)
        axes.set_yticks(range(len(rows)), rows, color=INK)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        if len(series) > 1:
            legend_below(axes, len(series))


def line_chart(title: str, x: str, y: str, xs: Sequence[float], series: Mapping[str, Sequence[float]]) -> None:
    """One line per series, with its name at its end; x grows by factors."""
    with chart(title, x, y) as axes:
        for (name, ys), (colour, marker, dashes) in zip(series.items(), SERIES, strict=False):
            axes.plot(xs, ys, dashes, color=colour, marker=marker, markersize=5)
            axes.annotate(name, (xs[-1], ys[-1]), (8, 0), textcoords="offset points", va="center", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs)
        axes.xaxis.set_major_formatter(ScalarFormatter())
