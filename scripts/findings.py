"""Write results/findings.md: the text of results/findings.template.md with every number computed from records.

    python scripts/findings.py

An expression in double braces is computed: {{accuracy("rank 8 + gains")}}, {{gap("LoRA", "5 cells")}}. The functions
below are all that it may call. `tests/test_findings.py` writes the page again and finds no number outside braces.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vit_memory.atomic import write_atomic
from vit_memory.errors import VitMemoryError
from vit_memory.evaluation.reproduce.records import Record, RecordFolder
from vit_memory.evaluation.statistics import Interval, difference
from vit_memory.report.experiments import evidence_of
from vit_memory.report.experiments.accuracy import UNMASKED, is_ablation, main_comparison
from vit_memory.report.experiments.evidence import Comparison, percent, points
from vit_memory.report.experiments.together import extended_and_alone, forgotten

RESULTS = Path(__file__).parents[1] / "results"
EXPRESSION = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Findings:
    """What expressions of the template may ask for."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.evidence, *self.others = evidence_of(list(RecordFolder(results / "reproduce").all()))
        self.main = main_comparison(self.evidence)

    def functions(self) -> Mapping[str, Callable[..., str]]:
        """By the name that the template calls them."""
        about_one = ("accuracy", "gap", "verdict", "number", "seeds", "steps", "setting", "missing")
        names = (*about_one, "together", "measured_seeds", "forgotten", "extended")
        return {name: getattr(self, name) for name in names}

    def accuracy(self, method: str, dataset: str | None = None, **where: Any) -> str:
        """Mean test accuracy over the datasets, or on one, with its interval; `where` as in `_comparison`."""
        found = self._comparison(**where).accuracy(method, None if dataset is None else [dataset])
        return _known(percent(found), method)

    def gap(self, method: str, other: str, dataset: str | None = None, **where: Any) -> str:
        """The difference on the same images and seeds, with its interval; `where` as in `_comparison`."""
        return points(self._difference(method, other, dataset, **where))

    def verdict(self, method: str, other: str, dataset: str | None = None, **where: Any) -> str:
        """Whether a method is higher or lower than another, by the interval of the difference."""
        interval = self._difference(method, other, dataset, **where)
        if not interval.excludes_zero:
            return "not significantly different from"
        return "higher than" if interval.mean > 0 else "lower than"

    def _difference(self, method: str, other: str, dataset: str | None, **where: Any) -> Interval:
        comparison = self._comparison(**where)
        found = (comparison if dataset is None else comparison.on([dataset])).difference(method, other)
        if found is None:
            raise VitMemoryError(f"{method} against {other}: not in the records.")
        return found.interval

    def _comparison(self, *, per_class: int | None = None, backbone: str | None = None) -> Comparison:
        """The main comparison, that with fewer images per class, or that of another backbone."""
        if backbone is not None:
            (other,) = (one for one in self.others if one.backbone == backbone)
            return main_comparison(other)
        return self.main if per_class is None else self.evidence.trainings(per_class)

    def number(self, of: str) -> str:
        """How many trainings, datasets or test images there are; small numbers in words."""
        images = {r.identity["dataset"]: r.result["test_images"] for r in self.main.records}
        counts = {
            "trainings": len(self.main.records),
            "datasets": len(self.main.datasets()),
            "test images": sum(images.values()),
        }
        count = counts[of]
        return _NUMBERS[count] if count < len(_NUMBERS) else str(count)

    def seeds(self, method: str, **where: Any) -> str:
        """How many seeds a method was trained with, the fewest of any dataset; `where` as in `_comparison`."""
        return _NUMBERS[self._comparison(**where).seeds(method)]

    def steps(self, method: str) -> str:
        """Optimiser steps of a method's trainings."""
        return self.main.steps(method)

    def missing(self) -> str:
        """The experiments that have no records yet."""
        trained = self.evidence.of_kind("training")
        recorded = {
            "unmasked memory": self._everywhere(UNMASKED),
            "full fine-tuning on all datasets": self._everywhere("full"),
            "tasks put together": bool(self.evidence.of_kind("concatenation")),
            "tasks that extend others": any(record.identity["extends"] for record in trained),
            "tasks that arrive one after another": bool(self.evidence.of_kind("continual")),
            "fewer images": len({record.identity["per_class"] for record in trained}) > 1,
            "variants of memory": any(is_ablation(record.identity["method"]) for record in trained),
            "another backbone": bool(self.others),
        }
        return ", ".join(name for name, has_records in recorded.items() if not has_records) or "nothing"

    def _everywhere(self, method: str) -> bool:
        return self.main.accuracy(method, self.main.datasets()) is not None

    def together(self, method: str, what: str) -> str:
        """Of tasks that were trained apart and put together.

        `alone` and `together` are mean accuracies, `difference` is the largest of a logit, `changed` counts answers.
        """
        rows = [row for record in self._measured("concatenation", method) for row in record.result["datasets"].values()]
        if what in ("alone", "together"):
            return f"{100 * float(np.mean([row[what] for row in rows])):.1f}"
        if what == "difference":
            return f"{max(row['largest_difference'] for row in rows):.1e}"
        changed = {"changed": "other_answers", "images": "test_images"}[what]
        return str(sum(row[changed] for row in rows))

    def measured_seeds(self, kind: str, method: str) -> str:
        """With how many seeds the tasks of a method were measured together."""
        return _NUMBERS[len(self._measured(kind, method))]

    def forgotten(self, method: str, dataset: str | None = None) -> str:
        """Accuracy after the last task arrived minus that at arrival, mean over seeds and earlier tasks, or on one."""
        datasets = None if dataset is None else [dataset]
        return f"{forgotten(self._measured('continual', method), method, datasets):+.1f}"

    def extended(self, dataset: str, method: str, *parents: str) -> str:
        """What a task gains from its parents, on the same images and seeds."""
        found = difference(extended_and_alone(self.evidence, dataset, method, parents), "extended", "alone")
        return _known("–" if found is None else points(found.interval), f"{method} on {dataset} with {parents}")

    def _measured(self, kind: str, method: str) -> list[Record]:
        records = [record for record in self.evidence.together(kind) if record.identity["method"] == method]
        if not records:
            raise VitMemoryError(f"{kind} of {method}: not in the records.")
        return records

    def setting(self, name: str) -> str:
        """The size of the images, or how many training images a class has."""
        if name == "per_class":
            return str(self.evidence.full_size)
        crops = {re.search(r"crop=\((\d+), \d+\)", r.settings["preprocessing"])[1] for r in self.main.records}  # type: ignore[index]
        (pixels,) = crops
        return pixels


def _known(text: str, what: str) -> str:
    if text == "–":
        raise VitMemoryError(f"{what}: not in the records.")
    return text


def render(template: str, results: Path) -> str:
    """The page."""
    functions = dict(Findings(results).functions())

    def compute(match: re.Match[str]) -> str:
        value: Any = eval(match[1].strip(), {"__builtins__": {}}, functions)
        return str(value)

    return EXPRESSION.sub(compute, template)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    template = (options.results / "findings.template.md").read_text(encoding="utf-8")
    write_atomic(options.results / "findings.md", [render(template, options.results).encode()])


if __name__ == "__main__":
    main()
