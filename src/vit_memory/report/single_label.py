"""The report of a single-label task: confusion matrix, classes, calibration, mistakes, examples, attention."""

import numpy as np
import torch
from torch import Tensor

from vit_memory.evaluation.inference import Evaluated
from vit_memory.evaluation.metrics import SingleLabelScores
from vit_memory.evaluation.metrics.single_label import NO_ANSWER, predicted_classes
from vit_memory.model import MemoryViT
from vit_memory.report.charts import reliability_chart
from vit_memory.report.elements import (
    Markup,
    bold,
    charts,
    count,
    escape,
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
from vit_memory.report.pictures import NO_PICTURES, Pictures, heat_map_uri

_WHOLE_MATRIX = 12  # up to so many classes, the confusion matrix is shown with all its numbers
_NO_ANSWER = "no answer (NaN)"
_MOST_PIXELS = 400  # of a heat map's side; more classes share pixels


def headline(scores: SingleLabelScores) -> list[tuple[str, str]]:
    """The figures at the top."""
    low, high = scores.interval
    return [
        (percent(scores.accuracy), f"accuracy (95 % interval {100 * low:.1f} to {100 * high:.1f})"),
        (number(scores.images), f"images of {count(len(scores.labels), 'class', 'classes')}"),
        (percent(scores.balanced_accuracy), "balanced accuracy"),
        (f"{scores.macro_f1:.3f}", "macro F1"),
        *([(percent(scores.top5_accuracy), "top-5 accuracy")] if scores.top5_accuracy is not None else []),
        (f"{100 * scores.calibration_error:.1f}", "points of calibration error"),
        *([(number(without), "without an answer (NaN), counted as wrong")] if (without := _unanswered(scores)) else []),
    ]


def _unanswered(scores: SingleLabelScores) -> int:
    return int(scores.no_answer.sum())


def sections(evaluated: Evaluated, shown: Pictures) -> list[Markup]:
    """Everything below the headline."""
    scores = evaluated.scores
    assert isinstance(scores, SingleLabelScores)
    confidence, answers = predicted_classes(evaluated.outputs)
    right = answers == evaluated.targets
    return [
        _confusion(scores),
        _classes(scores),
        _calibration(scores, confidence, right),
        _mistakes(evaluated, shown, confidence, answers, right),
        _examples(evaluated, shown, confidence, answers, right),
        _attention(evaluated, shown, confidence, answers),
    ]


def _confusion(scores: SingleLabelScores) -> Markup:
    most = [[shown, answered, str(times)] for shown, answered, times in scores.most_confused(10)]
    pairs = table(("expected", "predicted", "images"), most, numeric={2}) if most else paragraph("None.")
    if without := _unanswered(scores):
        text = (
            f"{count(without, 'image')} without an answer: the output is NaN or infinite. In no column of the matrix."
        )
        pairs = join([pairs, paragraph(text, style="warning")])
    most_confused = Markup(f"<div>{paragraph(bold('Most confused'))}{pairs}</div>")
    C = len(scores.labels)
    if C <= _WHOLE_MATRIX:
        legend = paragraph("Rows: expected class. Columns: predicted class. Colour: share of the row.", style="soft")
        matrix = _matrix(scores, list(range(C)))
        return section(
            "Confusion matrix", Markup(f'<div class="beside"><div>{legend}{matrix}</div>{most_confused}</div>')
        )
    chosen = _most_confused(scores)
    text = paragraph(
        f"{len(chosen)} of {C} classes: those of the most confused pairs. Rows: expected class. Columns: predicted "
        "class. Colour: share of the row.",
        style="soft",
    )
    beside = Markup(f'<div class="beside">{_heat_map(scores.confusion)}{most_confused}</div>')
    return section("Confusion matrix", beside, *((text, _matrix(scores, chosen)) if chosen else ()))


def _most_confused(scores: SingleLabelScores) -> list[int]:
    """The classes of the most confused pairs, in the order of the task's labels."""
    chosen: set[str] = set()
    for expected, predicted, _ in scores.most_confused(_WHOLE_MATRIX**2):
        if len(chosen | {expected, predicted}) <= _WHOLE_MATRIX:
            chosen |= {expected, predicted}
    return [i for i, label in enumerate(scores.labels) if label in chosen]


def _matrix(scores: SingleLabelScores, chosen: list[int]) -> Markup:
    """A table of counts for the chosen classes."""
    totals = scores.images_per_class.clamp(min=1)
    names = [escape(scores.labels[j]) for j in chosen]
    head = "".join(f'<th class="column" title="{name}"><span>{name}</span></th>' for name in names)
    rows = []
    for i in chosen:
        cells = [_cell(int(scores.confusion[i, j]), float(scores.confusion[i, j] / totals[i]), i == j) for j in chosen]
        label = escape(scores.labels[i])
        rows.append(f'<tr><th class="row" title="{label}">{label}</th>{"".join(cells)}</tr>')
    body = "\n".join(rows)
    return Markup(
        f'<div class="wide"><table class="confusion"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>\n"
    )


def _cell(images: int, share: float, diagonal: bool) -> str:
    names = ["strong"] * (share > 0.55) + ["zero"] * (images == 0) + ["right"] * diagonal
    colour = f' style="background:rgba(0,114,178,{0.08 + 0.92 * share:.2f})"' if images else ""
    return f'<td class="{" ".join(names)}"{colour}>{images}</td>'


def _heat_map(confusion: Tensor) -> Markup:
    """All classes as one picture, a pixel for a pair of them, or for several neighbours where there are many."""
    C = len(confusion)
    step = -(-C // _MOST_PIXELS)
    side = -(-C // step)
    counts = np.zeros((side * step, side * step))
    counts[:C, :C] = confusion.numpy()
    summed = counts.reshape(side, step, side, step).sum((1, 3))
    shares = summed / np.maximum(summed.sum(1, keepdims=True), 1)
    text = f"All {C} classes in the order of the task's labels: rows expected, columns predicted. Strong colour: often."
    image = f'<img src="{heat_map_uri(shares)}" alt="{escape(text)}">'
    return Markup(f'<figure class="heatmap"><div>{image}</div><figcaption>{escape(text)}</figcaption></figure>')


def _classes(scores: SingleLabelScores) -> Markup:
    ordered = sorted(scores.per_class().items(), key=lambda item: (item[1]["recall"] is None, item[1]["recall"] or 0.0))
    rows = [
        [label, str(row["images"]), share_cell(row["recall"]), share_cell(row["precision"])] for label, row in ordered
    ]
    text = paragraph(
        "Lowest recall first. Recall: of the images of a class, the share predicted as it. Precision: of the images "
        "predicted as a class, the share that show it.",
        style="soft",
    )
    return section(
        "Classes", text, table(("class", "images", "recall, %", "precision, %"), rows, {1, 2, 3}, more="classes")
    )


def _calibration(scores: SingleLabelScores, confidence: Tensor, right: Tensor) -> Markup:
    mean, accuracy = float(confidence.mean()), float(right.double().mean())
    tendency = "more confident than accurate" if mean > accuracy else "less confident than accurate"
    if abs(mean - accuracy) < 0.02:
        tendency = "about as confident as accurate"
    text = (
        f"Mean confidence is {percent(mean)} and accuracy {percent(accuracy)}: on average the task is {tendency}. "
        f"Calibration error: {100 * scores.calibration_error:.1f} points, the mean distance between the bars and the "
        f"dashed line, weighted by the number of images."
    )
    return section("Calibration", charts([(reliability_chart(confidence, right), text)]))


def _caption(evaluated: Evaluated, i: int, answer: int, confidence: float) -> Markup:
    """Expected and predicted label of one image."""
    labels, target = evaluated.task.labels, int(evaluated.targets[i])
    if answer == target:
        return join([Markup('<span class="yes">✓</span> '), bold(labels[answer]), f" {100 * confidence:.0f}\u00a0%"])
    shown = [_NO_ANSWER] if answer == NO_ANSWER else [bold(labels[answer]), f" {100 * confidence:.0f}\u00a0%"]
    return join([Markup('<span class="no">✗</span> '), *shown, Markup("<br>"), f"expected {labels[target]}"])


def _figures(
    evaluated: Evaluated, shown: Pictures, chosen: list[int], confidence: Tensor, answers: Tensor
) -> list[Markup]:
    figures = []
    for i in chosen:
        place = int(evaluated.indices[i])
        caption = _caption(evaluated, i, int(answers[i]), float(confidence[i]))
        figures.append(picture(shown.uri(place), caption, shown.name(place)))
    return figures


def _mistakes(evaluated: Evaluated, shown: Pictures, confidence: Tensor, answers: Tensor, right: Tensor) -> Markup:
    wrong = (~right).nonzero()[:, 0]
    order = confidence[wrong].argsort(descending=True, stable=True)[: shown.per_section]
    chosen = wrong[order].tolist()
    title = "Most confident mistakes"
    if not chosen:
        return section(title, paragraph("None: every image was predicted right." if not len(wrong) else NO_PICTURES))
    text = f"{len(chosen)} of {count(len(wrong), 'mistake')}, the most confident first."
    return section(
        title, paragraph(text, style="soft"), pictures(_figures(evaluated, shown, chosen, confidence, answers))
    )


def _examples(evaluated: Evaluated, shown: Pictures, confidence: Tensor, answers: Tensor, right: Tensor) -> Markup:
    hits = right.nonzero()[:, 0]
    chosen = shown.choose(hits)
    title = "Right predictions"
    if not chosen:
        return section(title, paragraph("None: no image was predicted right." if not len(hits) else NO_PICTURES))
    text = f"{len(chosen)} of {count(len(hits), 'right prediction')}, drawn at random."
    return section(
        title, paragraph(text, style="soft"), pictures(_figures(evaluated, shown, chosen, confidence, answers))
    )


def _attention(evaluated: Evaluated, shown: Pictures, confidence: Tensor, answers: Tensor) -> Markup:
    title, task = "Attention of the class token", evaluated.task
    if task.regime == "head":
        return section(
            title, paragraph("Not shown: a task of regime head has no class token of its own, only a linear head.")
        )
    if not isinstance(shown.model, MemoryViT):
        text = (
            f"Not shown: a task of regime {task.regime} changes the backbone's own output and has no separate readout."
        )
        return section(title, paragraph(text))
    present = torch.unique(evaluated.targets).tolist()
    figures = []
    for label in sorted(shown.choose(present)):
        i = _one_of((evaluated.targets == label).nonzero()[:, 0])
        place = int(evaluated.indices[i])
        caption = join(
            [
                bold(task.labels[label]),
                Markup("<br>"),
                "predicted ",
                _caption_short(task.labels, answers, i, confidence),
            ]
        )
        figures.append(picture(shown.uri(place), caption, shown.name(place), shown.attention_uri(place, task.name)))
    if not figures:
        return section(title, paragraph(NO_PICTURES))
    which = "one image of every class" if len(figures) == len(present) else f"one image of {len(figures)} classes"
    text = (
        f"Where the task's class token attends in the last block, mean over heads: {which}, drawn at random. Bright is "
        "more attention, relative to the brightest patch of the image. Attention shows what was read, not why."
    )
    return section(title, paragraph(text, style="soft"), pictures(figures, "pairs"))


def _caption_short(labels: tuple[str, ...], answers: Tensor, i: int, confidence: Tensor) -> str:
    answer = int(answers[i])
    return _NO_ANSWER if answer == NO_ANSWER else f"{labels[answer]} ({100 * float(confidence[i]):.0f}\u00a0%)"


def _one_of(places: Tensor) -> int:
    """One of these, drawn with a fixed seed."""
    return int(places[int(torch.randint(len(places), (), generator=torch.Generator().manual_seed(0)))])
