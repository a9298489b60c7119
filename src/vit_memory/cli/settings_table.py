"""The settings of a training, best first: a table in a terminal, aligned lines elsewhere."""

import math
import sys
from typing import TYPE_CHECKING

import typer

from vit_memory.cli.progress import score_text
from vit_memory.cli.terminal import print_table

if TYPE_CHECKING:
    from vit_memory.training.results import FitResult


def print_settings(result: "FitResult") -> None:
    """Print every setting with its parameters and validation score on stdout."""
    columns = ("setting", "parameters", f"validation {result.metric}")
    rows = []
    for r in sorted(result.settings, key=lambda r: -math.inf if r.score is None else r.score, reverse=True):
        score = f"diverged at {r.stopped_at}" if r.score is None else score_text(result.metric, r.score)
        rows.append((r.setting.name, str(r.task.parameters), score))
    if sys.stdout.isatty():
        print_table(columns, rows)
    else:
        typer.echo("\n".join(f"{name:44} {parameters:>10} {score:>22}" for name, parameters, score in (columns, *rows)))
