"""What an experiment is: the trainings that it compares, and what is measured on them afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from vit_memory.evaluation.reproduce.methods import Method
from vit_memory.evaluation.reproduce.runner import Runner, Training
from vit_memory.evaluation.reproduce.scale import Scale


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known before any image is opened."""

    scale: Scale
    datasets: tuple[str, ...]
    coarse: tuple[str, ...]  # datasets that have coarse labels too
    depth: int  # blocks of the backbone

    def trainings(
        self, methods: Sequence[Method], datasets: Sequence[str] | None = None, per_class: int | None = None
    ) -> list[Training]:
        """Every method on every dataset with every seed, the seeds one after the other."""
        count = per_class or self.scale.per_class
        every = product(self.scale.seeds, self.datasets if datasets is None else datasets, methods)
        return [Training(dataset, method, seed, count) for seed, dataset, method in every]


def nothing_more(runner: Runner, plan: Plan) -> None:
    """The records of the trainings are the result."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of `vit-memory reproduce`."""

    name: str
    question: str  # that it answers
    trainings: Callable[[Plan], list[Training]]
    measure: Callable[[Runner, Plan], None] = nothing_more  # on the trained tasks; writes records of its own

    def run(self, runner: Runner, plan: Plan) -> None:
        """Train and measure what has no record yet."""
        runner.train(self.trainings(plan))
        self.measure(runner, plan)
