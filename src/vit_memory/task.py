"""What a task is: a small frozen value that cannot be built wrong."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_memory.adapter import DEFAULT_PROJECTIONS, Adapter, new_adapter
from vit_memory.backbone import Backbone, BackboneIdentity
from vit_memory.choices import Kind, Projection, Regime, Start
from vit_memory.errors import TaskError
from vit_memory.preprocessing import Preprocessing
from vit_memory.read_out import FINAL, ReadOut
from vit_memory.regimes import REGIMES

MEMORY_STD = 0.02  # the paper's, for memory cells drawn before the norm


@dataclass(frozen=True, slots=True)
class TargetScale:
    """The mean and the standard deviation of each value of a regression task, in the user's units.

    The head answers in standard deviations from the mean; multiplied and added here, in float32 at least, a value
    keeps its precision also where the task is kept in float16.
    """

    mean: tuple[float, ...]  # (C,)
    std: tuple[float, ...]  # (C,), above 0

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """(2, C) float32: mean, then standard deviation."""
        return torch.tensor([self.mean, self.std], dtype=torch.float32, device=device)


def head_output(feature: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None) -> Tensor:
    """A task's answer (…, C) to features (…, F): logits, or with a `scale` (2, C) values in the user's units."""
    output = F.linear(feature, weight, bias)
    return output if scale is None else output * scale[1] + scale[0]


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """Where a task or a branch comes from, for people and for later runs. No answer depends on it."""

    created: str = ""  # ISO 8601, UTC
    library_version: str = ""
    preprocessing: Preprocessing | None = None  # what its images went through
    recipe: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    metrics: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    half_of: str | None = None  # where the file keeps float16: the digest of the task in full


@dataclass(frozen=True, slots=True)
class BranchRef:
    """The branch that a task stands on: found by its digest, named for people."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        check_name(self.name, "branch")

    @property
    def ref(self) -> "BranchRef":
        """Itself."""
        return self


class BranchLike(Protocol):
    """A `Branch`, or a reference to one."""

    @property
    def ref(self) -> BranchRef: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)  # eq=False: comparing tensors gives no single bool
class Task:
    """One task: what it answers, what it learned, and the backbone it learned it on.

    `class_token` is the vector that enters where the original class token enters, position included. Memory cells are
    keys and values only; they pass the block's first norm like every token of the block, unless `raw_memory` (files of
    the 2023 reproduction, which put them in after it). `reader` is what a task of regime `reader` learned about how its
    class token reads, and `read_out` what its head reads: F = D values, or a multiple. `parents` are names of the tasks
    this one extends, and `parent_digests` what their content was when it learned to read them. A task on a `branch`
    reads the branch's tokens instead of the original ones, from the branch's start block on.
    """

    name: str
    labels: tuple[str, ...]
    head_weight: Tensor  # (C, F)
    head_bias: Tensor  # (C,)
    class_token: Tensor | None  # (D,); None for regimes without one of their own
    memory: Tensor  # (L, M, D); M = 0 means class token and head alone
    backbone: BackboneIdentity
    regime: Regime = "memory"
    kind: Kind = "single-label"
    parents: tuple[str, ...] = ()
    raw_memory: bool = False
    parent_digests: Mapping[str, str] = field(default_factory=dict)  # of the parents that are pinned
    thresholds: tuple[float, ...] | None = None  # (C,) multi-label: probability from which a label counts as present
    target_scale: TargetScale | None = None  # regression: the user's units; None answers as the head does
    reader: Adapter | None = None  # regime `reader` only
    read_out: ReadOut = FINAL
    branch: BranchRef | None = None  # None: it reads the original tokens
    record: TaskRecord = field(default_factory=TaskRecord)

    def __post_init__(self) -> None:
        check_name(self.name)
        where, width, depth = f"task {self.name!r}", self.backbone.width, self.backbone.depth
        if not self.labels:
            raise TaskError(f"{where}: the label list is empty; a task answers at least one label.")
        if len(set(self.labels)) != len(self.labels):
            twice = sorted({label for label in self.labels if self.labels.count(label) > 1})
            raise TaskError(f"{where}: labels given twice: {', '.join(twice)}.")
        check_choice(where, "regime", self.regime, get_args(Regime))
        check_choice(where, "kind", self.kind, get_args(Kind))
        self.read_out.check(where, depth)
        self._check_shape("head_weight", self.head_weight, (len(self.labels), self.read_out.parts * width))
        self._check_shape("head_bias", self.head_bias, (len(self.labels),))
        self._check_shape("memory", self.memory, (depth, self.cells, width))
        facts = REGIMES[self.regime]
        if facts.class_token:
            if self.class_token is None:
                raise TaskError(f"{where}: regime {self.regime!r} needs a class token.")
            self._check_shape("class_token", self.class_token, (width,))
        elif self.class_token is not None or self.cells:
            raise TaskError(f"{where}: regime {self.regime!r} has no class token or memory cells of its own.")
        if self.cells and not facts.cells:
            raise TaskError(
                f"{where}: regime {self.regime!r} has no memory cells, {self.cells} given; regime 'memory' has."
            )
        self._check_reader(where)
        if self.branch is not None and facts.conflict is not None:
            raise TaskError(f"{where}: a task of regime {self.regime!r} cannot stand on a branch: {facts.conflict}.")
        if self.name in self.parents:
            raise TaskError(f"{where} extends itself.")
        if len(set(self.parents)) != len(self.parents):
            raise TaskError(f"{where}: a parent is given twice: {', '.join(self.parents)}.")
        for parent in self.parents:
            check_name(parent)
        strangers = sorted(set(self.parent_digests) - set(self.parents))
        if strangers:
            raise TaskError(f"{where}: digests of tasks it does not extend: {', '.join(strangers)}.")
        self._check_kind(where)

    def _check_reader(self, where: str) -> None:
        if not REGIMES[self.regime].reader:
            if self.reader is not None or self.read_out != FINAL:
                raise TaskError(
                    f"{where}: gains, low-rank updates and read-outs belong to regime 'reader', this one is of regime "
                    f"{self.regime!r}."
                )
            return
        if self.reader is None:
            raise TaskError(f"{where}: regime 'reader' needs a learned reader.")
        if self.reader.empty and self.read_out == FINAL:
            raise TaskError(
                f"{where}: a reader without gains, low-rank updates or read-outs has nothing to learn. Give it one of "
                f"them, or use regime 'class' or 'memory'."
            )
        self.reader.check(where, self.backbone.depth, self.backbone.width)
        if self.reader.scaled_by_block:  # its file format has one scaling per projection
            raise TaskError(f"{where}: a scaling for every block is for branches; multiply it into B.")

    def _check_kind(self, where: str) -> None:
        if self.thresholds is not None:
            if self.kind != "multi-label":
                raise TaskError(f"{where}: thresholds belong to multi-label tasks, this one is {self.kind}.")
            if len(self.thresholds) != len(self.labels) or not all(0 <= t <= 1 for t in self.thresholds):
                raise TaskError(f"{where}: expected {len(self.labels)} thresholds between 0 and 1, one per label.")
        if self.target_scale is not None:
            mean, std = self.target_scale.mean, self.target_scale.std
            if self.kind != "regression":
                raise TaskError(f"{where}: a target scale belongs to regression tasks, this one is {self.kind}.")
            fine = all(map(math.isfinite, (*mean, *std))) and all(value > 0 for value in std)
            if not fine or not len(mean) == len(std) == len(self.labels):
                raise TaskError(
                    f"{where}: the target scale needs a finite mean and a standard deviation above 0 for each of "
                    f"{len(self.labels)} values."
                )

    def _check_shape(self, part: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            raise TaskError(
                f"task {self.name!r}: {part} is {tuple(tensor.shape)} {tensor.dtype}, expected {expected} of a "
                f"floating type: {len(self.labels)} labels on {self.backbone.name} "
                f"(width {self.backbone.width}, {self.backbone.depth} blocks)."
            )

    @property
    def cells(self) -> int:
        """M, the memory cells per block."""
        return self.memory.shape[1] if self.memory.dim() == 3 else 0

    @property
    def parameters(self) -> int:
        """How many parameters were learned."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def method(self) -> str:
        """What it learns besides its head, for tables: `class`, `5 cells`, `rank 8 + gains`, `propagated 5 cells`."""
        cells = f"{self.cells} cell{'' if self.cells == 1 else 's'}" if self.cells else ""
        if self.reader is None:
            return cells if self.regime == "memory" and cells else f"{self.regime} {cells}".strip()
        read_out = "" if self.read_out == FINAL else str(self.read_out)
        return " + ".join(filter(None, (str(self.reader), cells, read_out)))

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, by name, in a fixed order."""
        token = {} if self.class_token is None else {"class_token": self.class_token}
        head = {"memory": self.memory, "head.weight": self.head_weight, "head.bias": self.head_bias}
        return {**token, **head, **dict(self.reader.tensors() if self.reader is not None else ())}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Task":
        """The same task with every tensor changed; shapes must stay."""
        return replace(
            self,
            class_token=None if self.class_token is None else change(self.class_token),
            memory=change(self.memory),
            head_weight=change(self.head_weight),
            head_bias=change(self.head_bias),
            reader=None if self.reader is None else self.reader.map(change),
        )

    @property
    def digest(self) -> str:
        """A hash of all that decides its answers for preprocessed images: labels, tensors, parents, backbone and so on.

        Neither its name nor its `record` is part of it, so it does not cover how images are preprocessed: two tasks
        with one digest may answer differently for the same file. Compare `record.preprocessing` too where that matters.
        """
        described: dict[str, Any] = {
            "labels": self.labels,
            "kind": self.kind,
            "regime": self.regime,
            "raw_memory": self.raw_memory,
            "parents": [self.parent_digests.get(name, name) for name in self.parents],
            "backbone": self.backbone.fingerprint,
        }
        if self.thresholds is not None:  # only where there are any: digests of other tasks stay what they were
            described["thresholds"] = self.thresholds
        if self.target_scale is not None:
            described["target_scale"] = [self.target_scale.mean, self.target_scale.std]
        if self.reader is not None:
            described["reader"] = [name for name, _ in self.reader.tensors()]
            described["read_out"] = str(self.read_out)
            if self.reader.scalings:
                described["scaling"] = self.reader.scalings
        if self.branch is not None:
            described["branch"] = self.branch.digest
        return content_digest(described, self.tensors().values())

    def answer(self, feature: Tensor) -> Tensor:
        """Its output (…, C) for what its head reads (…, F): final, normed class tokens, or pooled features."""
        scale = None if self.target_scale is None else self.target_scale.tensor(feature.device)
        return head_output(feature, self.head_weight.to(feature), self.head_bias.to(feature), scale)


def new_task(
    backbone: Backbone,
    name: str,
    labels: Sequence[str],
    *,
    cells: int | None = None,
    regime: Regime = "memory",
    kind: Kind = "single-label",
    parents: Sequence["Task | str"] = (),
    start: Start = "original",
    memory_std: float = MEMORY_STD,
    rank: int | None = None,
    gains: bool = False,
    projections: Sequence[Projection] = DEFAULT_PROJECTIONS,
    read_out: str | ReadOut = FINAL,
    branch: BranchLike | None = None,
    generator: torch.Generator | None = None,
) -> Task:
    """A task before training: class token as the original one, cells from N(0, `memory_std`), head at zero.

    `cells` defaults to 5 in the memory regimes, and to none in the others. Regime `reader` takes `gains`, the `rank` of
    low-rank updates of `projections`, and a `read_out`: final, patches, blocks:N, or several joined by +. Untrained, a
    reader answers as regime `class` (or `memory`, with cells) does. Parents given as tasks are pinned
    to their content: the new task will not attach beside others of their names. With a `branch` it reads
    that branch. Tensors are float32 on the CPU, whatever the backbone computes in.

    >>> task = new_task(backbone, "pets", ["cat", "dog"], cells=5)
    >>> tuple(task.memory.shape) == (backbone.depth, 5, backbone.width)
    True
    >>> new_task(backbone, "pets", ["cat", "dog"], regime="reader", rank=8, gains=True).method
    'rank 8 + gains'
    """
    where = f"task {name!r}"
    check_choice(where, "regime", regime, get_args(Regime))
    facts = REGIMES[regime]
    cells = facts.default_cells if cells is None else cells
    if cells < 0:
        raise TaskError(f"{where}: {cells} memory cells; expected 0 or more per block.")
    if cells and not facts.cells:
        raise TaskError(f"{where}: regime {regime!r} has no memory cells, {cells} given.")
    check_choice(where, "start", start, get_args(Start))
    read_out = ReadOut.parse(read_out)
    if not facts.reader and (rank is not None or gains or read_out != FINAL):
        raise TaskError(
            f"{where}: a rank, gains and a read-out belong to regime 'reader', this one is of regime {regime!r}."
        )

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * memory_std

    token = backbone.initial_class_token().to("cpu", torch.float32) if start == "original" else drawn(backbone.width)
    memory = drawn(backbone.depth, cells, backbone.width)
    reader = None
    if facts.reader:
        reader = new_adapter(backbone, where, rank=rank, gains=gains, projections=projections, generator=generator)
    return Task(
        name=name,
        labels=tuple(labels),
        head_weight=torch.zeros(len(labels), read_out.parts * backbone.width),
        head_bias=torch.zeros(len(labels)),
        class_token=token if facts.class_token else None,
        memory=memory,
        reader=reader,
        read_out=read_out,
        branch=None if branch is None else branch.ref,
        backbone=backbone.identity,
        regime=regime,
        kind=kind,
        parents=tuple(parent if isinstance(parent, str) else parent.name for parent in parents),
        parent_digests={parent.name: parent.digest for parent in parents if isinstance(parent, Task)},
        record=new_record(backbone),
    )


def new_record(backbone: Backbone) -> TaskRecord:
    """The record of something that is made now."""
    return TaskRecord(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        library_version=version("vit-memory"),
        preprocessing=backbone.preprocessing,
    )


def content_digest(described: Mapping[str, Any], tensors: Iterable[Tensor]) -> str:
    """A hash of JSON values and tensors; their precision does not count."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for tensor in tensors:
        values = tensor.detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{tuple(values.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def check_name(name: str, what: str = "task") -> None:
    """Names of tasks and branches end up in files, addresses and tables: letters, digits, and . _ - inside."""
    allowed = all(character.isalnum() or character in "._-" for character in name)
    if not name or not allowed or not name[0].isalnum() or len(name) > 100:
        raise TaskError(
            f"{what} name {name!r}: use 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit."
        )


def check_choice(where: str, what: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not one of the choices, naming them."""
    if value not in choices:
        raise TaskError(f"{where}: {what} {value!r} is none of {', '.join(choices)}.")
