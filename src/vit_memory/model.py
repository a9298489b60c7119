"""MemoryViT: one backbone, its tasks, and all their answers in one pass.

The task set is a snapshot that `add` and `remove` replace, one at a time; a call takes the snapshot once and works on
that, so calls from several threads never see half a change, and no change is lost. There is no active task: a call
names its tasks.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.errors import BackboneMismatch, TaskError, UnknownTask
from vit_memory.explanation import Explanation, explain_attention
from vit_memory.families.roles import Roles
from vit_memory.fused import run_fused
from vit_memory.graph import TaskGraph
from vit_memory.joining import JoinPlan
from vit_memory.learned_reader import LearnedReader, ReadOut
from vit_memory.outputs import Original, Outputs
from vit_memory.reader_updates import block_updates, group_readers
from vit_memory.reading import AttentionWeights, ReaderLayout, Readers, lay_out, place_cells, project_cells, read
from vit_memory.regimes import REGIMES
from vit_memory.task import Task, head_output
from vit_memory.trunk import Trunk, patch_mean, run_trunk

_CACHED_SELECTIONS = 32  # task selections whose gathered memory is kept; requests tend to repeat a few


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedTask:
    """A task on the backbone's device and in its dtype, its memory already turned to keys and values."""

    token: Tensor | None  # (D,), as it enters the first block
    keys: tuple[Tensor, ...]  # per block (M, H, A/H)
    values: tuple[Tensor, ...]
    head_weight: Tensor
    head_bias: Tensor
    scale: Tensor | None  # (2, C) of a regression task, float32
    reader: LearnedReader | None
    read_out: ReadOut


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """What a call for certain tasks needs: their readers, and where each task's answer comes from."""

    readers: Readers | None  # None where only `head` tasks are asked for
    # Name, position among the readers (None: it reads the original feature), task.
    answers: tuple[tuple[str, int | None, _PreparedTask], ...]

    @property
    def reads_patches(self) -> bool:
        """Whether a head reads the mean of the patch tokens."""
        return any(prepared.read_out.patches for _, _, prepared in self.answers)


@dataclass(slots=True, eq=False)
class _Snapshot:
    """One version of the task set, with what was computed for it so far.

    Calls in several threads fill the two caches without a lock: a cache is never changed, only replaced by a larger
    copy. Of two replacements at once one is lost, and computed again when it is needed.
    """

    graph: TaskGraph
    prepared: Mapping[str, _PreparedTask] = field(default_factory=dict)
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
            self._snapshot = _Snapshot(old.graph.add(*tasks), old.prepared)

    def remove(self, *names: str) -> None:
        """Detach tasks, all or none; refused while another task extends one of them."""
        with self._write_lock:
            old = self._snapshot
            graph = old.graph.remove(*names)
            self._snapshot = _Snapshot(graph, {name: old.prepared[name] for name in old.prepared if name in graph})

    def forward(self, images: Tensor, tasks: Sequence[str] | None = None) -> Outputs:
        """Answer for `tasks` (all attached ones by default) and for the backbone, in one pass.

        images: (B, C, height, width), floating point, normalised by the backbone's preprocessing. Only the named tasks
        and their ancestors are read. No gradient is kept; `fit` trains tasks.
        """
        images = self.backbone.check_images(images)
        selection = self._select(tasks)
        roles = self.backbone.roles
        if selection.readers is None:
            trunk = run_trunk(roles, images, keep=False)
            return _answer(selection, trunk.original, (), trunk.patch_mean)
        original, outputs = run_fused(roles, self._plan, selection.readers, images)
        mean = patch_mean(roles, original) if selection.reads_patches else None
        return _answer(selection, original, outputs, mean)

    def trunk(self, images: Tensor) -> Trunk:
        """The original tokens' pass alone, with the keys and values that any task can be read from later."""
        return run_trunk(self.backbone.roles, self.backbone.check_images(images))

    @torch.no_grad()
    def read(self, trunk: Trunk, tasks: Sequence[str] | None = None) -> Outputs:
        """Answer for `tasks` from a trunk made before, by this backbone."""
        selection = self._select(tasks)
        outputs = () if selection.readers is None else read(self.backbone.roles, selection.readers, trunk)
        return _answer(selection, trunk.original, outputs, trunk.patch_mean)

    @torch.no_grad()
    def explain(self, image: Tensor, task: str) -> Explanation:
        """Attention of the task's class token on one image (C, height, width) or (1, C, height, width)."""
        snapshot = self._snapshot
        graph = snapshot.graph
        if graph[task].class_token is None:
            raise TaskError(f"task {task!r} is of regime 'head': it has no class token of its own.")
        images = self.backbone.check_images(image[None] if image.dim() == 3 else image)
        if len(images) != 1:
            raise TaskError(f"explain takes one image, {len(images)} given.")
        readers = self._select((task,), snapshot).readers
        assert readers is not None  # a task with a class token has a reader
        weights: list[AttentionWeights] = []
        roles = self.backbone.roles
        read(roles, readers, run_trunk(roles, images), weights.append)
        grid = images.shape[-2] // roles.patch_size[0], images.shape[-1] // roles.patch_size[1]
        return explain_attention(graph, task, readers.layout, weights, roles.prefix, grid)

    def _select(self, names: Sequence[str] | None, snapshot: _Snapshot | None = None) -> _Selection:
        snapshot = snapshot or self._snapshot
        if isinstance(names, str):
            raise UnknownTask(f"tasks is {names!r}; give a list of names: [{names!r}].")
        wanted = tuple(snapshot.graph) if names is None else tuple(dict.fromkeys(names))
        selection = snapshot.selections.get(wanted)
        if selection is None:
            selection = self._assemble(snapshot, wanted)
            if not torch.compiler.is_compiling():  # a tracer's tensors must not outlive the trace
                others = snapshot.selections if len(snapshot.selections) < _CACHED_SELECTIONS else {}
                snapshot.selections = {**others, wanted: selection}
        return selection

    @torch.no_grad()
    def _assemble(self, snapshot: _Snapshot, wanted: tuple[str, ...]) -> _Selection:
        graph, roles = snapshot.graph, self.backbone.roles
        prepared: dict[str, _PreparedTask] = {}
        for name in graph.with_ancestors(wanted):
            prepared[name] = snapshot.prepared.get(name) or _prepare(graph[name], self.backbone)
        if not torch.compiler.is_compiling():
            snapshot.prepared = {**snapshot.prepared, **prepared}
        with_token = [name for name in prepared if prepared[name].token is not None]
        layout = lay_out_tasks(graph, with_token, self.backbone.device)
        position = {name: i for i, name in enumerate(layout.names)}
        readers = None
        if layout.names:
            learned = {i: reader for name, i in position.items() if (reader := prepared[name].reader) is not None}
            readers = Readers(
                layout=layout,
                tokens=torch.stack([_token(prepared[name]) for name in layout.names]),
                memory=tuple(
                    place_cells(
                        layout,
                        torch.cat([prepared[name].keys[i] for name in layout.names]),
                        torch.cat([prepared[name].values[i] for name in layout.names]),
                    )
                    for i in range(len(roles.blocks))
                ),
                updates=block_updates(roles.blocks, len(layout.names), *group_readers(learned)),
                read_out=max(prepared[name].read_out.blocks for name in layout.names),
            )
        return _Selection(readers, tuple((name, position.get(name), prepared[name]) for name in wanted))

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


def lay_out_tasks(graph: TaskGraph, names: Sequence[str], device: torch.device) -> ReaderLayout:
    """The layout of the tasks called `names`: all have class tokens, and all their ancestors are among them."""
    index = {name: i for i, name in enumerate(names)}
    ancestors = [[index[a] for a in graph.ancestors(name) if a in index] for name in names]
    return lay_out(names, ancestors, [graph[name].cells for name in names]).to(device)


def _prepare(task: Task, backbone: Backbone) -> _PreparedTask:
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
    reader = None if task.reader is None else task.reader.map(place)
    head = place(task.head_weight), place(task.head_bias)
    return _PreparedTask(token, keys, values, *head, scale, reader, task.read_out)


def _token(prepared: _PreparedTask) -> Tensor:
    assert prepared.token is not None
    return prepared.token


def _answer(selection: _Selection, original: Original, outputs: Sequence[Tensor], patches: Tensor | None) -> Outputs:
    """Apply the heads to what they read: normed class tokens (B, T, D), the last block's first, and a patch mean."""
    answers: dict[str, Tensor] = {}
    for name, position, prepared in selection.answers:
        if position is None:
            feature = original.feature
        else:
            feature = read_out_features(prepared.read_out, [output[:, position] for output in outputs], patches)
        answers[name] = head_output(feature, prepared.head_weight, prepared.head_bias, prepared.scale)
    return Outputs(original, answers)


def read_out_features(read_out: ReadOut, outputs: Sequence[Tensor], patches: Tensor | None) -> Tensor:
    """What a head reads, (B, F), of one class token's outputs (B, D), the last block's first, and the patch mean."""
    parts = list(outputs[: read_out.blocks])
    if read_out.patches:
        assert patches is not None
        parts.append(patches)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def check_trained_on(task: Task, backbone: Backbone) -> None:
    """Raise BackboneMismatch unless the task was trained on exactly this backbone: the same shape and weights."""
    trained, loaded = task.backbone, backbone.identity
    remedy = f"Load {trained.name}, or train the task again on {loaded.name}."
    if REGIMES[task.regime].own_backbone:  # it names the backbone that it started from; the weights are its own
        remedy = f"Load the backbone that was trained with it: {task.name}.backbone.safetensors beside its task file."
    if (trained.width, trained.depth, trained.heads) != (loaded.width, loaded.depth, loaded.heads):
        raise BackboneMismatch(
            f"task {task.name!r} was trained on {trained.name} (width {trained.width}, {trained.depth} blocks, "
            f"{trained.heads} heads), but the backbone is {loaded.name} (width {loaded.width}, {loaded.depth} blocks, "
            f"{loaded.heads} heads). {remedy}"
        )
    if trained.fingerprint != loaded.fingerprint:
        raise BackboneMismatch(
            f"task {task.name!r} was trained on {trained.name} with fingerprint {trained.fingerprint[:12]}…, but the "
            f"backbone {loaded.name} has {loaded.fingerprint[:12]}…: same shape, other weights. {remedy}"
        )
    if task.reader is not None:
        task.reader.check_backbone(f"task {task.name!r}", backbone)
