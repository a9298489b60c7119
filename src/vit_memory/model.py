"""MemoryViT: one backbone, its tasks, and all their answers in one pass.

The task set is a snapshot that `add` and `remove` replace, one at a time; a call takes the snapshot once and works on
that, so calls from several threads never see half a change, and no change is lost. There is no active task: a call
names its tasks.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.errors import BackboneMismatch, TaskError
from vit_memory.explanation import Explanation, explain_attention
from vit_memory.fused import run_fused
from vit_memory.graph import TaskGraph
from vit_memory.joining import JoinPlan, PassShape
from vit_memory.outputs import Outputs
from vit_memory.reading import AttentionWeights, read
from vit_memory.regimes import REGIMES
from vit_memory.snapshot import Selection, Snapshot
from vit_memory.task import Task
from vit_memory.trunk import Trunk, patch_mean, run_trunk


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
        self._snapshot = Snapshot(backbone, TaskGraph())
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
            self._snapshot = old.with_graph(old.graph.add(*tasks, branches=branches))

    def remove(self, *names: str, branches: Sequence[str] = ()) -> None:
        """Detach tasks and branches, all or none; refused while another task extends or stands on one of them."""
        with self._write_lock:
            old = self._snapshot
            self._snapshot = old.with_graph(old.graph.remove(*names, branches=branches))

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
        twin._snapshot = old.with_graph(graph)
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
        apart = Snapshot(self.backbone, self.tasks)  # not kept: it holds a graph
        return self._run(images, apart.select(None))

    def _run(self, images: Tensor, selection: Selection) -> Outputs:
        images, roles = self.backbone.check_images(images), self.backbone.roles
        if selection.readers is None and not selection.branches:
            trunk = run_trunk(roles, images, keep=0)
            return selection.apply_heads(trunk.output, trunk.patches, ())
        fused = run_fused(roles, self._plan, selection.readers, images, selection.branches)
        means: dict[str | None, Tensor] = {}

        def patches(branch: str | None) -> Tensor:
            if branch not in means:  # not functools.cache, which torch.compile does not know
                means[branch] = patch_mean(roles, fused.finals[branch])
            return means[branch]

        return selection.apply_heads(fused.finals.__getitem__, patches, fused.readers)

    @torch.no_grad()
    def trunk(self, images: Tensor) -> Trunk:
        """The pass of the original tokens and of all branches, with keys and values to read any task from later."""
        snapshot = self._snapshot
        branches = [snapshot.prepared_branch(branch) for branch in snapshot.graph.branches.values()]
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
        return selection.apply_heads(trunk.output, trunk.patches, outputs)

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
        selection = snapshot.select(tasks)
        readers = selection.readers
        if readers is None:
            return {}
        weights: list[AttentionWeights] = []
        roles = self.backbone.roles
        read(roles, readers, run_trunk(roles, images, branches=selection.branches), weights.append)
        grid = images.shape[-2] // roles.patch_size[0], images.shape[-1] // roles.patch_size[1]
        return {task: explain_attention(graph, task, readers.layout, weights, roles.prefix, grid) for task in tasks}

    def _select(self, tasks: Sequence[str] | None) -> Selection:
        return self._snapshot.select(tasks)

    def _apply(self, fn, recurse: bool = True) -> "MemoryViT":  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        with self._write_lock:
            self._plan = JoinPlan(self.backbone.roles)
            self._snapshot = Snapshot(self.backbone, self.tasks)  # tasks are cast anew from their own float32
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_write_lock"}  # locks are not copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._write_lock = threading.Lock()


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
