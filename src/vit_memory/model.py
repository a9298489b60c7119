"""MemoryViT: one backbone, its tasks, and all their answers in one pass.

The task set is a snapshot that `add` and `remove` replace, one at a time; a call takes the snapshot once and works on
that, so calls from several threads never see half a change, and no change is lost. There is no active task: a call
names its tasks.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.errors import BackboneMismatch, TaskError, UnknownTask
from vit_memory.explanation import Explanation, explain_looks
from vit_memory.families.roles import Original, Roles
from vit_memory.fused import run_fused
from vit_memory.graph import TaskGraph
from vit_memory.joining import JoinPlan
from vit_memory.reading import Group, Looks, Readers, Seating, place_cells, project_cells, read, seat
from vit_memory.task import Task, head_output
from vit_memory.trunk import Trunk, run_trunk

_KEPT_SELECTIONS = 32  # task selections whose gathered memory is kept; requests tend to repeat a few


@dataclass(frozen=True, slots=True, eq=False)
class Outputs(Mapping[str, Tensor]):
    """The backbone's own answer, untouched, and one tensor of logits per task asked for.

    A mapping from task name to logits (B, C); regression tasks give their values, in the user's units.
    """

    original: Original
    tasks: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tasks[name]
        except KeyError:
            raise UnknownTask(
                f"no answer for {name!r}: this call asked for {', '.join(self.tasks) or 'no task'}."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


for _cls in (Original, Outputs):  # so that torch.export can hand them out
    torch.export.register_dataclass(_cls, serialized_type_name=f"vit_memory.{_cls.__name__}")


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A task on the backbone's device and in its dtype, its memory already turned to keys and values."""

    token: Tensor | None  # (D,), as it enters the first block
    keys: tuple[Tensor, ...]  # per block (M, H, A/H)
    values: tuple[Tensor, ...]
    head_weight: Tensor
    head_bias: Tensor
    scale: Tensor | None  # (2, C) of a regression task, float32


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """What a call for certain tasks needs: their readers, and where each task's answer comes from."""

    readers: Readers | None  # None where only `head` tasks are asked for
    answers: tuple[tuple[str, int | None, _Kept], ...]  # name, position among the readers (None: the original feature)


@dataclass(slots=True, eq=False)
class _Snapshot:
    """One version of the task set, with what was computed for it so far.

    Calls in several threads fill the two caches without a lock: a cache is never changed, only replaced by a larger
    copy. Of two replacements at once one is lost, and computed again when it is needed.
    """

    graph: TaskGraph
    kept: Mapping[str, _Kept] = field(default_factory=dict)
    selections: Mapping[tuple[str, ...], _Selection] = field(default_factory=dict)


class MemoryViT(nn.Module):
    """A frozen backbone that answers for any number of tasks in one pass.

    >>> model = MemoryViT(backbone, [new_task(backbone, "pets", ["cat", "dog"])])
    >>> outputs = model(torch.zeros(1, 3, 32, 32))
    >>> tuple(outputs["pets"].shape)
    (1, 2)
    """

    def __init__(self, backbone: Backbone, tasks: Iterable[Task] = ()) -> None:
        super().__init__()
        self.backbone = backbone
        self._plan = JoinPlan(backbone.roles)
        self._write_lock = threading.Lock()  # held by whoever replaces the snapshot; calls do not take it
        self._snapshot = _Snapshot(TaskGraph())
        self.add(*tasks)

    @property
    def tasks(self) -> TaskGraph:
        """The attached tasks, by name."""
        return self._snapshot.graph

    def add(self, *tasks: Task) -> None:
        """Attach tasks, all or none. They may extend attached ones and each other."""
        for task in tasks:
            check_trained_on(task, self.backbone)
        with self._write_lock:
            old = self._snapshot
            self._snapshot = _Snapshot(old.graph.add(*tasks), old.kept)

    def remove(self, *names: str) -> None:
        """Detach tasks, all or none; refused while another task extends one of them."""
        with self._write_lock:
            old = self._snapshot
            graph = old.graph.remove(*names)
            self._snapshot = _Snapshot(graph, {name: kept for name, kept in old.kept.items() if name in graph})

    def forward(self, images: Tensor, tasks: Sequence[str] | None = None) -> Outputs:
        """Answer for `tasks` (all attached ones by default) and for the backbone, in one pass.

        images: (B, C, height, width), floating point, normalised by the backbone's preprocessing. Only the named tasks
        and their ancestors are read. No gradient is kept: training reads from a trunk.
        """
        images = self.backbone.check_images(images)
        selection = self._select(tasks)
        roles = self.backbone.roles
        if selection.readers is None:
            original = run_trunk(roles, images, keep=False).original
            return _answer(selection, original, None)
        original, features = run_fused(roles, self._plan, selection.readers, images)
        return _answer(selection, original, features)

    def trunk(self, images: Tensor) -> Trunk:
        """The original tokens' pass alone, with the keys and values that any task can be read from later."""
        return run_trunk(self.backbone.roles, self.backbone.check_images(images))

    @torch.no_grad()
    def read(self, trunk: Trunk, tasks: Sequence[str] | None = None) -> Outputs:
        """Answer for `tasks` from a trunk made before, by this backbone."""
        selection = self._select(tasks)
        features = None if selection.readers is None else read(self.backbone.roles, selection.readers, trunk)
        return _answer(selection, trunk.original, features)

    @torch.no_grad()
    def explain(self, image: Tensor, task: str) -> Explanation:
        """Where the task's class token looked in one image (C, height, width) or (1, C, height, width)."""
        snapshot = self._snapshot
        graph = snapshot.graph
        if graph[task].class_token is None:
            raise TaskError(f"task {task!r} is of regime 'head': it has no class token of its own that could look.")
        images = self.backbone.check_images(image[None] if image.dim() == 3 else image)
        if len(images) != 1:
            raise TaskError(f"explain looks at one image, {len(images)} given.")
        readers = self._select((task,), snapshot).readers
        assert readers is not None  # a task with a class token has a reader
        looks: list[Looks] = []
        roles = self.backbone.roles
        read(roles, readers, run_trunk(roles, images), looks.append)
        grid = images.shape[-2] // roles.patch_size[0], images.shape[-1] // roles.patch_size[1]
        return explain_looks(graph, task, readers.seating, looks, roles.prefix, grid)

    def _select(self, names: Sequence[str] | None, snapshot: _Snapshot | None = None) -> _Selection:
        snapshot = snapshot or self._snapshot
        if isinstance(names, str):
            raise UnknownTask(f"tasks is {names!r}; give a list of names: [{names!r}].")
        wanted = tuple(snapshot.graph) if names is None else tuple(dict.fromkeys(names))
        found = snapshot.selections.get(wanted)
        if found is None:
            found = self._assemble(snapshot, wanted)
            if not torch.compiler.is_compiling():  # a tracer's tensors must not outlive the trace
                others = snapshot.selections if len(snapshot.selections) < _KEPT_SELECTIONS else {}
                snapshot.selections = {**others, wanted: found}
        return found

    @torch.no_grad()
    def _assemble(self, snapshot: _Snapshot, wanted: tuple[str, ...]) -> _Selection:
        graph, roles = snapshot.graph, self.backbone.roles
        kept: dict[str, _Kept] = {}
        for name in graph.with_ancestors(wanted):
            kept[name] = snapshot.kept.get(name) or _keep(graph[name], self.backbone)
        if not torch.compiler.is_compiling():
            snapshot.kept = {**snapshot.kept, **kept}
        seating = seat_tasks(graph, [name for name in kept if kept[name].token is not None], self.backbone.device)
        position = {name: i for i, name in enumerate(seating.names)}
        readers = None
        if seating.names:
            readers = Readers(
                seating=seating,
                tokens=torch.stack([_token(kept[name]) for name in seating.names]),
                memory=tuple(
                    place_cells(
                        seating,
                        torch.cat([kept[name].keys[i] for name in seating.names]),
                        torch.cat([kept[name].values[i] for name in seating.names]),
                    )
                    for i in range(len(roles.blocks))
                ),
            )
        return _Selection(readers, tuple((name, position.get(name), kept[name]) for name in wanted))

    def _apply(self, fn, recurse: bool = True) -> "MemoryViT":  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        with self._write_lock:
            self._plan = JoinPlan(self.backbone.roles)
            self._snapshot = _Snapshot(self._snapshot.graph)  # tasks are cast anew from their own float32
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_write_lock"}  # locks are not copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._write_lock = threading.Lock()


def seat_tasks(graph: TaskGraph, names: Sequence[str], device: torch.device) -> Seating:
    """Seat the tasks called `names`, all of which have class tokens and all of whose ancestors are among them."""
    index = {name: i for i, name in enumerate(names)}
    ancestors = [[index[a] for a in graph.ancestors(name) if a in index] for name in names]
    seating = seat(names, ancestors, [graph[name].cells for name in names])
    move = partial(torch.Tensor.to, device=device)
    groups = tuple(
        Group(g.start, g.stop, move(g.ancestors), move(g.cells), None if g.readable is None else move(g.readable))
        for g in seating.groups
    )
    return Seating(seating.names, groups)


def _keep(task: Task, backbone: Backbone) -> _Kept:
    # Always a copy: tensors of a file lie unaligned in it, and products of unaligned weights round differently.
    place = partial(torch.Tensor.to, device=backbone.device, dtype=backbone.dtype, copy=True)
    roles: Roles = backbone.roles
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    token = None
    if task.class_token is not None:
        token = roles.pre_norm(place(task.class_token))
        memory = place(task.memory)
        projected = [
            project_cells(roles, block, cells, raw=task.raw_memory)
            for block, cells in zip(roles.blocks, memory, strict=True)
        ]
        keys, values = zip(*projected, strict=True)
    scale = None if task.target_scale is None else task.target_scale.tensor(backbone.device)
    return _Kept(token, keys, values, place(task.head_weight), place(task.head_bias), scale)


def _token(kept: _Kept) -> Tensor:
    assert kept.token is not None
    return kept.token


def _answer(selection: _Selection, original: Original, features: Tensor | None) -> Outputs:
    answers: dict[str, Tensor] = {}
    for name, position, kept in selection.answers:
        feature = original.feature if position is None or features is None else features[:, position]
        answers[name] = head_output(feature, kept.head_weight, kept.head_bias, kept.scale)
    return Outputs(original, answers)


def check_trained_on(task: Task, backbone: Backbone) -> None:
    """Raise BackboneMismatch unless the task was trained on exactly this backbone: the same shape and weights."""
    trained, here = task.backbone, backbone.identity
    remedy = f"Load {trained.name}, or train the task again on {here.name}."
    if task.regime == "full":  # it names the backbone that it started from; the weights are its own
        remedy = f"Load the backbone that was trained with it: {task.name}.backbone.safetensors beside its task file."
    if (trained.width, trained.depth, trained.heads) != (here.width, here.depth, here.heads):
        raise BackboneMismatch(
            f"task {task.name!r} was trained on {trained.name} (width {trained.width}, {trained.depth} blocks, "
            f"{trained.heads} heads), but the backbone is {here.name} (width {here.width}, {here.depth} blocks, "
            f"{here.heads} heads). {remedy}"
        )
    if trained.fingerprint != here.fingerprint:
        raise BackboneMismatch(
            f"task {task.name!r} was trained on {trained.name} with fingerprint {trained.fingerprint[:12]}…, but the "
            f"backbone {here.name} has {here.fingerprint[:12]}…: same shape, other weights. {remedy}"
        )
