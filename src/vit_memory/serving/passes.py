"""One pass over a batch: all tasks that anybody in it asks for, read once. Begun and ended in the model's thread.

A batch is computed in one chunk or in several, each in a thread of its own (`compute_threads.py`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.evaluation.comparisons import changed_fields, library_output
from vit_memory.parallel import chunk_slices
from vit_memory.serving.answers import OriginalAnswer
from vit_memory.serving.compute_threads import ComputeThreads
from vit_memory.serving.queueing import Batch
from vit_memory.serving.requests import Part, PartResult
from vit_memory.serving.task_set import TaskSet


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """What was computed by one thread."""

    outputs: Mapping[str, Sequence[Tensor]]  # task -> per image (C,)
    features: Sequence[Tensor]
    logits: Sequence[Tensor] | None
    identical: bool | None
    started: float  # of time.monotonic
    ended: float


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A batch, and what its pass gave: results by chunk, or the error."""

    parts: Sequence[Part]
    tasks: Sequence[str]  # that were read
    seconds: float
    chunks: Sequence[tuple[slice, _Chunk]] = ()
    error: Exception | None = None

    def results(self) -> Iterator[tuple[Part, PartResult]]:
        """The result of every part, without explanations."""
        for where, chunk in self.chunks:
            for i, part in enumerate(self.parts[where]):
                original = OriginalAnswer(
                    feature=chunk.features[i],
                    logits=None if chunk.logits is None else chunk.logits[i],
                    identical=chunk.identical if part.request.check_original else None,
                )
                outputs = {name: chunk.outputs[name][i] for name in part.tasks}
                yield part, PartResult(outputs, original, len(self.parts), self.seconds)


@dataclass(frozen=True, slots=True, eq=False)
class RunningPass:
    """A batch whose chunks are being computed, or wait for a thread."""

    batch: Batch
    tasks: Sequence[str]
    slices: Sequence[slice]
    chunks: Sequence[Future[_Chunk]]
    beside_others: bool
    started: float  # of time.monotonic

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to compute."""
        return all(chunk.done() for chunk in self.chunks)

    def after_each_chunk(self, callback: Callable[[], None]) -> None:
        """Call back when a chunk is done, in the thread that computed it."""
        for chunk in self.chunks:
            chunk.add_done_callback(lambda _: callback())  # without self: futures keep their callbacks for ever


def start_pass(batch: Batch, threads: ComputeThreads, *, beside_others: bool = False) -> RunningPass:
    """Begin to answer a batch; `beside_others` while chunks of another one are being computed."""
    task_set, parts = batch.task_set, batch.parts
    union = {name for part in parts for name in part.tasks}
    names = [name for name in task_set.tasks if name in union]  # in one order, so that the model knows them again
    check = _is_checked(batch)
    slices = list(chunk_slices(len(parts), threads.threads))
    started = time.monotonic()
    try:
        images = torch.stack([part.pixels for part in parts if part.pixels is not None])
        task_set.model.prepare(names)  # once, before several threads ask for it
        chunks = threads.start(
            lambda where: _run_chunk(task_set, images[where], names, check=check), slices, beside_others=beside_others
        )
    except Exception as error:
        failed: Future[_Chunk] = Future()
        failed.set_exception(error)
        chunks = [failed]
    return RunningPass(batch, names, slices, chunks, beside_others, started)


def finish_pass(running: RunningPass, threads: ComputeThreads) -> Pass:
    """Wait for the answers to a batch. An exception becomes their `error`."""
    wait(running.chunks)
    batch, parts = running.batch, running.batch.parts
    try:
        chunks = [chunk.result() for chunk in running.chunks]
    except Exception as error:
        return Pass(parts, running.tasks, time.monotonic() - running.started, error=error)
    seconds = max(chunk.ended for chunk in chunks) - min(chunk.started for chunk in chunks)
    if not running.beside_others and not _is_checked(batch):
        assert parts[0].pixels is not None
        tokens = tokens_per_image(batch.task_set.model.backbone, parts[0].pixels.shape[1:]) + len(running.tasks)
        threads.took(len(parts) * tokens, len(chunks), seconds)
    return Pass(parts, running.tasks, seconds, list(zip(running.slices, chunks, strict=True)))


def _is_checked(batch: Batch) -> bool:
    """Whether the batch is compared with the library's own forward, which takes as long again."""
    return any(part.request.check_original for part in batch.parts)


def explain_part(part: Part, result: PartResult, threads: ComputeThreads) -> PartResult | Exception:
    """The result with the explanations that were asked for: one more pass over that image."""
    started = time.monotonic()
    model, pixels = part.request.task_set.model, part.pixels
    assert pixels is not None
    try:
        (explanations,) = threads.map(
            lambda image: model.explain_tasks(image, part.explain), [pixels.to(model.backbone.device)]
        )
    except Exception as error:
        return error
    return replace(result, explanations=explanations, seconds=result.seconds + time.monotonic() - started)


def tokens_per_image(backbone: Backbone, size: Sequence[int]) -> int:
    """The patches of an image of `size` (height, width)."""
    height, width = backbone.roles.patch_size
    return (size[0] // height) * (size[1] // width)


def chunk_shapes(batch: int, threads: ComputeThreads) -> list[tuple[int, int]]:
    """The (images, torch threads) of the chunks that a batch is computed in."""
    sizes = [where.stop - where.start for where in chunk_slices(batch, threads.threads)]
    return [(size, threads.torch_threads(len(sizes))) for size in sizes]


@torch.no_grad()
def _run_chunk(task_set: TaskSet, images: Tensor, names: Sequence[str], *, check: bool) -> _Chunk:
    started = time.monotonic()
    backbone = task_set.model.backbone
    images = images.to(backbone.device, backbone.dtype)
    outputs = task_set.model(images, names)
    logits = outputs.original.logits
    return _Chunk(
        outputs={name: _rows(output) for name, output in outputs.items()},
        features=_rows(outputs.original.feature.clone()),  # a view would keep all tokens of the batch
        logits=None if logits is None else _rows(logits),
        identical=not changed_fields(outputs.original, library_output(backbone, images)) if check else None,
        started=started,
        ended=time.monotonic(),
    )


def _rows(output: Tensor) -> tuple[Tensor, ...]:
    return output.float().cpu().unbind()
