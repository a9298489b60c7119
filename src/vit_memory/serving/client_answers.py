"""Answers of a server as values: what its JSON says, with the types that a program needs. No HTTP here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from vit_memory.errors import RequestFailed, UnknownTask


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """What one task says about one image; which fields are filled follows from its kind."""

    kind: str  # single-label, multi-label or regression
    digest: str  # of the task that answered
    label: str | None  # single-label: the most probable one; None if the task computed NaN
    confidence: float | None
    labels: Mapping[str, float | None]  # multi-label: the labels that are present, with their probabilities
    values: Mapping[str, float | None]  # regression: in the units it was trained with; None for NaN
    top: Mapping[str, float | None]  # the most probable labels, best first

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "TaskAnswer":
        """From JSON."""
        return cls(
            kind=str(answer["kind"]),
            digest=str(answer["digest"]),
            label=answer.get("label"),
            confidence=answer.get("confidence"),
            labels=_probabilities(answer.get("labels")),
            values=dict(answer.get("values") or {}),
            top=_probabilities(answer.get("top")),
        )


@dataclass(frozen=True, slots=True)
class OriginalAnswer:
    """What the backbone itself says, which no task changes."""

    feature_size: int
    top: Mapping[str, float | None]  # empty for a backbone without a head
    identical: bool | None  # whether it is the plain backbone's to the bit; None if that was not asked

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "OriginalAnswer":
        """From JSON."""
        return cls(int(answer["feature_size"]), _probabilities(answer.get("top")), answer.get("identical"))


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Where a task's class token looked in one block, mean over heads; all parts together sum to one."""

    patches: tuple[float | None, ...]  # row by row; None for NaN, as everywhere
    memory: float | None
    itself: float | None
    originals: float | None
    ancestors: Mapping[str, float | None]
    ancestor_memory: Mapping[str, float | None]

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> "BlockAttention":
        """From JSON."""
        return cls(
            patches=tuple(block["patches"]),
            memory=block["memory"],
            itself=block["itself"],
            originals=block["originals"],
            ancestors=dict(block["ancestors"]),
            ancestor_memory=dict(block["ancestor_memory"]),
        )


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """Where a task's class token looked on one image, block by block."""

    grid: tuple[int, int]  # rows and columns of patches
    blocks: tuple[BlockAttention, ...]

    @classmethod
    def of(cls, explanation: Mapping[str, Any]) -> "AttentionMap":
        """From JSON."""
        rows, columns = explanation["grid"]
        return cls((int(rows), int(columns)), tuple(map(BlockAttention.of, explanation["blocks"])))


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """The answers of all tasks for one image, by name; or the error, if this image of several was refused."""

    name: str
    tasks: Mapping[str, TaskAnswer]
    original: OriginalAnswer | None
    explanations: Mapping[str, AttentionMap]
    batch: int  # images that shared the pass
    stages_ms: Mapping[str, float]  # decode, queue, compute
    error: RequestFailed | None = None

    def __getitem__(self, task: str) -> TaskAnswer:
        """The answer of one task; raises the image's error if there is one."""
        if self.error is not None:
            raise self.error
        if task not in self.tasks:
            raise UnknownTask(f"no answer for {task!r}: this call asked for {', '.join(self.tasks) or 'no task'}.")
        return self.tasks[task]

    @classmethod
    def of(cls, image: Mapping[str, Any]) -> "ImageAnswer":
        """From JSON."""
        if "error" in image:
            return cls(str(image["name"]), {}, None, {}, 0, {}, RequestFailed.from_problem(image["error"]))
        return cls(
            name=str(image["name"]),
            tasks={name: TaskAnswer.of(answer) for name, answer in image["tasks"].items()},
            original=OriginalAnswer.of(image["original"]) if image.get("original") else None,
            explanations={name: AttentionMap.of(map_) for name, map_ in (image.get("explanations") or {}).items()},
            batch=int(image["batch"]),
            stages_ms=dict(image["stages_ms"]),
        )


@dataclass(frozen=True, slots=True)
class Answers(Sequence[ImageAnswer]):
    """The answers of one request: one per image, in order, all from one version of the task set."""

    version: str
    images: tuple[ImageAnswer, ...]
    request_id: str
    seconds: float

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Answers":
        """From JSON."""
        images = tuple(map(ImageAnswer.of, body["images"]))
        return cls(str(body["version"]), images, str(body["request_id"]), float(body["seconds"]))

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, index: int) -> ImageAnswer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ImageAnswer]: ...
    def __getitem__(self, index: int | slice) -> ImageAnswer | Sequence[ImageAnswer]:
        return self.images[index]

    def __iter__(self) -> Iterator[ImageAnswer]:
        return iter(self.images)


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as the server describes it."""

    name: str
    kind: str
    regime: str
    method: str
    labels: tuple[str, ...]
    parents: tuple[str, ...]
    branch: str | None
    digest: str
    parameters: int
    size_bytes: int | None
    metrics: Mapping[str, Any]

    @classmethod
    def of(cls, task: Mapping[str, Any]) -> "TaskInfo":
        """From JSON."""
        return cls(
            name=str(task["name"]),
            kind=str(task["kind"]),
            regime=str(task["regime"]),
            method=str(task["method"]),
            labels=tuple(task["labels"]),
            parents=tuple(task["parents"]),
            branch=task.get("branch"),
            digest=str(task["digest"]),
            parameters=int(task["parameters"]),
            size_bytes=task.get("size_bytes"),
            metrics=dict(task.get("metrics") or {}),
        )


@dataclass(frozen=True, slots=True)
class ServedTasks(Mapping[str, TaskInfo]):
    """The tasks that a server answers for, by name, in one version."""

    version: str
    backbone: Mapping[str, Any]  # name, fingerprint, width, depth …
    tasks: Mapping[str, TaskInfo]
    branches: Mapping[str, str]  # name -> digest
    unloaded: tuple[str, ...]  # tasks that the server keeps and does not serve
    read_only: bool

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "ServedTasks":
        """From JSON."""
        return cls(
            version=str(body["version"]),
            backbone=dict(body["backbone"]),
            tasks={task["name"]: TaskInfo.of(task) for task in body["tasks"]},
            branches={branch["name"]: branch["digest"] for branch in body["branches"]},
            unloaded=tuple(body.get("unloaded") or ()),
            read_only=bool(body["read_only"]),
        )

    def __getitem__(self, name: str) -> TaskInfo:
        if name not in self.tasks:
            raise UnknownTask(f"the server has no task {name!r}; it has: {', '.join(self.tasks) or 'none'}.")
        return self.tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


def _probabilities(entries: Any) -> dict[str, float | None]:
    """[{"label", "probability"}, …] in its order."""
    return {str(entry["label"]): entry["probability"] for entry in entries or ()}
