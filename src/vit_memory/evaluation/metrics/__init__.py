"""Scores of a task on labelled images, by its kind, each with an interval.

single-label   accuracy, balanced accuracy, macro F1, precision and recall per class, confusion matrix, calibration
multi-label    mAP, F1, precision and recall per label and over all, subset accuracy
regression     MAE, RMSE and R² per value

A target that is NaN is unknown and left out. An output that is NaN is no answer: it is wrong for every class.

To add a metric: one field or property of the scores of its kind, in `single_label`, `multi_label` or `regression`, its
key in `as_json` of the same class, a line in `vit_memory.cli.score_pages`, which prints it, and a line in the module of
its kind in `vit_memory.report`, which shows it.
"""

import logging

from torch import Tensor

from vit_memory.evaluation.metrics.multi_label import MultiLabelScores, score_multi_label
from vit_memory.evaluation.metrics.regression import RegressionScores, score_regression
from vit_memory.evaluation.metrics.single_label import SingleLabelScores, score_single_label
from vit_memory.task import Task

__all__ = ["AnyScores", "MultiLabelScores", "RegressionScores", "SingleLabelScores", "score_task"]

log = logging.getLogger(__name__)
AnyScores = SingleLabelScores | MultiLabelScores | RegressionScores


def score_task(task: Task, outputs: Tensor, targets: Tensor) -> AnyScores:
    """Score the outputs (n, C) of a task by its kind. Targets are in the order of the task's labels.

    A broken task is named in the log; an image for which it gives NaN has no answer, which is wrong.
    """
    broken = int((~outputs.isfinite()).any(-1).sum())
    if broken:
        log.warning("task %s: its output is NaN or infinite for %d of %d images", task.name, broken, len(outputs))
    if task.kind == "regression":
        return score_regression(outputs, targets, task.labels)
    if task.kind == "multi-label":
        return score_multi_label(outputs, targets, task.labels, task.thresholds)
    return score_single_label(outputs, targets, task.labels)
