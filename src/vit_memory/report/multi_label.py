"""The report of a multi-label task: labels with their thresholds, precision and recall, mistakes, examples."""

import math

import torch
from torch import Tensor

from vit_memory.evaluation.inference import Evaluated
from vit_memory.evaluation.metrics import MultiLabelScores
from vit_memory.predictions import DEFAULT_THRESHOLD
from vit_memory.report.charts import precision_recall_chart
from vit_memory.report.elements import (
    Markup,
    bold,
    charts,
    count,
    join,
    number,
    paragraph,
    percent,
    picture,
    pictures,
    section,
    share_cell,
    table,
)
from vit_memory.report.pictures import NO_PICTURES, Pictures

_MOST_LABELS = 6  # of one image in a caption


def headline(scores: MultiLabelScores) -> list[tuple[str, str]]:
    """The figures at the top."""
    low, high = scores.interval
    pairs = [
        (_figure(scores.mean_average_precision), f"mAP (95 % interval {_figure(low)} to {_figure(high)})"),
        (number(scores.images), f"images with {count(len(scores.per_label), 'label')}"),
        (f"{scores.micro_f1:.3f}", "F1 over all labels (micro)"),
        (_figure(scores.macro_f1), "mean F1 of the labels (macro)"),
    ]
    if scores.subset_accuracy is not None:
        pairs.append((percent(scores.subset_accuracy), "of the images with every label right"))
    return pairs


def sections(evaluated: Evaluated, shown: Pictures) -> list[Markup]:
    """Everything below the headline."""
    task, targets = evaluated.task, evaluated.targets
    probabilities = evaluated.outputs.double().sigmoid()
    thresholds = torch.tensor(task.thresholds or (DEFAULT_THRESHOLD,) * len(task.labels), dtype=torch.float64)
    present = probabilities >= thresholds
    known = targets.isfinite()
    wrong = (present != (targets == 1)) & known
    # How sure of its wrong answer: the probability of a label that is not there, or of the absence of one that is.
    sureness = torch.where(present, probabilities, 1 - probabilities).masked_fill(~wrong, -1).max(1).values
    return [
        _labels(evaluated, thresholds),
        _precision_recall(present, probabilities, targets),
        _mistakes(evaluated, shown, probabilities, present, sureness),
        _examples(evaluated, shown, probabilities, present, wrong),
    ]


def _labels(evaluated: Evaluated, thresholds: Tensor) -> Markup:
    scores = evaluated.scores
    assert isinstance(scores, MultiLabelScores)
    places = {label: i for i, label in enumerate(evaluated.task.labels)}
    ordered = sorted(
        scores.per_label.items(), key=lambda item: (item[1].average_precision is None, item[1].average_precision or 0.0)
    )
    rows = [
        [
            label,
            str(one.images),
            share_cell(one.average_precision),
            share_cell(one.f1),
            share_cell(one.precision),
            share_cell(one.recall),
            f"{float(thresholds[places[label]]):.2f}",
        ]
        for label, one in ordered
    ]
    chosen = "chosen on the validation images" if evaluated.task.thresholds else f"{DEFAULT_THRESHOLD} for every label"
    text = paragraph(
        "Lowest average precision (AP) first, in per cent. A label counts as present from its threshold on "
        f"({chosen}); F1, precision and recall depend on it, AP does not.",
        style="soft",
    )
    titles = ("label", "images", "AP", "F1", "precision", "recall", "threshold")
    return section("Labels", text, table(titles, rows, {1, 2, 3, 4, 5, 6}, more="labels"))


def _precision_recall(present: Tensor, probabilities: Tensor, targets: Tensor) -> Markup:
    known = targets.isfinite()
    shown, answered = (targets == 1) & known, present & known
    hits = float((shown & answered).sum())
    precision, recall = hits / max(1, int(answered.sum())), hits / max(1, int(shown.sum()))
    text = (
        f"At the thresholds, {percent(precision)} of the predicted labels are right (precision) and "
        f"{percent(recall)} of the labels of the images are predicted (recall)."
    )
    return section(
        "Precision and recall", charts([(precision_recall_chart(probabilities, targets, (recall, precision)), text)])
    )


def _mistakes(
    evaluated: Evaluated, shown: Pictures, probabilities: Tensor, present: Tensor, sureness: Tensor
) -> Markup:
    wrong = int((sureness >= 0).sum())
    chosen = sureness.argsort(descending=True, stable=True)[: min(wrong, shown.per_section)].tolist()
    if not chosen:
        return section(
            "Most confident mistakes",
            paragraph(NO_PICTURES if wrong else "None: every known label was predicted right."),
        )
    text = f"{len(chosen)} of {count(wrong, 'image')} with a wrong or missing label, the most confident first."
    figures = [_figure_of(evaluated, shown, i, probabilities, present) for i in chosen]
    return section("Most confident mistakes", paragraph(text, style="soft"), pictures(figures))


def _examples(evaluated: Evaluated, shown: Pictures, probabilities: Tensor, present: Tensor, wrong: Tensor) -> Markup:
    hits = (~wrong.any(1)).nonzero()[:, 0]
    chosen = shown.choose(hits)
    if not chosen:
        return section(
            "Right predictions", paragraph(NO_PICTURES if len(hits) else "None: no image has every label right.")
        )
    text = f"{len(chosen)} of {count(len(hits), 'image')} with every known label right, drawn at random."
    figures = [_figure_of(evaluated, shown, i, probabilities, present) for i in chosen]
    return section("Right predictions", paragraph(text, style="soft"), pictures(figures))


def _figure_of(evaluated: Evaluated, shown: Pictures, i: int, probabilities: Tensor, present: Tensor) -> Markup:
    """One image: right, wrong and missing labels, most probable first."""
    labels, place = evaluated.task.labels, int(evaluated.indices[i])
    marks = {"right": ("yes", "✓", ""), "wrong": ("no", "✗", ", not there"), "missing": ("no", "✗", ", missing")}
    lines = []
    for j in probabilities[i].argsort(descending=True).tolist():
        target = float(evaluated.targets[i, j])
        if math.isnan(target) or not (present[i, j] or target == 1):
            continue
        verdict = "missing" if not present[i, j] else "right" if target == 1 else "wrong"
        style, sign, remark = marks[verdict]
        name = labels[j] if verdict == "missing" else bold(labels[j])
        mark = Markup(f'<span class="{style}">{sign}</span> ')
        lines.append(join([mark, name, f" {100 * float(probabilities[i, j]):.0f}\u00a0%{remark}", Markup("<br>")]))
    if len(lines) > _MOST_LABELS:
        lines = [*lines[:_MOST_LABELS], join([f"… and {len(lines) - _MOST_LABELS} more"])]
    return picture(shown.uri(place), join(lines or ["no labels, and none predicted"]), shown.name(place))


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"
