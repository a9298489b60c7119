"""The first screen: what was found."""

from collections.abc import Iterator, Sequence

import numpy as np

from vit_memory.evaluation.reproduce.records import Record
from vit_memory.report.document import Section, Table
from vit_memory.report.experiments.accuracy import (
    OWN_PASS,
    UNMASKED,
    ladder_of,
    main_comparison,
    masked_counterpart,
)
from vit_memory.report.experiments.evidence import Comparison, Evidence, points
from vit_memory.report.experiments.together import NAIVE, forgotten

_WORDS = {
    UNMASKED: "unmasked memory, which changes every other answer",
    "LoRA": "LoRA on all blocks, which needs a pass per task",
    "full": "full fine-tuning, which needs a model per task",
}


def summary_section(evidence: Evidence) -> Section:
    """Order of the methods, masked against the others, concatenation, forgetting."""
    comparison = main_comparison(evidence)
    ladder = ladder_of(comparison)
    composable = [method for method in ladder if method not in ("head", "class")]
    steps = [row for method, below in zip(ladder[1:], ladder, strict=False) if (row := _row(comparison, method, below))]
    beside = [
        row
        for other in OWN_PASS
        for method in ([masked_counterpart(comparison)] if other == UNMASKED else composable)
        if (row := _row(comparison, method, other))
    ]
    parts: list[str | Table] = []
    titles = ("method", "points", "against", "verdict", "pairs")
    note = (
        "Points: difference of the mean test accuracies on the same images and seeds, with its 95 % interval. Higher "
        "or lower: the interval excludes zero; not corrected for the number of comparisons."
    )
    if steps:
        table = Table(titles, tuple(steps), f"{note} {comparison.note(ladder)}")
        parts += ["Each step, from the smallest to the largest, against the one before:", table]
    if beside:
        compared = list(dict.fromkeys(name for method, _, other, *_ in beside for name in (method, other)))
        others = [f"{_WORDS[name]} ({comparison.steps(name)} steps)" for name in OWN_PASS if comparison.of(name)]
        parts += [f"Our methods against {'; '.join(others)}:", Table(titles, tuple(beside), comparison.note(compared))]
    return Section("What was found", (*parts, *_together(evidence)))


def _row(comparison: Comparison, method: str, other: str) -> tuple[str, ...] | None:
    """A method against another; None if they were not trained on the same images."""
    gap = comparison.difference(method, other)
    if gap is None:
        return None
    count, verdict = len(gap.datasets), "no significant difference"
    if gap.interval.excludes_zero:
        verdict = "higher" if gap.interval.mean > 0 else "lower"
    return method, points(gap.interval), other, verdict, f"{gap.pairs} on {count} dataset{'s' * (count != 1)}"


def _together(evidence: Evidence) -> Iterator[str]:
    records = evidence.together("concatenation")
    masked = [record for record in records if record.identity["method"] != NAIVE]
    naive = [record for record in records if record.identity["method"] == NAIVE]
    if masked:
        rows = [row for record in masked for row in record.result["datasets"].values()]
        worst, others = max(row["largest_difference"] for row in rows), sum(row["other_answers"] for row in rows)
        images = sum(row["test_images"] for row in rows)
        identical = all(record.result["original_identical"] for record in masked)
        yield (
            f"Put together, the largest difference of a logit of our tasks from what they answer alone is {worst:.1e}, "
            f"and {others} of {images} answers changed. The original output {'is' if identical else 'is NOT'} the "
            f"library's own to the bit."
        )
    if naive:
        alone, together = (
            100 * float(np.mean([row[key] for record in naive for row in record.result["datasets"].values()]))
            for key in ("alone", "together")
        )
        yield f"Without a mask, tasks have {alone:.1f} % alone and {together:.1f} % put together, on the mean."
    arrived = evidence.together("continual")
    if arrived and len(arrived[0].result["order"]) > 1:
        changes = [f"{method} {forgotten(arrived, method):+.1f}" for method in _methods(arrived)]
        yield (
            f"After {len(arrived[0].result['order'])} tasks arrived one after another, the accuracy on those before "
            f"the last differs from that at their arrival by, in points: {'; '.join(changes)}."
        )


def _methods(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.identity["method"] for record in records))
