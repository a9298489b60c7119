"""A training's curves as a picture, from the lines of its log; Pillow is enough to draw them."""

import io
from collections.abc import Mapping, Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

Points = Sequence[tuple[int, float]]  # step and value
_COLOURS = ("#1f5fa8", "#c8501e", "#2e8b57", "#8b3fa0", "#b8860b", "#d1477a", "#3aa6a6", "#666666")
_WIDE, _HIGH, _EDGE = 760, 360, 56
_NAMED = 14  # settings that a legend has room for


def draw_curves(losses: Mapping[str, Points], scores: Mapping[str, Points], score: str) -> bytes:
    """Two charts as PNG: the training loss and the validation score of every setting, which is called `score`."""
    rows = min(len(losses), _NAMED)
    image = Image.new("RGB", (2 * _WIDE, _HIGH + 2 * _EDGE + 20 * ((rows + 1) // 2)), "white")
    pen = ImageDraw.Draw(image)
    _chart(pen, 0, "training loss", losses, percent=False)
    percent = score.endswith("accuracy")
    _chart(pen, _WIDE, f"{score}, %" if percent else score, scores, percent=percent)
    for i, name in enumerate(list(losses)[:_NAMED]):
        left, top = _EDGE + (i % 2) * _WIDE, _HIGH + 2 * _EDGE - 8 + 20 * (i // 2)
        pen.line((left, top + 7, left + 24, top + 7), fill=_COLOURS[i % len(_COLOURS)], width=3)
        pen.text((left + 32, top), name, fill="#333333", font=_font(13))
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return written.getvalue()


def _chart(pen: ImageDraw.ImageDraw, left: int, title: str, lines: Mapping[str, Points], *, percent: bool) -> None:
    scale = 100 if percent else 1
    points = [point for line in lines.values() for point in line]
    steps = [step for step, _ in points] or [1]
    values = [scale * value for _, value in points] or [0.0]
    first, last = 0, max(steps)
    low, high = min(values), max(values)
    room = max((high - low) * 0.05, 1e-3)
    low, high = low - room if low < 0 else max(0.0, low - room), high + room

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / max(1, last - first)
        up = (value - low) / (high - low)
        return left + _EDGE + across * (_WIDE - 2 * _EDGE), _EDGE + (1 - up) * _HIGH

    pen.text((left + _EDGE, 18), title, fill="#111111", font=_font(16))
    for i in range(5):
        value, step = low + (high - low) * i / 4, round(last * i / 4)
        y, x = place(0, value)[1], place(step, low)[0]
        pen.line((left + _EDGE, y, left + _WIDE - _EDGE, y), fill="#e3e3e3")
        pen.text((left + _EDGE - 6, y), f"{value:.3g}", fill="#555555", font=_font(12), anchor="rm")
        pen.text((x, _EDGE + _HIGH + 6), str(step), fill="#555555", font=_font(12), anchor="mt")
    for i, line in enumerate(lines.values()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = [place(step, scale * value) for step, value in line]
        if len(path) > 1:
            pen.line(path, fill=colour, width=2, joint="curve")
        for x, y in path:
            pen.ellipse((x - 2.5, y - 2.5, x + 2.5, y + 2.5), fill=colour)


@cache
def _font(points: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(points)
