"""One version of the tasks that an engine serves: an immutable value, named by a hash of its content.

A change gives a new version beside the old one. Both share the backbone and what was prepared of the tasks that both
have, so a request can stay with the version it began with, and a change costs what is new in it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vit_memory.branch import Branch
from vit_memory.graph import TaskGraph
from vit_memory.joining import JoinPlan
from vit_memory.model import MemoryViT
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import Task

Group = tuple[Preprocessing | None, frozenset[str]]  # tasks whose images are preprocessed alike
Item = TypeVar("Item", bound=Task | Branch)


@dataclass(frozen=True, slots=True, eq=False)
class TaskSet:
    """One version of the task set. Do not add to or remove from its `model`: ask for another version."""

    version: str  # 16 hex digits of names, digests and preprocessing: the same in every process
    model: MemoryViT
    digests: Mapping[str, str]  # task -> digest
    preprocessing: Mapping[str, Preprocessing | None]  # task -> how its images are preprocessed; None: not known
    groups: tuple[Group, ...]  # the one with the backbone's own preprocessing first

    @staticmethod
    def of(model: MemoryViT, *, plan: JoinPlan | None = None) -> "TaskSet":
        """The tasks that a model has now. Later changes of the model do not reach it. `plan` as in `model.copy`."""
        return _task_set(model.copy(plan=plan), {})

    @property
    def tasks(self) -> TaskGraph:
        """The tasks by name; `tasks.branches` are the branches."""
        return self.model.tasks

    def with_tasks(self, tasks: Sequence[Task], branches: Sequence[Branch] = (), *, replace: bool = False) -> "TaskSet":
        """This version with more tasks and branches; with `replace`, those of the same names give way to them."""
        graph = self.tasks
        if not replace:
            return self._with(graph.add(*tasks, branches=branches))
        return self._with(
            TaskGraph(_in_place([*graph.values()], tasks), _in_place([*graph.branches.values()], branches))
        )

    def without(self, names: Sequence[str], branches: Sequence[str] = ()) -> "TaskSet":
        """This version without some tasks and branches; refused while a task that stays needs one of them."""
        return self._with(self.tasks.remove(*names, branches=branches))

    def with_only(self, tasks: Sequence[Task], branches: Sequence[Branch] = ()) -> "TaskSet":
        """A version with exactly these tasks and branches, on the same backbone."""
        return self._with(TaskGraph(tasks, branches))

    def split(self, names: Sequence[str]) -> list[tuple[Preprocessing | None, tuple[str, ...]]]:
        """These tasks in groups whose images are preprocessed alike, so that one pass can answer for them.

        The group with the backbone's own preprocessing comes first. Without tasks, there is one group without tasks.
        """
        own = self.model.backbone.preprocessing
        if not names:
            return [(own, ())]
        if len(self.groups) == 1:
            return [(self.groups[0][0], tuple(names))]
        split = [
            (preprocessing, tuple(name for name in names if name in group)) for preprocessing, group in self.groups
        ]
        return [(preprocessing, members) for preprocessing, members in split if members]

    def unchanged_in(self, other: "TaskSet") -> frozenset[str]:
        """The tasks that another version has too, as the same objects, with the branches that they stand on."""
        return frozenset(name for name in other.tasks if self._has_same(name, other))

    def can_answer(self, other: "TaskSet", names: Sequence[str]) -> bool:
        """Whether these tasks of another version, and all that they extend, are here too, so that they answer alike."""
        return all(self._has_same(name, other) for name in other.tasks.with_ancestors(names))

    def _has_same(self, name: str, other: "TaskSet") -> bool:
        mine, theirs = self.tasks, other.tasks
        return name in mine and mine[name] is theirs[name] and mine.branch_of(name) is theirs.branch_of(name)

    def _with(self, graph: TaskGraph) -> "TaskSet":
        old = self.tasks
        unchanged = {name: self.digests[name] for name, task in graph.items() if name in old and old[name] is task}
        return _task_set(self.model.copy(graph), unchanged)


def _in_place(old: Sequence[Item], new: Sequence[Item]) -> list[Item]:
    """The old items with the new ones of the same names in their places, then the other new ones."""
    by_name = {item.name: item for item in new}
    known = {item.name for item in old}
    return [*(by_name.get(item.name, item) for item in old), *(item for item in new if item.name not in known)]


def _task_set(model: MemoryViT, known_digests: Mapping[str, str]) -> TaskSet:
    graph, default = model.tasks, model.backbone.preprocessing
    digests = {name: known_digests.get(name) or task.digest for name, task in graph.items()}
    by_task = {name: task.record.preprocessing or default for name, task in graph.items()}
    lines = [f"task {name} {digests[name]} {by_task[name]}" for name in digests]
    lines += [f"branch {name} {digest}" for name, digest in graph.branch_digests.items()]
    version = hashlib.sha256("\n".join([model.backbone.fingerprint, *sorted(lines)]).encode()).hexdigest()[:16]
    own_first = sorted(dict.fromkeys(by_task.values()), key=lambda preprocessing: preprocessing != default)
    groups = [
        (preprocessing, frozenset(name for name in graph if by_task[name] == preprocessing))
        for preprocessing in own_first
    ]
    return TaskSet(version, model, digests, by_task, tuple(groups))
