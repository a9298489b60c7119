"""One image that was asked about, and the parts of it that take a pass each."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from vit_memory.errors import TaskError, UnknownTask
from vit_memory.explanation import Explanation
from vit_memory.preprocessing import Preprocessing
from vit_memory.serving.answers import Answer, OriginalAnswer
from vit_memory.serving.task_set import TaskSet


@dataclass(frozen=True, slots=True, eq=False)
class PartResult:
    """What a pass gave for one image."""

    outputs: Mapping[str, Tensor]  # task -> (C,)
    original: OriginalAnswer
    explanations: Mapping[str, Explanation]
    batch: int  # images in the pass
    started: float  # of time.monotonic
    seconds: float


@dataclass(slots=True, eq=False)
class Request:
    """One image that was asked about. Its future is resolved on the event loop only; `done` may be read anywhere."""

    name: str
    content: bytes | Tensor | None  # None once it is decoded or given up
    task_set: TaskSet
    tasks: tuple[str, ...]
    check_original: bool
    deadline: float  # of time.monotonic
    future: asyncio.Future[Answer]
    admitted: float  # of time.monotonic
    parts: list["Part"] = field(default_factory=list)
    decode_seconds: float = 0.0
    waiting: bool = True  # some part of it was not taken by the model

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for the answer any more: cancelled, expired or failed."""
        return self.future.done() or self.deadline <= time.monotonic()

    def answer(self) -> Answer | None:
        """The answer, once all parts have results. Its original output is the first part's."""
        results = [part.result for part in self.parts if part.result is not None]
        if len(results) < len(self.parts):
            return None
        first = results[0]
        outputs = {name: output for result in results for name, output in result.outputs.items()}
        compared = [result.original.identical for result in results]
        compute = sum(result.seconds for result in results)
        ended = max(result.started + result.seconds for result in results)
        return Answer(
            version=self.task_set.version,
            outputs=first.outputs if len(results) == 1 else {name: outputs[name] for name in self.tasks},
            digests={name: self.task_set.digests[name] for name in self.tasks},
            explanations={name: one for result in results for name, one in result.explanations.items()},
            original=first.original if len(results) == 1 else replace(first.original, identical=_all(compared)),
            batch=first.batch,
            stages={
                "decode": self.decode_seconds,
                "queue": max(0.0, ended - self.admitted - self.decode_seconds - compute),
                "compute": compute,
            },
        )


@dataclass(slots=True, eq=False)
class Part:
    """What one pass has to answer of a request: the tasks whose images are preprocessed alike."""

    request: Request
    preprocessing: Preprocessing | None  # None: the image is a normalised tensor
    tasks: tuple[str, ...]
    explain: tuple[str, ...]
    pixels: Tensor | None = None  # (3, height, width), normalised
    ready: float = 0.0  # when it could be computed
    result: PartResult | None = None
    taken: bool = False  # by the model's thread, which needs its pixels

    @property
    def key(self) -> tuple[TaskSet, tuple[int, ...]]:
        """Parts with the same key can share a pass: one version, one image size."""
        assert self.pixels is not None
        return self.request.task_set, tuple(self.pixels.shape)


def split_request(request: Request, tasks: Sequence[str] | None, explain: Sequence[str]) -> None:
    """Give a request its parts, one for each preprocessing that its tasks were trained with, or raise.

    The first one is preprocessed as the backbone wants it, if any task is: its original output is the answer's. A
    tensor is one part: it is preprocessed already.
    """
    task_set = request.task_set
    graph = task_set.tasks
    names = tuple(graph) if tasks is None else _unique("tasks", tasks)
    explained = _unique("explain", explain)
    for name in (*names, *explained):
        if graph[name].class_token is None and name in explained:  # graph[name] raises UnknownTask
            raise TaskError(f"task {name!r} is of regime 'head': it has no attention of its own to explain.")
    request.tasks = names
    if isinstance(request.content, Tensor):
        request.parts = [Part(request, None, names, explained)]
        return
    groups = dict(task_set.groups(dict.fromkeys((*names, *explained))))
    if not groups:
        groups = {task_set.known_preprocessing(): ()}
    own = task_set.model.backbone.preprocessing
    for preprocessing in sorted(groups, key=lambda one: one != own):
        group = groups[preprocessing]
        answered = names if group == names else tuple(name for name in group if name in names)
        attention = tuple(name for name in explained if name in group)
        request.parts.append(Part(request, preprocessing, answered, attention))


def _unique(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise UnknownTask(f"{what} is {names!r}; give a list of names: [{names!r}].")
    return tuple(dict.fromkeys(names))


def _all(compared: Sequence[bool | None]) -> bool | None:
    return None if None in compared else all(compared)
