"""One version of a model's task set: what a call for some of its tasks needs, gathered once and kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vit_memory.adapter import Adapter
from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.errors import UnknownTask
from vit_memory.graph import TaskGraph
from vit_memory.outputs import Original, Outputs
from vit_memory.read_out import ReadOut
from vit_memory.reading import ReaderLayout, Readers, lay_out, place_cells, project_cells
from vit_memory.task import Task, head_output
from vit_memory.updates import PreparedBranch, group_readers, prepare_adapter, reader_updates

_CACHED_SELECTIONS = 32  # task selections whose gathered memory is kept; requests tend to repeat a few


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTask:
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
class Answer:
    """Where a task's answer comes from."""

    name: str
    branch: str | None  # the key of the branch it stands on; None: the original trunk
    position: int | None  # among the readers; None: it reads the final feature of its trunk
    task: PreparedTask


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What a call for certain tasks needs: their readers, their branches, and where each answer comes from."""

    readers: Readers | None  # None where only `head` tasks are asked for
    branches: tuple[PreparedBranch, ...]
    answers: tuple[Answer, ...]

    def apply_heads(
        self,
        final_of: Callable[[str | None], Original],
        patch_mean_of: Callable[[str | None], Tensor],
        outputs: Sequence[Tensor],
    ) -> Outputs:
        """Apply the heads to what they read: normed class tokens (B, T, D), the last block's first, or features.

        `final_of` and `patch_mean_of` take the key of a branch, or None for the original trunk.
        """
        answers: dict[str, Tensor] = {}
        for answer in self.answers:
            task = answer.task
            if answer.position is None:
                feature = final_of(answer.branch).feature
            else:
                own = [output[:, answer.position] for output in outputs]
                patches = patch_mean_of(answer.branch) if task.read_out.patches else None
                feature = _read_out_features(task.read_out, own, patches)
            answers[answer.name] = head_output(feature, task.head_weight, task.head_bias, task.scale)
        return Outputs(final_of(None), answers)


@dataclass(slots=True, eq=False)
class Snapshot:
    """One version of the task set, with what was computed for it so far.

    Calls in several threads fill the caches without a lock: a cache is never changed, only replaced by a larger
    copy. Of two replacements at once one is lost, and computed again when it is needed.
    """

    backbone: Backbone
    graph: TaskGraph
    prepared: Mapping[str, PreparedTask] = field(default_factory=dict)
    branches: Mapping[str, PreparedBranch] = field(default_factory=dict)  # by name
    selections: Mapping[tuple[str, ...], Selection] = field(default_factory=dict)

    def with_graph(self, graph: TaskGraph) -> "Snapshot":
        """A version with other tasks that shares what was prepared of the tasks and branches that both have."""
        old = self.graph
        return Snapshot(
            self.backbone,
            graph,
            {name: task for name, task in self.prepared.items() if name in graph and graph[name] is old[name]},
            {name: one for name, one in self.branches.items() if graph.branches.get(name) is old.branches[name]},
        )

    def select(self, names: Sequence[str] | None) -> Selection:
        """What a call for the tasks called `names` needs; None: for all."""
        if isinstance(names, str):
            raise UnknownTask(f"tasks is {names!r}; give a list of names: [{names!r}].")
        wanted = tuple(self.graph) if names is None else tuple(dict.fromkeys(names))
        selection = self.selections.get(wanted)
        if selection is None:
            selection = self._assemble(wanted)
            if not torch.compiler.is_compiling():  # a tracer's tensors must not outlive the trace
                others = self.selections if len(self.selections) < _CACHED_SELECTIONS else {}
                self.selections = {**others, wanted: selection}
        return selection

    def prepared_branch(self, branch: Branch) -> PreparedBranch:
        """A branch of this version, ready for the pass."""
        prepared = self.branches.get(branch.name)
        if prepared is None:
            prepared = prepare_branch(self.backbone, branch, self.graph.branch_digests[branch.name])
            if not torch.compiler.is_compiling():
                self.branches = {**self.branches, branch.name: prepared}
        return prepared

    def _assemble(self, wanted: tuple[str, ...]) -> Selection:
        graph, roles = self.graph, self.backbone.roles
        prepared: dict[str, PreparedTask] = {}
        for name in graph.with_ancestors(wanted):
            prepared[name] = self.prepared.get(name) or prepare_task(graph[name], self.backbone)
        if not torch.compiler.is_compiling():
            self.prepared = {**self.prepared, **prepared}
        stands_on = {name: graph.branch_of(name) for name in prepared}
        branches = {b.name: self.prepared_branch(b) for b in stands_on.values() if b is not None}
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
        answers = tuple(Answer(name, keys[name], position.get(name), prepared[name]) for name in wanted)
        return Selection(readers, tuple(branches.values()), answers)


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


def prepare_branch(backbone: Backbone, branch: Branch, digest: str) -> PreparedBranch:
    """A branch ready for the pass; its key is its digest, which a tracer could not compute."""
    adapter = branch.adapter.map(_to_backbone(backbone))
    return prepare_adapter(backbone.roles.blocks, digest, branch.start, adapter)


def prepare_task(task: Task, backbone: Backbone) -> PreparedTask:
    """A task ready for the pass."""
    place = _to_backbone(backbone)
    roles = backbone.roles
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
    return PreparedTask(token, keys, values, *head, scale, reader, task.read_out)


def _read_out_features(read_out: ReadOut, outputs: Sequence[Tensor], patches: Tensor | None) -> Tensor:
    """What a head reads, (B, F), of one class token's outputs (B, D), the last block's first, and the patch mean."""
    parts = list(outputs[: read_out.blocks])
    if read_out.patches:
        assert patches is not None
        parts.append(patches)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _to_backbone(backbone: Backbone) -> Callable[[Tensor], Tensor]:
    """Moves a tensor to the backbone's device and dtype.

    Always a copy: tensors of a file lie unaligned in it, and products of unaligned weights round differently.
    """
    return partial(torch.Tensor.to, device=backbone.device, dtype=backbone.dtype, copy=True)


def _token(prepared: PreparedTask) -> Tensor:
    assert prepared.token is not None
    return prepared.token
