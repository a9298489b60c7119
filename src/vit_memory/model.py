"""MemoryViT: one backbone, its tasks, and all their answers in one pass.

The task set is a snapshot that `add` and `remove` replace, one at a time; a call takes the snapshot once and works on
that, so calls from several threads never see half a change, and no change is lost. There is no active task: a call
names its tasks.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.adapter import Adapter
from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.errors import BackboneMismatch, TaskError, UnknownTask
from vit_memory.explanation import Explanation, explain_attention
from vit_memory.families.roles import Roles
from vit_memory.fused import run_fused
from vit_memory.graph import TaskGraph
from vit_memory.joining import JoinPlan, PassShape
from vit_memory.outputs import Original, Outputs
from vit_memory.read_out import ReadOut
from vit_memory.reading import AttentionWeights, ReaderLayout, Readers, lay_out, place_cells, project_cells, read
from vit_memory.regimes import REGIMES
from vit_memory.task import Task, head_output
from vit_memory.trunk import Trunk, patch_mean, run_trunk
from vit_memory.updates import PreparedBranch, group_readers, prepare_adapter, reader_updates

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
    reader: Adapter | None
    read_out: ReadOut


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Where a task's answer comes from."""

    name: str
    branch: str | None  # the key of the branch it stands on; None: the original trunk
    position: int | None  # among the readers; None: it reads the final feature of its trunk
    task: _PreparedTask


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """What a call for certain tasks needs: their readers, their branches, and where each answer comes from."""

    readers: Readers | None  # None where only `head` tasks are asked for
    branches: tuple[PreparedBranch, ...]
    answers: tuple[_Answer, ...]


@dataclass(slots=True, eq=False)
class _Snapshot:
    """One version of the task set, with what was computed for it so far.

    Calls in several threads fill the caches without a lock: a cache is never changed, only replaced by a larger
    copy. Of two replacements at once one is lost, and computed again when it is needed.
    """

    graph: TaskGraph
    prepared: Mapping[str, _PreparedTask] = field(default_factory=dict)
    branches: Mapping[str, PreparedBranch] = field(default_factory=dict)  # by name
    selections: Mapping[tuple[str, ...], _Selection] = field(default_factory=dict)


class MemoryViT(nn.Module):
    """A frozen backbone that answers for any number of tasks in one pass.

    >>> model = MemoryViT(backbone, [new_task(backbone, "pets", ["cat", "dog"])])
    >>> outputs = model(torch.zeros(1, 3, 32, 32))
    >>> tuple(outputs["pets"].shape)
    (1, 2)
    """

    def __init__(self, backbone: Backbone, tasks: Iterable[Task] = (), branches: Iterable[Branch] = ()) -> None:
        super().__init__()
        self.backbone = backbone
        self._plan = JoinPlan(backbone.roles)
        self._write_lock = threading.Lock()  # held by whoever replaces the snapshot; calls do not take it
        self._snapshot = _Snapshot(TaskGraph())
        self.add(*tasks, branches=branches)

    @property
    def tasks(self) -> TaskGraph:
        """The attached tasks, by name; `tasks.branches` are the attached branches."""
        return self._snapshot.graph

    def add(self, *tasks: Task, branches: Iterable[Branch] = ()) -> None:
        """Attach tasks and branches, all or none. Tasks may extend attached ones and each other."""
        branches = tuple(branches)
        for task in tasks:
            check_trained_on(task, self.backbone)
        for branch in branches:
            check_trained_on(branch, self.backbone)
        with self._write_lock:
            old = self._snapshot
            self._snapshot = _Snapshot(old.graph.add(*tasks, branches=branches), old.prepared, old.branches)

    def remove(self, *names: str, branches: Sequence[str] = ()) -> None:
        """Detach tasks and branches, all or none; refused while another task extends or stands on one of them."""
        with self._write_lock:
            old = self._snapshot
            graph = old.graph.remove(*names, branches=branches)
            self._snapshot = _Snapshot(
                graph,
                {name: old.prepared[name] for name in old.prepared if name in graph},
                {name: old.branches[name] for name in old.branches if name in graph.branches},
            )

    def copy(self, tasks: TaskGraph | None = None, *, plan: JoinPlan | None = None) -> "MemoryViT":
        """A model with the same tasks, or with `tasks`, that changes apart from this one.

        The backbone is shared, and so is what was prepared of the tasks and branches that both have: a copy costs what
        is new in it. Moving or casting one of them moves the backbone of both. `plan` is the join plan of its passes,
        by default this model's.

        >>> model = MemoryViT(backbone, [new_task(backbone, "pets", ["cat", "dog"])])
        >>> more = model.copy(model.tasks.add(new_task(backbone, "birds", ["owl", "crow"])))
        >>> list(model.tasks), list(more.tasks)
        (['pets'], ['pets', 'birds'])
        """
        old = self._snapshot
        graph = old.graph if tasks is None else tasks
        for name, task in graph.items():
            if name not in old.graph or old.graph[name] is not task:
                check_trained_on(task, self.backbone)
        for name, branch in graph.branches.items():
            if old.graph.branches.get(name) is not branch:
                check_trained_on(branch, self.backbone)
        twin = MemoryViT(self.backbone)
        twin._plan = self._plan if plan is None else plan
        twin._snapshot = _Snapshot(
            graph,
            {name: p for name, p in old.prepared.items() if name in graph and graph[name] is old.graph[name]},
            {
                name: prepared
                for name, prepared in old.branches.items()
                if graph.branches.get(name) is old.graph.branches[name]
            },
        )
        return twin

    @torch.no_grad()
    def prepare(self, tasks: Sequence[str] | None = None) -> None:
        """Gather now what the first call for `tasks` would gather: their projected memory, readers and branches."""
        self._select(tasks)

    def pass_shapes(
        self, batch: int, size: tuple[int, int], tasks: Sequence[str] | None = None, threads: int | None = None
    ) -> list[PassShape]:
        """The shapes that a call with `batch` images of `size` (height, width) asks the join plan for."""
        selection, roles = self._select(tasks), self.backbone.roles
        rows, columns = size[0] // roles.patch_size[0], size[1] // roles.patch_size[1]
        originals = len(roles.prefix) + rows * columns
        readers = 0 if selection.readers is None else len(selection.readers.tokens)
        starts = [branch.start for branch in selection.branches]
        begun = {0, *(sum(start <= block for start in starts) for block in starts)}
        threads = torch.get_num_threads() if threads is None else threads
        return [
            PassShape(batch, originals, extra, self.backbone.dtype, self.backbone.device, threads)
            for branches in sorted(begun)
            if (extra := branches * originals + readers)
        ]

    @torch.no_grad()
    def forward(self, images: Tensor, tasks: Sequence[str] | None = None) -> Outputs:
        """Answer for `tasks` (all attached ones by default) and for the backbone, in one pass.

        images: (B, C, height, width), floating point, normalised by the backbone's preprocessing. Only the named tasks,
        their ancestors and the branches that these stand on are computed. No gradient is kept; `fit` trains tasks.
        """
        return self._run(images, self._select(tasks))

    def forward_with_graph(self, images: Tensor) -> Outputs:
        """The same pass for all tasks, with a graph to the tensors of tasks and branches that want a gradient.

        It shows which output depends on which tensor. Training has a cheaper pass, without a graph of the trunk.
        """
        graph = self._snapshot.graph
        return self._run(images, self._assemble(_Snapshot(graph), tuple(graph)))  # not cached: it holds a graph

    def _run(self, images: Tensor, selection: _Selection) -> Outputs:
        images, roles = self.backbone.check_images(images), self.backbone.roles
        if selection.readers is None and not selection.branches:
            trunk = run_trunk(roles, images, keep=0)
            return _answer(selection, trunk.output, trunk.patches, ())
        fused = run_fused(roles, self._plan, selection.readers, images, selection.branches)
        means: dict[str | None, Tensor] = {}

        def patches(branch: str | None) -> Tensor:
            if branch not in means:  # not functools.cache, which torch.compile does not know
                means[branch] = patch_mean(roles, fused.finals[branch])
            return means[branch]

        return _answer(selection, fused.finals.__getitem__, patches, fused.readers)

    @torch.no_grad()
    def trunk(self, images: Tensor) -> Trunk:
        """The pass of the original tokens and of all branches, with keys and values to read any task from later."""
        snapshot = self._snapshot
        branches = [self._prepare_branch(snapshot, branch) for branch in snapshot.graph.branches.values()]
        return run_trunk(self.backbone.roles, self.backbone.check_images(images), branches=branches)

    @torch.no_grad()
    def read(self, trunk: Trunk, tasks: Sequence[str] | None = None) -> Outputs:
        """Answer for `tasks` from a trunk made before, by this backbone."""
        selection, roles = self._select(tasks), self.backbone.roles
        if any(branch.key not in trunk.branches for branch in selection.branches):
            raise TaskError(
                "this trunk lacks a branch that was attached later: make it again with model.trunk(images)."
            )
        outputs = () if selection.readers is None else read(roles, selection.readers, trunk)
        return _answer(selection, trunk.output, trunk.patches, outputs)

    def explain(self, image: Tensor, task: str) -> Explanation:
        """Attention of the task's class token on one image (C, height, width) or (1, C, height, width)."""
        return self.explain_tasks(image, (task,))[task]

    @torch.no_grad()
    def explain_tasks(self, image: Tensor, tasks: Sequence[str]) -> dict[str, Explanation]:
        """As `explain`, for several tasks of one image in one pass."""
        snapshot = self._snapshot
        graph = snapshot.graph
        for task in tasks:
            if graph[task].class_token is None:
                raise TaskError(f"task {task!r} is of regime 'head': it has no class token of its own.")
        images = self.backbone.check_images(image[None] if image.dim() == 3 else image)
        if len(images) != 1:
            raise TaskError(f"explain takes one image, {len(images)} given.")
        selection = self._select(tasks, snapshot)
        readers = selection.readers
        if readers is None:
            return {}
        weights: list[AttentionWeights] = []
        roles = self.backbone.roles
        read(roles, readers, run_trunk(roles, images, branches=selection.branches), weights.append)
        grid = images.shape[-2] // roles.patch_size[0], images.shape[-1] // roles.patch_size[1]
        return {task: explain_attention(graph, task, readers.layout, weights, roles.prefix, grid) for task in tasks}

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

    def _assemble(self, snapshot: _Snapshot, wanted: tuple[str, ...]) -> _Selection:
        graph, roles = snapshot.graph, self.backbone.roles
        prepared: dict[str, _PreparedTask] = {}
        for name in graph.with_ancestors(wanted):
            prepared[name] = snapshot.prepared.get(name) or _prepare(graph[name], self.backbone)
        if not torch.compiler.is_compiling():
            snapshot.prepared = {**snapshot.prepared, **prepared}
        stands_on = {name: graph.branch_of(name) for name in prepared}
        branches = {b.name: self._prepare_branch(snapshot, b) for b in stands_on.values() if b is not None}
        keys = {name: None if branch is None else branches[branch.name].key for name, branch in stands_on.items()}
        with_token = [name for name in prepared if prepared[name].token is not None]
        layout = lay_out_tasks(graph, with_token, self.backbone.device, keys)
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
                updates=reader_updates(roles.blocks, len(layout.names), *group_readers(learned)),
                read_out=max(prepared[name].read_out.blocks for name in layout.names),
            )
        answers = tuple(_Answer(name, keys[name], position.get(name), prepared[name]) for name in wanted)
        return _Selection(readers, tuple(branches.values()), answers)

    def _prepare_branch(self, snapshot: _Snapshot, branch: Branch) -> PreparedBranch:
        prepared = snapshot.branches.get(branch.name)
        if prepared is None:
            prepared = prepare_branch(self.backbone, branch, snapshot.graph.branch_digests[branch.name])
            if not torch.compiler.is_compiling():
                snapshot.branches = {**snapshot.branches, branch.name: prepared}
        return prepared

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


def lay_out_tasks(
    graph: TaskGraph, names: Sequence[str], device: torch.device, branches: Mapping[str, str | None] | None = None
) -> ReaderLayout:
    """The layout of the tasks called `names`: all have class tokens, and all their ancestors are among them.

    `branches` are the keys of the branches that they stand on, if any do.
    """
    index = {name: i for i, name in enumerate(names)}
    ancestors = [[index[a] for a in graph.ancestors(name) if a in index] for name in names]
    keys = None if branches is None else [branches[name] for name in names]
    return lay_out(names, ancestors, [graph[name].cells for name in names], keys).to(device)


def to_backbone(backbone: Backbone) -> Callable[[Tensor], Tensor]:
    """Moves a tensor to the backbone's device and dtype.

    Always a copy: tensors of a file lie unaligned in it, and products of unaligned weights round differently.
    """
    return partial(torch.Tensor.to, device=backbone.device, dtype=backbone.dtype, copy=True)


def prepare_branch(backbone: Backbone, branch: Branch, digest: str) -> PreparedBranch:
    """A branch ready for the pass; its key is its digest, which a tracer could not compute."""
    adapter = branch.adapter.map(to_backbone(backbone))
    return prepare_adapter(backbone.roles.blocks, digest, branch.start, adapter)


def _prepare(task: Task, backbone: Backbone) -> _PreparedTask:
    place = to_backbone(backbone)
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


def _answer(
    selection: _Selection,
    final_of: Callable[[str | None], Original],
    patch_mean_of: Callable[[str | None], Tensor],
    outputs: Sequence[Tensor],
) -> Outputs:
    """Apply the heads to what they read: normed class tokens (B, T, D), the last block's first, or features.

    `final_of` and `patch_mean_of` take the key of a branch, or None for the original trunk.
    """
    answers: dict[str, Tensor] = {}
    for answer in selection.answers:
        task = answer.task
        if answer.position is None:
            feature = final_of(answer.branch).feature
        else:
            own = [output[:, answer.position] for output in outputs]
            patches = patch_mean_of(answer.branch) if task.read_out.patches else None
            feature = read_out_features(task.read_out, own, patches)
        answers[answer.name] = head_output(feature, task.head_weight, task.head_bias, task.scale)
    return Outputs(final_of(None), answers)


def read_out_features(read_out: ReadOut, outputs: Sequence[Tensor], patches: Tensor | None) -> Tensor:
    """What a head reads, (B, F), of one class token's outputs (B, D), the last block's first, and the patch mean."""
    parts = list(outputs[: read_out.blocks])
    if read_out.patches:
        assert patches is not None
        parts.append(patches)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def check_trained_on(item: Task | Branch, backbone: Backbone) -> None:
    """Raise BackboneMismatch unless it was trained on exactly this backbone: the same shape and weights."""
    trained, loaded = item.backbone, backbone.identity
    where, again = f"task {item.name!r}", "train the task again"
    if isinstance(item, Branch):
        where, again = f"branch {item.name!r}", "train the branch again"
    remedy = f"Load {trained.name}, or {again} on {loaded.name}."
    if isinstance(item, Task) and REGIMES[item.regime].own_backbone:  # the weights are its own
        remedy = f"Load the backbone that was trained with it: {item.name}.backbone.safetensors beside its task file."
    if (trained.width, trained.depth, trained.heads) != (loaded.width, loaded.depth, loaded.heads):
        raise BackboneMismatch(
            f"{where} was trained on {trained.name} (width {trained.width}, {trained.depth} blocks, "
            f"{trained.heads} heads), but the backbone is {loaded.name} (width {loaded.width}, {loaded.depth} blocks, "
            f"{loaded.heads} heads). {remedy}"
        )
    if trained.fingerprint != loaded.fingerprint:
        raise BackboneMismatch(
            f"{where} was trained on {trained.name} with fingerprint {trained.fingerprint[:12]}…, but the "
            f"backbone {loaded.name} has {loaded.fingerprint[:12]}…: same shape, other weights. {remedy}"
        )
    if isinstance(item, Branch):
        item.adapter.check_backbone(where, backbone, item.blocks)
    elif item.reader is not None:
        item.reader.check_backbone(where, backbone)
