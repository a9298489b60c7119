"""Scores of one task as text: what `vit-memory evaluate` prints, by the kind of the task."""

from typing import TYPE_CHECKING

from vit_memory.cli.data import SHOWN_CLASSES

if TYPE_CHECKING:
    from vit_memory.evaluation.metrics import AnyScores, MultiLabelScores, RegressionScores, SingleLabelScores


def page(name: str, scores: "AnyScores") -> str:
    """The scores of one task."""
    from vit_memory.evaluation.metrics import MultiLabelScores, RegressionScores

    if isinstance(scores, MultiLabelScores):
        return "\n".join(_multi_label_lines(name, scores))
    if isinstance(scores, RegressionScores):
        return "\n".join(_regression_lines(name, scores))
    return "\n".join(_single_label_lines(name, scores))


def _single_label_lines(name: str, scores: "SingleLabelScores") -> list[str]:
    low, high = (100 * end for end in scores.interval)
    lines = [f"{name}: accuracy {100 * scores.accuracy:.1f} % (95 % interval {low:.1f} to {high:.1f})"]
    if scores.top5_accuracy is not None:
        lines.append(f"  top-5 accuracy         {100 * scores.top5_accuracy:.1f} %")
    lines.append(f"  balanced accuracy      {100 * scores.balanced_accuracy:.1f} %")
    lines.append(f"  macro F1               {scores.macro_f1:.3f}")
    lines.append(f"  calibration error      {100 * scores.calibration_error:.1f} percentage points")
    recalls = sorted((row["recall"], label) for label, row in scores.per_class().items() if row["recall"] is not None)
    lowest = ", ".join(f"{label} ({100 * recall:.0f} %)" for recall, label in recalls[:3])
    lines.append(f"  lowest recall          {lowest}")
    confused = ", ".join(f"{true} as {predicted} ({count})" for true, predicted, count in scores.most_confused(3))
    if confused:
        lines.append(f"  most confused          {confused}")
    if without := int(scores.no_answer.sum()):
        lines.append(f"  no answer (NaN)        {without} image{'s' * (without > 1)}, counted as wrong")
    return lines


def _multi_label_lines(name: str, scores: "MultiLabelScores") -> list[str]:
    low, high = scores.interval
    lines = [f"{name}: mAP {scores.mean_average_precision:.3f} (95 % interval {low:.3f} to {high:.3f})"]
    lines.append(f"  micro F1               {scores.micro_f1:.3f}")
    lines.append(f"  macro F1               {scores.macro_f1:.3f}")
    if scores.subset_accuracy is not None:
        lines.append(f"  subset accuracy        {100 * scores.subset_accuracy:.1f} %")
    titles = ("images", "AP", "precision", "recall", "F1")
    lines.append(f"  {'label':28}" + "".join(f"{title:>10}" for title in titles))
    frequent_first = sorted(scores.per_label.items(), key=lambda item: -item[1].images)
    for label, one in frequent_first[:SHOWN_CLASSES]:
        cells = (one.average_precision, one.precision, one.recall, one.f1)
        shown = ["-" if cell is None else f"{cell:.3f}" for cell in cells]
        lines.append(f"  {label[:27]:28}{one.images:10}" + "".join(f"{cell:>10}" for cell in shown))
    if len(frequent_first) > SHOWN_CLASSES:
        lines.append(f"  … and {len(frequent_first) - SHOWN_CLASSES} more (--json lists all)")
    return lines


def _regression_lines(name: str, scores: "RegressionScores") -> list[str]:
    lines = [f"{name}: R² {scores.r2:.3f}"]
    for label, one in scores.per_value.items():
        lines.append(f"  {label}, {one.images} images")
        lines += [
            f"    {title:6}{value:10.4g}  (95 % interval {low:.4g} to {high:.4g})"
            for title, value, (low, high) in (
                ("R²", one.r2, one.r2_interval),
                ("MAE", one.mae, one.mae_interval),
                ("RMSE", one.rmse, one.rmse_interval),
            )
        ]
    return lines
