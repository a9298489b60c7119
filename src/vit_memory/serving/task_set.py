"""One version of the tasks that an engine serves: an immutable value, named by a hash of its content.

A change gives a new version beside the old one. Both share the backbone and what was prepared of the tasks that both
have, so a request can stay with the version it began with, and a change costs what is new in it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vit_memory.branch import Branch
from vit_memory.errors import TaskError
from vit_memory.graph import TaskGraph
from vit_memory.joining import JoinPlan
from vit_memory.model import MemoryViT
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import Task


@dataclass(frozen=True, slots=True, eq=False)
class TaskSet:
    """One version of the task set. Do not add to or remove from its `model`: ask for another version."""

    version: str  # 16 hex digits of names, digests and preprocessing: the same in every process
    model: MemoryViT
    digests: Mapping[str, str]  # task -> digest
    preprocessing: Mapping[str, Preprocessing | None]  # task -> how its images are preprocessed; None: not known

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
        kept_tasks, kept_branches = list(self.tasks.values()), list(self.tasks.branches.values())
        if replace:
            kept_tasks, tasks = _in_place(kept_tasks, tasks)
            kept_branches, branches = _in_place(kept_branches, branches)
        return self._with(TaskGraph((*kept_tasks, *tasks), (*kept_branches, *branches)))

    def without(self, names: Sequence[str], branches: Sequence[str] = ()) -> "TaskSet":
        """This version without some tasks and branches; refused while a task that stays needs one of them."""
        return self._with(self.tasks.remove(*names, branches=branches))

    def with_only(self, tasks: Sequence[Task], branches: Sequence[Branch] = ()) -> "TaskSet":
        """A version with exactly these tasks and branches, on the same backbone."""
        return self._with(TaskGraph(tasks, branches))

    def groups(self, names: Iterable[str]) -> Iterator[tuple[Preprocessing, tuple[str, ...]]]:
        """Tasks whose images are preprocessed alike, so that one pass can answer for them."""
        groups: dict[Preprocessing | None, list[str]] = {}
        for name in names:
            groups.setdefault(self.preprocessing[name], []).append(name)
        for preprocessing, members in groups.items():
            yield self.known_preprocessing(preprocessing), tuple(members)

    def known_preprocessing(self, preprocessing: Preprocessing | None = None) -> Preprocessing:
        """This preprocessing or the backbone's own; TaskError if neither is known."""
        known = preprocessing or self.model.backbone.preprocessing
        if known is None:
            raise TaskError(
                f"neither the tasks nor {self.model.backbone.name} define how images are preprocessed: "
                f"give normalised tensors instead of encoded images."
            )
        return known

    def _with(self, graph: TaskGraph) -> "TaskSet":
        old = self.tasks
        unchanged = {name: self.digests[name] for name, task in graph.items() if name in old and old[name] is task}
        return _task_set(self.model.copy(graph), unchanged)


def _in_place(old: list[Task] | list[Branch], new: Sequence[Task] | Sequence[Branch]) -> tuple[list, list]:  # type: ignore[type-arg]
    """The old list with the new items of the same names in their places, and the other new items."""
    by_name = {item.name: item for item in new}
    names = {item.name for item in old}
    return [by_name.get(item.name, item) for item in old], [item for item in new if item.name not in names]


def _task_set(model: MemoryViT, known_digests: Mapping[str, str]) -> TaskSet:
    graph, default = model.tasks, model.backbone.preprocessing
    digests = {name: known_digests.get(name) or task.digest for name, task in graph.items()}
    preprocessing = {name: task.record.preprocessing or default for name, task in graph.items()}
    lines = [f"task {name} {digests[name]} {preprocessing[name]}" for name in digests]
    lines += [f"branch {name} {digest}" for name, digest in graph.branch_digests.items()]
    version = hashlib.sha256("\n".join([model.backbone.fingerprint, *sorted(lines)]).encode()).hexdigest()[:16]
    return TaskSet(version, model, digests, preprocessing)
