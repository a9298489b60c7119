"""Sections about accuracy: the ladder of methods, every dataset, few images, ablations, architectures."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from vit_memory.evaluation.reproduce.ablations import CELLS
from vit_memory.evaluation.reproduce.methods import PAPER_TABLE2, SHORT, cells
from vit_memory.report.document import Chart, Section, Table
from vit_memory.report.experiments.charts import interval_chart, line_chart, scatter_chart
from vit_memory.report.experiments.evidence import Comparison, Evidence, amount, percent, points

# From the smallest change of the backbone's answer to the largest; the first group answers in one pass for all tasks.
ORDER = (
    "head",
    "class",
    "1 cell",
    "2 cells",
    "5 cells",
    "10 cells",
    "20 cells",
    "50 cells",
    "gains",
    "rank 8",
    "rank 8 + gains",
    "rank 8 + gains + patches",
    "branch of 1 block",
    "branch of 2 blocks",
    "branch of 3 blocks",
    "branch of 4 blocks",
    "branch of 6 blocks",
    "branch of 12 blocks",
    SHORT.name,
    "5 cells, unmasked",
    "LoRA",
    "full",
)
LADDER = ("head", "class", "5 cells", "rank 8 + gains")  # then the branches of half and of all blocks
UNMASKED = "5 cells, unmasked"
OWN_PASS = (UNMASKED, "LoRA", "full")
_ABLATIONS = ("random class token", "after the norm", "half of the blocks", "propagated", "additive")


def is_ablation(method: str) -> bool:
    """Whether a method is only of interest among the ablations."""
    return any(word in method for word in _ABLATIONS) or method in ("2 cells", "50 cells")


def ladder_of(comparison: Comparison) -> list[str]:
    """The steps that were trained: head, class, memory, learned reader, branches of half and of all blocks."""
    branches = [name for name in comparison.methods(ORDER) if name.startswith("branch")]
    return [name for name in (*LADDER, *branches[-2:]) if comparison.of(name)]


def main_comparison(evidence: Evidence) -> Comparison:
    """Trainings with all images, on the datasets that every step below the branches was trained on.

    Other experiments train some of the steps on datasets of their own, which would count in some differences only.
    """
    every = evidence.trainings()
    steps = [name for name in LADDER if every.of(name)]
    return every.on(every.shared_datasets(steps) or every.datasets())


def main_sections(evidence: Evidence, paper: bool) -> Iterator[Section]:
    """Accuracy of all methods: means, differences, every dataset, charts."""
    comparison = main_comparison(evidence)
    methods = [name for name in comparison.methods(ORDER) if not is_ablation(name)]
    if not methods:
        return
    yield _means(comparison, methods)
    yield _by_dataset(comparison, methods, paper)
    timing = next(iter(evidence.of_kind("timing")), None)
    yield _charts(comparison, methods, None if timing is None else timing.result)


def _means(comparison: Comparison, methods: Sequence[str]) -> Section:
    ladder, datasets = ladder_of(comparison), comparison.datasets()
    means = {name: interval for name in methods if (interval := comparison.accuracy(name, datasets)) is not None}
    rows = []
    for name, mean in means.items():
        step = ladder.index(name) if name in ladder else 0
        above = comparison.difference(name, ladder[step - 1]) if step else None
        to_memory = comparison.difference(name, "5 cells") if name != "5 cells" else None
        rows.append(
            (
                name,
                percent(mean),
                "" if above is None else points(above.interval),
                "" if to_memory is None else points(to_memory.interval),
                _passes(name),
                amount(comparison.parameters(name)),
                f"{comparison.steps(name)}, {comparison.seeds(name)}",
            )
        )
    if not means:
        return Section("Accuracy of every method", (f"No method was trained on all of {', '.join(datasets)}.",))
    compared = ("accuracy, %", "minus step before", "minus 5 cells")
    titles = ("method", *compared, "passes, T tasks", "parameters", "steps, seeds")
    return Section(
        "Accuracy of every method",
        (
            f"Mean test accuracy over {', '.join(datasets)}, with 95 % bootstrap intervals over seeds and test images "
            f"(with one seed, over test images only); differences on the same images and seeds. The steps are "
            f"{', '.join(ladder)}.",
            Table(titles, tuple(rows), comparison.note(list(means))),
            Chart(interval_chart("Mean test accuracy", means), f"Means of the table above; {len(datasets)} datasets."),
        ),
    )


def _passes(method: str) -> str:
    if method in OWN_PASS or "unmasked" in method:
        return "T"
    if method.startswith("branch of "):
        return f"1 + {method.split()[2]} blocks"
    return "1"


def _by_dataset(comparison: Comparison, methods: Sequence[str], paper: bool) -> Section:
    datasets = comparison.datasets()
    rows = []
    for name in methods:
        own = [percent(comparison.accuracy(name, [dataset])) for dataset in datasets]
        rows.append((name, *own))
        published = [PAPER_TABLE2.get(dataset, {}).get(name) for dataset in datasets]
        if paper and any(published):
            rows.append((f"{name}, the paper", *("–" if value is None else f"{value:.1f}" for value in published)))
    return Section(
        "Every dataset",
        (
            "Test accuracy in per cent, mean over seeds, with 95 % intervals.",
            Table(("method", *datasets), tuple(rows), comparison.note(list(methods))),
        ),
    )


def _charts(comparison: Comparison, methods: Sequence[str], timing: Mapping[str, Any] | None) -> Section:
    datasets = comparison.datasets()
    means = {name: interval for name in methods if (interval := comparison.accuracy(name, datasets)) is not None}
    if not means:
        return Section("Size and speed of learning", ())
    sizes = {name: comparison.mean_parameters(name) for name in means}
    dots = {name: (sizes[name], 100 * means[name].mean) for name in means}
    parts: list[Chart] = [
        Chart(
            scatter_chart("Accuracy by trained parameters", "parameters", "test accuracy, %", dots),
            "Mean test accuracy over the datasets by the number of trained parameters (mean over datasets).",
        )
    ]
    if timing is not None:
        seconds = {name: comparison.training_seconds(name, timing) for name in means}
        times = {name: (value, dots[name][1]) for name, value in seconds.items() if value is not None}
        parts.append(
            Chart(
                scatter_chart("Accuracy by training time", "seconds", "test accuracy, %", times),
                "Mean test accuracy by the seconds of one training (mean over datasets), estimated from a short timing "
                "of a pass and of a step. Methods that share the backbone's pass: the pass over all views, once, and "
                "the reading of one setting with 5 cells.",
            )
        )
    shown = [name for name in (*ladder_of(comparison), *OWN_PASS) if name in means]
    curves = {name: curve for name in shown if (curve := comparison.curve(name, datasets)) is not None}
    if curves:
        lines = {name: (steps, [100 * v for v in values]) for name, (steps, values) in curves.items()}
        parts.append(
            Chart(
                line_chart("Learning curves", "step", "validation accuracy, %", lines),
                "Validation accuracy by step, mean over datasets and seeds, at the learning rate that was chosen.",
            )
        )
    return Section("Size and speed of learning", parts)


def fewshot_section(evidence: Evidence) -> Section | None:
    """Accuracy by training images per class."""
    sizes = sorted({r.identity["per_class"] for r in evidence.of_kind("training") if r.identity["per_class"]})
    if len(sizes) < 2:
        return None
    by_size = {size: evidence.trainings(size) for size in sizes}
    smallest = by_size[sizes[0]]
    methods = smallest.methods(ORDER)
    datasets = smallest.shared_datasets(methods)
    table, lines = [], {}
    for name in methods:
        seeds = {record.identity["seed"] for record in smallest.of(name)}
        intervals = {size: by_size[size].with_seeds(seeds).accuracy(name, datasets) for size in sizes}
        table.append((name, *(percent(interval) for interval in intervals.values())))
        known = [(size, 100 * interval.mean) for size, interval in intervals.items() if interval is not None]
        lines[name] = ([float(size) for size, _ in known], [value for _, value in known])
    chart = line_chart(
        "Accuracy by images per class", "training images per class", "test accuracy, %", lines, log_x=True, ticks=sizes
    )
    return Section(
        "Few images",
        (
            f"Mean test accuracy over {', '.join(datasets)} by the number of training images per class. The learning "
            f"rate of a method is the one that was chosen with all images, and its best evaluation is chosen on the "
            f"same validation images for every number. All numbers of a line have the seeds that its smallest has.",
            Table(("method", *(str(size) for size in sizes)), tuple(table), smallest.on(datasets).note(methods)),
            Chart(chart, "Mean test accuracy over the datasets; the number of images is logarithmic."),
        ),
    )


def masked_counterpart(comparison: Comparison) -> str:
    """Masked memory with as many steps as unmasked memory, which has fewer where its own pass would take too long."""
    return SHORT.name if comparison.of(SHORT.name) else "5 cells"


def ablation_section(evidence: Evidence) -> Section | None:
    """Variants of memory against five cells, and the number of cells."""
    comparison = evidence.trainings()
    variants = [name for name in comparison.methods() if is_ablation(name) and "cells," in name]
    if not variants or not comparison.of("5 cells"):
        return None
    shown = ["5 cells", *variants, *(name for name in (SHORT.name, UNMASKED) if comparison.of(name))]
    comparison = comparison.on(comparison.shared_datasets(shown) or comparison.datasets())
    rows = []
    for name in shown:
        other = _counterpart(comparison, name)
        against = comparison.difference(name, other) if name != other else None
        rows.append(
            (
                name,
                comparison.steps(name),
                str(comparison.seeds(name)),
                percent(comparison.accuracy(name)),
                "" if against is None else points(against.interval),
                "" if against is None else other,
            )
        )
    parts: list[str | Table | Chart] = [
        f"Mean test accuracy over {', '.join(comparison.datasets())}.",
        Table(
            ("memory", "steps", "seeds", "accuracy, %", "difference", "against"), tuple(rows), comparison.note(shown)
        ),
    ]
    sizes = [(0, "class"), *((count, cells(count).name) for count in CELLS)]
    every = main_comparison(evidence)
    trained = [(count, name) for count, name in sizes if every.of(name)]
    shared = every.shared_datasets([name for _, name in trained])
    means = [(count, every.accuracy(name, shared)) for count, name in trained]
    lines = {
        "masked memory": (
            [float(count) for count, interval in means if interval],
            [100 * interval.mean for _, interval in means if interval],
        )
    }
    chart = line_chart("Accuracy by memory cells", "memory cells per block", "test accuracy, %", lines)
    parts.append(
        Chart(chart, f"Mean test accuracy over {', '.join(shared)} by the number of cells; 0 is the class token alone.")
    )
    return Section("Which part of the method does what", parts)


def _counterpart(comparison: Comparison, name: str) -> str:
    """What a variant of memory is compared with: the form that differs from it in one thing."""
    if name == UNMASKED:
        return masked_counterpart(comparison)
    if "propagated" in name or "additive" in name:  # every token reads their cells too
        return UNMASKED
    return "5 cells"


def architecture_section(every: Sequence[Evidence]) -> Section | None:
    """The same methods on several backbones."""
    if len(every) < 2:
        return None
    comparisons = {one.backbone: one.trainings() for one in every}
    methods = [
        name
        for name in next(iter(comparisons.values())).methods(ORDER)
        if all(comparison.of(name) for comparison in comparisons.values())
    ]
    shared = set.intersection(*(set(comparison.shared_datasets(methods)) for comparison in comparisons.values()))
    if not methods or not shared:
        return None
    datasets = sorted(shared)
    rows = tuple(
        (name, *(percent(comparison.accuracy(name, datasets)) for comparison in comparisons.values()))
        for name in methods
    )
    notes = " ".join(f"{name}: {own.on(datasets).note(methods)}" for name, own in comparisons.items())
    differences = {
        f"{name} − {before}": [own.on(datasets).difference(name, before) for own in comparisons.values()]
        for before, name in pairwise(methods)
    }
    steps = tuple(
        (step, *("–" if one is None else points(one.interval) for one in row)) for step, row in differences.items()
    )
    return Section(
        "Several backbones",
        (
            f"Mean test accuracy over {', '.join(datasets)}.",
            Table(("method", *comparisons), rows, notes),
            "Every method against the one above it, on the same images and seeds, in points.",
            Table(("step", *comparisons), steps, notes),
        ),
    )
