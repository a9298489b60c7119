"""The picture of a training: any number of settings, diverged ones too, without touching matplotlib's state."""

import io
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from vit_memory.training.chart_style import COLOURS, as_svg
from vit_memory.training.curves import Curve, caption, curve_figure, draw_curves, spread


def curves(methods=("5 cells",), rates=(0.1,), evaluations=3, diverged=()):
    made = []
    for method in methods:
        for rate in rates:
            steps = [50 * (i + 1) for i in range(evaluations)]
            losses = [(step, 2 * math.exp(-step * rate / 100)) for step in steps]
            stopped = (method, rate) in diverged
            if stopped:
                losses = [(50, 3e30)]
            scores = [(step, 1 - loss / 2) for step, loss in losses if loss < 2]
            made.append(Curve(method, rate, "", losses, scores, stopped_at=77 if stopped else None))
    living = [one for one in made if one.stopped_at is None]
    best = max(living, key=lambda one: one.scores[-1][1])
    return [replace(one, best=one is best) for one in made]


RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@pytest.mark.parametrize(
    "drawn",
    [
        curves(),
        curves(evaluations=1),
        curves(rates=RATES[:4]),
        curves(rates=RATES[:4], diverged=[("5 cells", 0.3)]),
        curves(("head", "class", "5 cells"), RATES[:4]),
        curves([f"{i} cells" for i in range(1, 6)], RATES),
    ],
    ids=["1", "1 evaluation", "4", "4, one diverged", "12", "40"],
)
@pytest.mark.parametrize("metric", ["accuracy", "R²"])
def test_any_number_of_settings_makes_one_picture_of_one_size(drawn, metric):
    with Image.open(io.BytesIO(draw_curves(drawn, metric))) as picture:
        assert picture.size == (1740, 705)
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20


def test_a_method_has_one_colour_and_no_two_methods_share_it():
    svg = as_svg(curve_figure(curves(("head", "class", "5 cells"), RATES[:4]), "accuracy"), "curves")
    assert [f"var(--c{i + 1}, {colour})" in svg for i, colour in enumerate(COLOURS)] == [True] * 3 + [False] * 4


@pytest.mark.parametrize("rates", [RATES[:3], (1.25e-5, 3.75e-5, 0.000125, 0.00375, 0.0125)], ids=["3", "5, long"])
def test_on_a_page_too_a_sweep_says_which_line_style_is_which_rate_inside_the_figure(rates):
    figure = curve_figure(curves(("head", "class", "5 cells"), rates), "accuracy")
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == [f"rate {rate:g}" for rate in sorted(rates, reverse=True)]
    (axes,) = figure.axes
    drawn = [line._unscaled_dash_pattern for line in axes.lines]  # of one method after the other, the lowest rate first
    assert [line._unscaled_dash_pattern for line in key.get_lines()] == drawn[len(rates) - 1 :: -1]
    renderer = FigureCanvasAgg(figure).get_renderer()
    box, panel = key.get_window_extent(renderer), axes.get_tightbbox(renderer)
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert 0 <= box.y0 < box.y1 <= panel.y0
    assert not curve_figure(curves(rates=rates), "accuracy").legends  # every line carries its rate


def test_a_diverged_setting_is_named_and_does_not_flatten_the_others():
    drawn = curves(rates=RATES[:4], diverged=[("5 cells", 0.3)])
    assert "Diverged (×): 5 cells, rate 0.3 (step 77)." in caption(drawn)
    (axes,) = curve_figure(drawn, None).axes
    assert axes.get_ylim()[1] < 3


def test_drawing_leaves_matplotlibs_settings_alone_and_runs_in_threads():
    before = dict(mpl.rcParams)
    drawn = curves(rates=RATES[:3])
    with ThreadPoolExecutor(4) as pool:
        pictures = set(pool.map(lambda _: draw_curves(drawn, "accuracy"), range(4)))
    assert len(pictures) == 1
    assert dict(mpl.rcParams) == before


@given(places=st.lists(st.floats(0, 100), min_size=1, max_size=10).map(sorted))
def test_names_are_moved_apart_and_stay_in_order_inside_the_panel(places):
    moved = spread(places, 10, 100)
    assert all(b - a >= 10 - 1e-6 for a, b in pairwise(moved))
    assert moved[0] >= -1e-6
    assert moved[-1] <= 100 + 1e-6
