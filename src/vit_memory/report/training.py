"""The training in a report: curves, and the table of settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vit_memory.branch import Branch
from vit_memory.report.elements import Markup, charts, number, paragraph, section, table
from vit_memory.training.chart_style import as_svg
from vit_memory.training.curves import Curve, caption, curve_figure
from vit_memory.training.results import FitResult


@dataclass(frozen=True, slots=True, eq=False)
class TrainingResult:
    """What a run left behind."""

    fit: FitResult
    curves: Sequence[Curve]  # in the order of its settings

    @property
    def branch(self) -> Branch | None:
        """The branch that was trained with the best task or tasks."""
        return self.fit.best.branch


def training_sections(training: TrainingResult) -> list[Markup]:
    """Curves and settings."""
    return [_curves(training), _settings(training.fit)]


def _curves(training: TrainingResult) -> Markup:
    curves, metric = training.curves, training.fit.metric
    if all(len(curve.scores) < 2 for curve in curves):
        return section("Training", paragraph("Evaluated once, at the end: there are no curves to draw.", style="soft"))
    best = caption(curves)
    loss = as_svg(curve_figure(curves, None), f"Training loss of {len(curves)} settings by step. {best}")
    score = as_svg(curve_figure(curves, metric), f"Validation {metric} of {len(curves)} settings by step. {best}")
    return section("Training", charts([(Markup(loss), ""), (Markup(score), "")]), paragraph(best, style="soft"))


def _settings(result: FitResult) -> Markup:
    ordered = sorted(result.settings, key=lambda one: (one is not result.best, -_score(one.score)))
    rows = []
    for one in ordered:
        percents = result.metric.endswith("accuracy")
        score = f"diverged at step {one.stopped_at}" if one.score is None else f"{one.score:.3f}"
        if one.score is not None and percents:
            score = f"{100 * one.score:.1f} %"
        rows.append([one.setting.name, number(one.parameters), score])
    reported = "tasks that are" if len(result.best.tasks) > 1 else "task that is"
    text = paragraph(f"Best first. The setting in bold is that of the {reported} reported here.", style="soft")
    titles = ("setting", "parameters", f"validation {result.metric}")
    return section("Settings", text, table(titles, rows, {1, 2}, bold_row=0, more="settings"))


def _score(score: float | None) -> float:
    return -math.inf if score is None else score
