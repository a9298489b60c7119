"""The first screen: what was found, in sentences whose numbers come from the records."""

from collections.abc import Iterator

import numpy as np

from vit_memory.evaluation.statistics import Difference
from vit_memory.report.document import Section
from vit_memory.report.experiments.accuracy import OWN_PASS, ladder_of
from vit_memory.report.experiments.evidence import Comparison, Evidence, points
from vit_memory.report.experiments.together import NAIVE


def summary_section(evidence: Evidence) -> Section:
    """Order of the methods, masked against the others, concatenation, forgetting."""
    comparison = evidence.trainings()
    return Section("What was found", tuple(_sentences(evidence, comparison)))


def _sentences(evidence: Evidence, comparison: Comparison) -> Iterator[str]:
    ladder = ladder_of(comparison)
    steps = list(zip(ladder[1:], ladder, strict=False))
    if steps:
        yield f"On the mean over datasets, {'; '.join(_step(comparison, a, b) for a, b in steps)}."
    for other in OWN_PASS:
        found = [
            _against(method, other, gap)
            for method in ladder[2:]
            if (gap := comparison.difference(method, other)) is not None
        ]
        if found:
            yield f"Against {_WORDS[other]}: {'; '.join(found)}."
    yield from _together(evidence)


_WORDS = {
    "5 cells, unmasked": "unmasked memory, which changes every other answer",
    "LoRA": "LoRA on all blocks, which needs a pass per task",
    "full": "full fine-tuning, which needs a model per task",
}


def _step(comparison: Comparison, method: str, below: str) -> str:
    gap = comparison.difference(method, below)
    if gap is None:
        return f"{method} and {below} were not trained on the same images"
    verdict = "is not told apart from"
    if gap.interval.excludes_zero:
        verdict = "is above" if gap.interval.mean > 0 else "is below"
    return f"{method} {verdict} {below}: {points(gap.interval)} points"


def _against(method: str, other: str, gap: Difference) -> str:
    return f"{method} {points(gap.interval)} points ({len(gap.datasets)} datasets, {gap.pairs} pairs of trainings)"


def _together(evidence: Evidence) -> Iterator[str]:
    records = evidence.of_kind("concatenation")
    masked = [record for record in records if record.identity["method"] != NAIVE]
    naive = [record for record in records if record.identity["method"] == NAIVE]
    if masked:
        rows = [row for record in masked for row in record.result["datasets"].values()]
        worst, others = max(row["largest_difference"] for row in rows), sum(row["other_answers"] for row in rows)
        images = sum(row["test_images"] for row in rows)
        identical = all(record.result["original_identical"] for record in masked)
        yield (
            f"Put together, our tasks answer as they do alone: the largest difference of a logit is {worst:.1e}, and "
            f"{others} of {images} answers changed. The original output {'is' if identical else 'is NOT'} the "
            f"library's own to the bit."
        )
    if naive:
        alone, together = (
            100 * float(np.mean([row[key] for record in naive for row in record.result["datasets"].values()]))
            for key in ("alone", "together")
        )
        yield f"Without a mask, tasks put together fall from {alone:.1f} % to {together:.1f} % on the mean."
    for record in evidence.of_kind("continual"):
        order, after = record.result["order"], record.result["after"]
        start, end = (100 * after[i][order[0]]["test"] for i in (0, -1))
        if record.identity["method"] == "full":
            yield (
                f"Fine-tuned on {len(order)} datasets in turn, a whole backbone falls from {start:.1f} % to {end:.1f} "
                f"% on the first of them; with memory and readers nothing is forgotten."
            )
