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
    batch: int  # images in the pass
    seconds: float
    explanations: Mapping[str, Explanation] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Request:
    """One image that was asked about. Its future is resolved on the event loop only; `given_up` is read anywhere."""

    name: str  # in messages
    content: bytes | Tensor | None  # None: it has ended
    task_set: TaskSet
    tasks: tuple[str, ...]
    check_original: bool
    admitted: float  # of time.monotonic
    deadline: float  # of time.monotonic
    future: asyncio.Future[Answer]
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
        compute = sum(result.seconds for result in results)
        queue = max(0.0, time.monotonic() - self.admitted - self.decode_seconds - compute)
        every = self.task_set.digests
        return Answer(
            version=self.task_set.version,
            outputs=first.outputs if len(results) == 1 else _in_order(self.tasks, results),
            digests=every if len(self.tasks) == len(every) else {name: every[name] for name in self.tasks},
            explanations={name: one for result in results for name, one in result.explanations.items()},
            original=first.original if len(results) == 1 else _checked_in_all(results),
            batch=first.batch,
            stages={"decode": self.decode_seconds, "queue": queue, "compute": compute},
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
    taken: bool = False  # by the model's thread, which needs its pixels
    result: PartResult | None = None


def split_request(request: Request, tasks: Sequence[str] | None, explain: Sequence[str]) -> None:
    """Give a request its parts, one for each preprocessing that its tasks were trained with, or raise.

    A tensor is one part: it is preprocessed already.
    """
    task_set = request.task_set
    graph = task_set.tasks
    names = tuple(graph) if tasks is None else _unique("tasks", tasks)
    explained = _unique("explain", explain)
    for name in names if tasks is not None else ():
        graph[name]  # raises UnknownTask
    for name in explained:
        if graph[name].class_token is None:
            raise TaskError(f"task {name!r} is of regime 'head': it has no attention of its own to explain.")
    request.tasks = names
    if isinstance(request.content, Tensor):
        request.parts = [Part(request, None, names, explained)]
        return
    backbone = task_set.model.backbone
    for preprocessing, group in task_set.split(tuple(dict.fromkeys((*names, *explained)))):
        if preprocessing is None:
            raise TaskError(
                f"neither {', '.join(group) or 'a task'} nor {backbone.name} define how images are preprocessed: give "
                f"a normalised tensor instead of an encoded image."
            )
        answered = names if group == names else tuple(name for name in group if name in names)
        attention = tuple(name for name in explained if name in group)
        request.parts.append(Part(request, preprocessing, answered, attention))


def _unique(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise UnknownTask(f"{what} is {names!r}; give a list of names: [{names!r}].")
    return tuple(dict.fromkeys(names))


def _in_order(names: Sequence[str], results: Sequence[PartResult]) -> dict[str, Tensor]:
    outputs = {name: output for result in results for name, output in result.outputs.items()}
    return {name: outputs[name] for name in names}


def _checked_in_all(results: Sequence[PartResult]) -> OriginalAnswer:
    """The first one's original output; identical if that of every pass is."""
    identical = [result.original.identical for result in results]
    return replace(results[0].original, identical=None if None in identical else all(identical))
