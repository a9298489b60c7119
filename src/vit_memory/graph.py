"""Which tasks and branches go together: names, parents, and what follows from them. No tensors touched.

No parents is concatenation: tasks side by side that cannot see one another. Parents are extension: a task reads its
ancestors' class tokens and memory, never the other way. A task reads the original trunk or one branch; extension may
cross trunks, since all class tokens travel in one pass. A graph never changes; `add` and `remove` give a new one.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

from vit_memory.branch import Branch
from vit_memory.errors import GraphError, UnknownTask
from vit_memory.regimes import COMPOSABLE, REGIMES
from vit_memory.task import Task

Key = TypeVar("Key", bound=Hashable)


class TaskGraph(Mapping[str, Task]):
    """Tasks by name, in the order they were added, with all their parents and branches and no cycle.

    `branches` holds the branches by name, those that no task stands on included.
    """

    def __init__(self, tasks: Iterable[Task] = (), branches: Iterable[Branch] = ()) -> None:
        self._tasks: dict[str, Task] = {}
        self.branches: dict[str, Branch] = {}
        for branch in branches:
            if branch.name in self.branches:
                raise GraphError(f"two branches are called {branch.name!r}; remove or rename one.")
            self.branches[branch.name] = branch
        for task in tasks:
            if task.name in self._tasks:
                raise GraphError(f"two tasks are called {task.name!r}; remove or rename one.")
            conflict = REGIMES[task.regime].conflict
            if conflict is not None:
                raise GraphError(
                    f"task {task.name!r} is of regime {task.regime!r} and cannot be put beside others: "
                    f"{conflict}. Composable regimes: {', '.join(sorted(COMPOSABLE))}."
                )
            self._tasks[task.name] = task
        for task in self._tasks.values():
            absent = [parent for parent in task.parents if parent not in self._tasks]
            if absent:
                raise GraphError(f"task {task.name!r} extends {_quoted(absent)}, not attached: add them together.")
            for parent, digest in task.parent_digests.items():
                attached = self._tasks[parent]
                if not has_digest(attached, digest):
                    raise GraphError(
                        f"task {task.name!r} was trained on a task {parent!r} with digest {digest[:12]}…, but the one "
                        f"here has {attached.digest[:12]}…: another task of that name, or trained again since. "
                        f"Add the one it was trained on, train {task.name!r} again, or keep it as it is and pin it to "
                        f"this one: vit-memory task repin {task.name}.safetensors {parent}.safetensors"
                    )
        self.branch_digests = {branch.name: branch.digest for branch in self.branches.values()}
        halves = {b.record.half_of: b for b in self.branches.values() if b.record.half_of is not None}
        # A branch's own digest comes before what another says that it was in full.
        self._by_digest = {**halves, **{self.branch_digests[b.name]: b for b in self.branches.values()}}
        self._branch_of = {task.name: self.find_branch(task) for task in self._tasks.values()}
        self._order = parents_first({task.name: task.parents for task in self._tasks.values()})

    def __getitem__(self, name: str) -> Task:
        try:
            return self._tasks[name]
        except KeyError:
            raise UnknownTask(self._unknown(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def find_branch(self, task: Task) -> Branch | None:
        """The branch that a task, of this graph or not, stands on; GraphError if it is not here."""
        ref = task.branch
        if ref is None:
            return None
        if ref.digest in self._by_digest:
            return self._by_digest[ref.digest]
        same_name = self.branches.get(ref.name)
        if same_name is not None:
            raise GraphError(
                f"task {task.name!r} stands on a branch {ref.name!r} with digest {ref.digest[:12]}…, but the one here "
                f"has {self.branch_digests[ref.name][:12]}…: another branch of that name, or trained again since. Add "
                f"the one it was trained on, or train {task.name!r} again."
            )
        raise GraphError(
            f"task {task.name!r} stands on branch {ref.name!r} (digest {ref.digest[:12]}…), not attached: add it, "
            f"from {ref.name}.branch.safetensors."
        )

    def branch_of(self, name: str) -> Branch | None:
        """The branch that a task stands on; None: the original trunk."""
        return self._branch_of[self[name].name]

    def add(self, *tasks: Task, branches: Iterable[Branch] = ()) -> "TaskGraph":
        """This graph with more tasks, which may extend one another in any order, and more branches."""
        return TaskGraph((*self._tasks.values(), *tasks), (*self.branches.values(), *branches))

    def remove(self, *names: str, branches: Sequence[str] = ()) -> "TaskGraph":
        """This graph without some tasks and branches; refused while a task that stays needs one of them."""
        for name in names:
            self[name]  # unknown names are refused before anything else
        for branch in branches:
            if branch not in self.branches:
                raise UnknownTask(f"no branch {branch!r}. Attached: {', '.join(self.branches) or 'none'}.")
            standing = [name for name in self if name not in names and self._branch_of[name] is self.branches[branch]]
            if standing:
                raise GraphError(
                    f"{_quoted(standing)} stand{'s' * (len(standing) == 1)} on branch {branch!r}: remove "
                    f"{'it' if len(standing) == 1 else 'them'} first, or all in one call."
                )
        for task in self._tasks.values():
            needed = [parent for parent in task.parents if parent in names]
            if needed and task.name not in names:
                raise GraphError(
                    f"task {task.name!r} extends {_quoted(needed)}: remove {task.name!r} first, or all in one call."
                )
        return TaskGraph(
            [task for task in self._tasks.values() if task.name not in names],
            [branch for branch in self.branches.values() if branch.name not in branches],
        )

    def ancestors(self, name: str) -> tuple[str, ...]:
        """Every task that `name` builds on, directly or not, parents before children."""
        ancestors: set[str] = set()
        waiting = list(self[name].parents)
        while waiting:
            parent = waiting.pop()
            if parent not in ancestors:
                ancestors.add(parent)
                waiting.extend(self._tasks[parent].parents)
        return tuple(other for other in self._order if other in ancestors) if ancestors else ()

    def with_ancestors(self, names: Sequence[str]) -> tuple[str, ...]:
        """The tasks that must be read to answer for `names`, each once."""
        wanted = dict.fromkeys(names)
        for name in names:
            wanted.update(dict.fromkeys(self.ancestors(name)))
        return tuple(wanted)

    def _unknown(self, name: object) -> str:
        if not self._tasks:
            return f"no task {name!r}: no task is attached."
        close = get_close_matches(str(name), self._tasks, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = ", ".join(list(self._tasks)[:20]) + (f" and {len(self) - 20} more" if len(self) > 20 else "")
        return f"no task {name!r}.{hint} Attached: {known}."


def parents_first(parents: Mapping[Key, Iterable[Key]]) -> tuple[Key, ...]:
    """An order in which every task comes after its parents; refused where tasks extend one another in a circle."""
    try:
        return tuple(TopologicalSorter(parents).static_order())
    except CycleError as error:
        cycle = " → ".join(map(str, error.args[1][::-1]))
        raise GraphError(f"tasks extend one another in a circle: {cycle}.") from None


def has_digest(item: Task | Branch, digest: str) -> bool:
    """Whether `digest` names this task or branch: its content, or what it was before it became float16."""
    return digest in _digests(item)


def _digests(item: Task | Branch) -> tuple[str, ...]:
    return (item.digest,) if item.record.half_of is None else (item.digest, item.record.half_of)


def rename_tasks(
    tasks: Mapping[Key, Task], names: Mapping[Key, str], parents: Mapping[Key, Mapping[str, Key]]
) -> dict[Key, Task]:
    """Give tasks the new `names`, and let the tasks that extend them name them so; the others are returned as given.

    `parents` says for every task which of `tasks` it means by the names of its parents. A task's digest does not
    depend on its own name, so a pinned parent keeps the digest it is pinned to. A parent that is not pinned is part of
    its child's digest by name: renaming it changes that digest, and whoever is pinned to the child is pinned to the new
    one.
    """
    renamed: dict[Key, Task] = {}
    for key in parents_first({key: parents[key].values() for key in tasks}):
        task = tasks[key]
        new_names = {name: renamed[parent].name for name, parent in parents[key].items()}
        pins = {}
        for name, digest in task.parent_digests.items():
            parent = parents[key].get(name)
            follows = parent is not None and renamed[parent] is not tasks[parent] and digest == tasks[parent].digest
            pins[new_names.get(name, name)] = renamed[parent].digest if parent is not None and follows else digest
        new = names.get(key, task.name), tuple(new_names.get(name, name) for name in task.parents), pins
        if new == (task.name, task.parents, dict(task.parent_digests)):
            renamed[key] = task
        else:
            renamed[key] = replace(task, name=new[0], parents=new[1], parent_digests=new[2])
    return {key: renamed[key] for key in tasks}


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
