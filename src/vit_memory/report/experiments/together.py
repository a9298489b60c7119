"""Sections about several tasks: concatenation, extension, tasks that arrive one after another."""

from collections.abc import Sequence

import numpy as np

from vit_memory.evaluation.reproduce.records import Record
from vit_memory.evaluation.reproduce.runner import right_answers_of
from vit_memory.evaluation.statistics import RightAnswers, accuracy, difference, unpack_bits
from vit_memory.report.document import Chart, Figure, Section, Table
from vit_memory.report.elements import Markup, bold, join, picture
from vit_memory.report.experiments.charts import line_chart
from vit_memory.report.experiments.evidence import Evidence, commands, percent, points

NAIVE = "5 cells, unmasked"


def concatenation_section(evidence: Evidence) -> Section | None:
    """Alone and together, masked and naive."""
    records = evidence.together("concatenation")
    if not records:
        return None
    methods = list(dict.fromkeys(record.identity["method"] for record in records))
    rows, costs = [], []
    for method in sorted(methods, key=lambda name: name == NAIVE):
        own = [record for record in records if record.identity["method"] == method]
        datasets = list(own[0].result["datasets"])
        alone, together = (percent(accuracy(_answers(own, key), key)) for key in ("alone", "together"))
        masked = method != NAIVE
        worst = max(r.result["datasets"][d].get("largest_difference", 0.0) for r in own for d in datasets)
        others = sum(r.result["datasets"][d].get("other_answers", 0) for r in own for d in datasets)
        identical = all(r.result.get("original_identical", False) for r in own)
        rows.append(
            (
                method if masked else f"{method} (naive: no mask)",
                str(len(datasets)),
                str(len(own)),
                alone,
                together,
                f"{worst:.1e}" if masked else "–",
                str(others) if masked else "–",
                ("yes" if identical else "NO") if masked else "no",
            )
        )
        if masked:
            cost = [r.result["cost"] for r in own]
            low, high = min(c["quartiles"][0] for c in cost), max(c["quartiles"][1] for c in cost)
            middle = float(np.median([c["of_plain_pass"] for c in cost]))
            costs.append(
                f"{method}: {middle:.2f} (quartiles {low:.2f} to {high:.2f}) for {cost[0]['tasks']} tasks on batches "
                f"of {cost[0]['batch']} images"
            )
    images = sum(row["test_images"] for row in records[0].result["datasets"].values())
    titles = (
        "method",
        "tasks",
        "seeds",
        "alone, %",
        "together, %",
        "largest difference",
        "other answers",
        "original identical",
    )
    parts: list[str | Table | Chart] = [
        "One task per dataset, trained apart. Alone: the task on its own. Together: beside all others in one model. "
        "The largest difference is that of the logits; other answers counts test images whose class changed. The naive "
        "way puts tasks that were trained without a mask into one sequence in which everything reads everything.",
        Table(titles, tuple(rows), f"n = {images} test images per seed, with 95 % intervals. {commands(records)}"),
        _each_task(records),
        f"One pass with all tasks, as a multiple of the library's own pass: {'; '.join(costs)}.",
    ]
    naive = [record for record in records if record.identity["method"] == NAIVE]
    if naive:
        datasets = list(naive[0].result["datasets"])
        lines = {
            d: (
                [float(i + 1) for i in range(len(datasets))],
                [100 * float(v) for v in np.mean([r.result["datasets"][d]["by_tasks"] for r in naive], axis=0)],
            )
            for d in datasets
        }
        chart = line_chart("Tasks put together without a mask", "tasks in the model", "test accuracy, %", lines)
        parts.append(Chart(chart, "Accuracy of each task as others are added to the same sequence without a mask."))
    return Section("Tasks trained apart, put together", parts)


def _answers(records: Sequence[Record], key: str, dataset: str | None = None) -> list[RightAnswers]:
    """Which test images were right, `alone` or `together`, of one dataset or of all."""
    return [
        RightAnswers(name, key, record.identity["seed"], unpack_bits(row[f"{key}_right"], row["test_images"]))
        for record in records
        for name, row in record.result["datasets"].items()
        if dataset in (None, name)
    ]


def _each_task(records: Sequence[Record]) -> Table:
    """Every task alone and beside all others, by method."""
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record.identity["method"], []).append(record)
    titles = [f"{method}, {key}" for method in by_method for key in ("alone", "together")]
    rows = [
        (
            dataset,
            *(
                percent(accuracy(_answers(own, key, dataset), key))
                for own in by_method.values()
                for key in ("alone", "together")
            ),
        )
        for dataset in records[0].result["datasets"]
    ]
    return Table(("task, accuracy in %", *titles), tuple(rows), commands(records))


def extension_section(evidence: Evidence) -> Section | None:
    """Tasks with parents against the same tasks without."""
    extended = [r for r in _of_fine_labels(evidence) if r.identity["extends"]]
    if not extended:
        return None
    rows = []
    for dataset, method, parents in dict.fromkeys(_key(r) for r in extended):
        marked = extended_and_alone(evidence, dataset, method, parents)
        gain = difference(marked, "extended", "alone")
        rows.append(
            (
                f"{dataset}, {method}",
                " and ".join(parents),
                percent(accuracy(marked, "alone")),
                percent(accuracy(marked, "extended")),
                "–" if gain is None else points(gain.interval),
                str(0 if gain is None else gain.pairs),
            )
        )
    titles = ("task", "extends", "without parents, %", "extended, %", "difference", "pairs")
    return Section(
        "Tasks built on one another",
        (
            "A chain: fine labels on coarse ones, for the same training images. A diamond: fine labels on two tasks "
            "that both extend a third.",
            Table(titles, tuple(rows), f"{_count(extended)} {commands(extended)}"),
        ),
    )


def extended_and_alone(evidence: Evidence, dataset: str, method: str, parents: tuple[str, ...]) -> list[RightAnswers]:
    """Trainings of a method on a dataset, as two methods: `extended` for those with these parents, `alone` without."""
    names = {(dataset, method, parents): "extended", (dataset, method, ()): "alone"}
    return [_renamed(r, names[_key(r)]) for r in _of_fine_labels(evidence) if _key(r) in names]


def _of_fine_labels(evidence: Evidence) -> list[Record]:
    """With all images: trainings with fewer would take the place of those."""
    return [
        record
        for record in evidence.of_kind("training")
        if record.identity["label"] in (None, "label") and record.identity["per_class"] == evidence.full_size
    ]


def _key(record: Record) -> tuple[str, str, tuple[str, ...]]:
    return record.identity["dataset"], record.identity["method"], tuple(record.identity["extends"])


def _renamed(record: Record, name: str) -> RightAnswers:
    one = right_answers_of(record)
    return RightAnswers(one.dataset, name, one.seed, one.right)


def continual_section(evidence: Evidence) -> Section | None:
    """Accuracy on earlier tasks as new ones arrive."""
    records = evidence.together("continual")
    if not records or len(records[0].result["order"]) < 2:
        return None
    methods = list(dict.fromkeys(record.identity["method"] for record in records))
    order = records[0].result["order"]
    rows, first, mean = [], {}, {}
    for method in methods:
        own = [record for record in records if record.identity["method"] == method]
        first[method] = _over_time(own, order[:1], len(order))
        mean[method] = _over_time(own, order, len(order))
        arrival = [_arrived(record, i) for record in own for i in range(len(order))]
        last = [_arrived(record, i, -1) for record in own for i in range(len(order))]
        changes = [forgotten(own, method, [dataset]) for dataset in order[:-1]]
        rows.append(
            (
                method,
                percent(accuracy(arrival, method)),
                percent(accuracy(last, method)),
                f"{forgotten(own, method):+.1f}",
                f"{min(changes):+.1f}",
                ", ".join(str(record.identity["seed"]) for record in own),
            )
        )
    titles = ("method", "at arrival, %", "at the end, %", "change, points", "worst task", "seeds")
    steps = [float(i + 1) for i in range(len(order))]
    return Section(
        "Tasks that arrive one after another",
        (
            f"The order is {', '.join(order)}. At arrival: accuracy on each task when it was the newest, mean over "
            f"tasks. At the end: on the same tasks after the last one arrived. The change is that of the tasks before "
            f"the last.",
            Table(titles, tuple(rows), f"{_count(records)} {commands(records)}"),
            Chart(
                line_chart(
                    f"The first task ({order[0]})",
                    "tasks so far",
                    "test accuracy, %",
                    {method: (steps, values) for method, values in first.items()},
                ),
                "Accuracy on the first task after every arrival.",
            ),
            Chart(
                line_chart(
                    "All tasks so far",
                    "tasks so far",
                    "test accuracy, %",
                    {method: (steps, values) for method, values in mean.items()},
                ),
                "Mean accuracy over the tasks that have arrived.",
            ),
        ),
    )


def _arrived(record: Record, i: int, after: int | None = None) -> RightAnswers:
    """The answers of the i-th task when it arrived, or `after` some arrival."""
    dataset = record.result["order"][i]
    row = record.result["after"][i if after is None else after][dataset]
    identity = record.identity
    return RightAnswers(dataset, identity["method"], identity["seed"], unpack_bits(row["right"], row["test_images"]))


def _count(records: Sequence[Record]) -> str:
    """How many test images the datasets of the records have."""
    images: dict[str, int] = {}
    for record in records:
        if record.kind == "continual":
            images |= {name: row["test_images"] for name, row in record.result["after"][-1].items()}
        else:
            images[record.identity["dataset"]] = record.result["test_images"]
    return f"n = {sum(images.values())} test images of {len(images)} dataset{'s' * (len(images) != 1)}."


def forgotten(records: Sequence[Record], method: str, datasets: Sequence[str] | None = None) -> float:
    """Accuracy at the end minus that at arrival, mean over the earlier tasks (or some) and over seeds, in points."""
    changes = [
        record.result["after"][-1][dataset]["test"] - record.result["after"][i][dataset]["test"]
        for record in records
        if record.identity["method"] == method
        for i, dataset in enumerate(record.result["order"][:-1])
        if datasets is None or dataset in datasets
    ]
    return 100 * float(np.mean(changes))


def _over_time(records: Sequence[Record], datasets: Sequence[str], count: int) -> list[float]:
    """Per cent after each arrival: mean over seeds and over those of the datasets that have arrived."""
    return [
        100
        * float(
            np.mean([row[d]["test"] for r in records for row in (r.result["after"][i],) for d in row if d in datasets])
        )
        for i in range(count)
    ]


def example_section(evidence: Evidence) -> Section | None:
    """Test images with the answers of every task, and where one of them looked."""
    records = evidence.together("examples")
    if not records:
        return None
    figures = []
    for example in records[0].result["examples"]:
        answers = [join([f"{task}: ", bold(answer), f" {100 * p:.0f} %. "]) for task, answer, p in example["answers"]]
        caption = join([bold(example["label"]), Markup("<br>"), *answers])
        figures.append(Figure(picture(example["image"], caption, example["task"], example["attention"])))
    return Section(
        "One image, one pass, every task",
        (
            "Test images that were drawn at random. Every task answers on every image, also where the question makes "
            "no sense. Right of each image: the attention of the class token of the task that is named below it, in "
            "the last block.",
            *figures,
        ),
    )
