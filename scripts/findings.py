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

from vit_memory.atomic import write_atomic
from vit_memory.errors import VitMemoryError
from vit_memory.evaluation.reproduce.records import RecordFolder
from vit_memory.report.experiments import evidence_of
from vit_memory.report.experiments.evidence import Comparison, percent, points

RESULTS = Path(__file__).parents[1] / "results"
EXPRESSION = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Findings:
    """What expressions of the template may ask for."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.evidence = evidence_of(list(RecordFolder(results / "reproduce").all()))[0]
        self.main = self.evidence.trainings()

    def functions(self) -> Mapping[str, Callable[..., str]]:
        """By the name that the template calls them."""
        return {name: getattr(self, name) for name in ("accuracy", "gap", "verdict", "number", "seeds", "setting")}

    def accuracy(self, method: str, dataset: str | None = None, *, per_class: int | None = None) -> str:
        """Mean test accuracy over the datasets, or on one, with its interval."""
        comparison = self.evidence.trainings(per_class)
        return _known(percent(comparison.accuracy(method, None if dataset is None else [dataset])), method)

    def gap(self, method: str, other: str, dataset: str | None = None) -> str:
        """The difference on the same images and seeds, with its interval."""
        found = self._only(dataset).difference(method, other)
        return _known("–" if found is None else points(found.interval), f"{method} against {other}")

    def verdict(self, method: str, other: str, dataset: str | None = None) -> str:
        """Whether a method is above or below another, by the interval of the difference."""
        found = self._only(dataset).difference(method, other)
        if found is None:
            raise VitMemoryError(f"{method} against {other}: not in the records.")
        if not found.interval.excludes_zero:
            return "not told apart from"
        return "above" if found.interval.mean > 0 else "below"

    def number(self, of: str) -> str:
        """How many trainings, datasets or test images there are; small numbers in words."""
        images = {r.identity["dataset"]: r.result["test_images"] for r in self.main.records}
        counts = {
            "trainings": len(self.evidence.of_kind("training")),
            "datasets": len(self.main.datasets()),
            "test images": sum(images.values()),
        }
        count = counts[of]
        return _NUMBERS[count] if count < len(_NUMBERS) else str(count)

    def seeds(self, method: str) -> str:
        """How many seeds a method was trained with, the fewest of any dataset."""
        return _NUMBERS[min(len(self.main.of(method, dataset)) for dataset in self.main.datasets())]

    def setting(self, name: str) -> str:
        """The size of the images, or how many training images a class has."""
        if name == "per_class":
            return str(self.evidence.full_size)
        crops = {re.search(r"crop=\((\d+), \d+\)", r.settings["preprocessing"])[1] for r in self.main.records}  # type: ignore[index]
        (pixels,) = crops
        return pixels

    def _only(self, dataset: str | None) -> Comparison:
        if dataset is None:
            return self.main
        return Comparison(tuple(r for r in self.main.records if r.identity["dataset"] == dataset))


def _known(text: str, what: str) -> str:
    if text == "–":
        raise VitMemoryError(f"{what}: not in the records.")
    return text


def render(template: str, results: Path) -> str:
    """The page."""
    functions = dict(Findings(results).functions())

    def compute(match: re.Match[str]) -> str:
        found: Any = eval(match[1].strip(), {"__builtins__": {}}, functions)
        return str(found)

    return EXPRESSION.sub(compute, template)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    template = (asked.results / "findings.template.md").read_text(encoding="utf-8")
    write_atomic(asked.results / "findings.md", [render(template, asked.results).encode()])


if __name__ == "__main__":
    main()
