"""The result of a training: a table in a terminal, aligned lines elsewhere."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from vit_memory.cli.progress import score_text
from vit_memory.cli.terminal import print_table

if TYPE_CHECKING:
    from vit_memory.training.results import FitResult, SettingResult


def print_settings(result: "FitResult") -> None:
    """Print what was trained, with parameters and validation scores, on stdout.

    Of several methods, the best setting of each, from the smallest task to the largest, with the difference to the best
    row above it. Settings of one method are listed best first.
    """
    diverged = [one for one in result.settings if one.score is None]
    if len(result.best_by_method) > 1:
        _print(
            ("method", "setting", "parameters", f"validation {result.metric}", "vs best above"), _method_rows(result)
        )
        for one in diverged:
            typer.echo(f"{one.setting.name}: diverged at step {one.stopped_at}")
        return
    ordered = sorted(result.settings, key=lambda one: -math.inf if one.score is None else one.score, reverse=True)
    rows = [(one.setting.name, str(one.parameters), _score(result, one)) for one in ordered]
    _print(("setting", "parameters", f"validation {result.metric}"), rows)


def _method_rows(result: "FitResult") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    highest: float | None = None
    for one in result.best_by_method:
        assert one.score is not None  # diverged ones are not among them
        scale, digits = (100, 1) if result.metric.endswith("accuracy") else (1, 3)
        difference = "" if highest is None else f"{scale * (one.score - highest):+.{digits}f}"
        highest = one.score if highest is None else max(highest, one.score)
        method = f"{one.method}{'  <- kept' if one is result.best else ''}"
        setting = one.setting.name.removeprefix(f"{one.method}, ")
        rows.append((method, setting, str(one.parameters), _score(result, one), difference))
    return rows


def _score(result: "FitResult", one: "SettingResult") -> str:
    return f"diverged at {one.stopped_at}" if one.score is None else score_text(result.metric, one.score)


def _print(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        print_table(columns, rows)
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for name, *others in (columns, *rows):
        right = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        typer.echo("  ".join([name.ljust(widths[0]), *right]).rstrip())
