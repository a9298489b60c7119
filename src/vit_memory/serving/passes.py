"""One pass over a batch: all tasks that anybody in it asks for, read once. Runs in the model's thread.

A batch is computed in one chunk or in several, each in a thread of its own (`compute_threads.py`).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
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


def run_pass(batch: Batch, threads: ComputeThreads) -> Pass:
    """Answer a batch. An exception becomes its `error`."""
    task_set, parts = batch.task_set, batch.parts
    union = {name for part in parts for name in part.tasks}
    names = [name for name in task_set.tasks if name in union]  # in one order, so that the model knows them again
    check = any(part.request.check_original for part in parts)
    started = time.monotonic()
    try:
        images = torch.stack([part.pixels for part in parts if part.pixels is not None])
        task_set.model.prepare(names)  # once, before several threads ask for it
        slices = list(chunk_slices(len(parts), threads.threads))
        chunks = threads.map(lambda where: _run_chunk(task_set, images[where], names, check=check), slices)
    except Exception as error:
        return Pass(parts, names, time.monotonic() - started, error=error)
    seconds = time.monotonic() - started
    if not check:
        tokens = tokens_per_image(task_set.model.backbone, images.shape[2:]) + len(names)
        threads.took(len(parts) * tokens, len(slices), seconds)
    return Pass(parts, names, seconds, list(zip(slices, chunks, strict=True)))


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
    each = threads.single_chunk if len(sizes) == 1 else max(1, threads.threads // len(sizes))
    return [(size, each) for size in sizes]


@torch.no_grad()
def _run_chunk(task_set: TaskSet, images: Tensor, names: Sequence[str], *, check: bool) -> _Chunk:
    backbone = task_set.model.backbone
    images = images.to(backbone.device, backbone.dtype)
    outputs = task_set.model(images, names)
    logits = outputs.original.logits
    return _Chunk(
        outputs={name: _rows(output) for name, output in outputs.items()},
        features=_rows(outputs.original.feature.clone()),  # a view would keep all tokens of the batch
        logits=None if logits is None else _rows(logits),
        identical=not changed_fields(outputs.original, library_output(backbone, images)) if check else None,
    )


def _rows(output: Tensor) -> tuple[Tensor, ...]:
    return output.float().cpu().unbind()
