"""One pass over a batch: all tasks that anybody in it asks for, read once. Runs in the model's thread."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vit_memory.evaluation.comparisons import changed_fields, library_output
from vit_memory.explanation import Explanation
from vit_memory.parallel import ChunkThreads, chunk_slices
from vit_memory.serving.answers import OriginalAnswer
from vit_memory.serving.requests import Part, PartResult
from vit_memory.serving.task_set import TaskSet


@dataclass(slots=True, eq=False)
class Pass:
    """A batch, and what its pass gave: chunks of results, or the error."""

    parts: Sequence[Part]
    tasks: Sequence[str]  # that were read
    started: float  # of time.monotonic
    seconds: float = 0.0
    chunks: "Sequence[_Chunk]" = field(default_factory=list)
    error: Exception | None = None

    def results(self) -> list[PartResult]:
        """The result of every part."""
        return [
            PartResult(
                outputs={name: chunk.outputs[name][i] for name in part.tasks},
                original=OriginalAnswer(
                    feature=chunk.features[i],
                    logits=None if chunk.logits is None else chunk.logits[i],
                    identical=chunk.identical if part.request.check_original else None,
                ),
                explanations=chunk.explanations.get(i, {}),
                batch=len(self.parts),
                started=self.started,
                seconds=self.seconds,
            )
            for chunk in self.chunks
            for i, part in enumerate(chunk.parts)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """What was computed by one thread."""

    parts: Sequence[Part]
    outputs: Mapping[str, Sequence[Tensor]]  # task -> per image (C,)
    features: Sequence[Tensor]
    logits: Sequence[Tensor] | None
    identical: bool | None
    explanations: Mapping[int, Mapping[str, Explanation]]  # of the images that want one


def run_pass(parts: Sequence[Part], pool: ChunkThreads) -> Pass:
    """Answer a batch of parts that share a version and an image size. An exception becomes its `error`."""
    task_set = parts[0].request.task_set
    asked = {name for part in parts for name in part.tasks}
    names = [name for name in task_set.tasks if name in asked]  # in one order, so that the model knows them again
    done = Pass(parts, names, time.monotonic())
    try:
        images = torch.stack([part.pixels for part in parts if part.pixels is not None])
        task_set.model.prepare(names)  # once, before several threads ask for it
        slices = list(chunk_slices(len(parts), pool.threads))
        done.chunks = pool.map(lambda where: _run_chunk(task_set, images[where], names, parts[where]), slices)
    except Exception as error:
        done.error = error
    done.seconds = time.monotonic() - done.started
    return done


@torch.no_grad()
def _run_chunk(task_set: TaskSet, images: Tensor, names: Sequence[str], parts: Sequence[Part]) -> _Chunk:
    model = task_set.model
    backbone = model.backbone
    images = images.to(backbone.device, backbone.dtype)
    outputs = model(images, names)
    identical = None
    if any(part.request.check_original for part in parts):
        identical = not changed_fields(outputs.original, library_output(backbone, images))
    logits = outputs.original.logits
    return _Chunk(
        parts=parts,
        outputs={name: _rows(output) for name, output in outputs.items()},
        features=_rows(outputs.original.feature),
        logits=None if logits is None else _rows(logits),
        identical=identical,
        explanations={i: model.explain_tasks(images[i], part.explain) for i, part in enumerate(parts) if part.explain},
    )


def _rows(output: Tensor) -> tuple[Tensor, ...]:
    return output.float().cpu().unbind()
