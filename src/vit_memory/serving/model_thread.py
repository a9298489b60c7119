"""The model's thread: computes batches and jobs of a queue, and uses idle moments to prove join plans and measure.

Only this thread computes, so a pass never competes with another one for cores. A deferred join plan is proved here,
module by module: when nothing waits, or for a small share of the time that passes take. Proofs in another thread would
slow the pass that they run beside, and would be of another shape: the number of torch's threads belongs to it.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from vit_memory.backbone import Backbone
from vit_memory.data.transforms import view_size
from vit_memory.evaluation.comparisons import library_output
from vit_memory.joining import JoinPlan, PassShape
from vit_memory.parallel import ChunkThreads
from vit_memory.preprocessing import Preprocessing
from vit_memory.serving.passes import Pass, chunk_shapes, explain_part, run_pass
from vit_memory.serving.queueing import BatchQueue
from vit_memory.serving.requests import Part, PartResult
from vit_memory.serving.task_set import Group, TaskSet

log = logging.getLogger(__name__)

_PROOF_SHARE = 0.05  # of the time of passes, while the model is never idle
_QUIET = 0.5  # seconds without a request before the cost of a pass is measured
_PAIRS = 7  # of passes, with and without tasks


class ModelThread:
    """Runs until its queue is stopped. Its callbacks are called in this thread."""

    def __init__(
        self,
        queue: BatchQueue,
        backbone: Backbone,
        plan: JoinPlan,
        threads: int,
        *,
        on_pass: Callable[[Pass], None],
        on_explained: Callable[[Part, PartResult | Exception], None],
        on_cost: Callable[[TaskSet, float], None],
        at_end: Callable[[], None],
    ) -> None:
        self._queue, self._backbone, self._plan = queue, backbone, plan
        self._pool = ChunkThreads(backbone.device, threads)
        self._on_pass, self._on_explained = on_pass, on_explained
        self._on_cost, self._at_end = on_cost, at_end
        self._to_measure: tuple[TaskSet, list[float]] | None = None
        self._pass_seconds = self._proof_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def prepare_for(self, task_set: TaskSet, max_batch: int) -> None:
        """In idle moments, prove the join plan of passes with all tasks of this version, and measure their cost."""
        self._plan.plan_ahead(_shapes(task_set, max_batch, self._pool.threads))
        self._to_measure = task_set, []

    def answer_blank(self, task_set: TaskSet, groups: Sequence[Group]) -> None:
        """Answer a blank image for each of these groups of tasks. In this thread, as a job."""
        for preprocessing, names in groups:
            ordered = [name for name in task_set.tasks if name in names]
            self._pool.map(partial(task_set.model, tasks=ordered), [_blank(task_set, preprocessing)])

    def _run(self) -> None:
        torch.set_num_threads(self._pool.threads)  # of this thread; the pool changes it for each batch
        with self._pool:
            while True:
                work = self._queue.take(self._patience())
                if work is None:
                    break
                if callable(work):
                    work()
                elif work:
                    self._compute(work)
                elif self._plan.has_work:
                    self._prove()
                else:
                    self._measure()
                del work  # it would keep an old version alive until the next batch
        self._at_end()

    def _compute(self, batch: list[Part]) -> None:
        done = run_pass(batch, self._pool)
        self._on_pass(done)
        if any(part.explain for part in batch):
            for part, result in done.results():
                if part.explain:  # as jobs: other batches need not wait for all of them
                    self._queue.run(partial(self._explain, part, result))
        self._pass_seconds += done.seconds
        if self._proof_seconds < _PROOF_SHARE * self._pass_seconds:
            self._prove()

    def _explain(self, part: Part, result: PartResult) -> None:
        if not part.request.given_up:
            self._on_explained(part, explain_part(part, result, self._pool))

    def _patience(self) -> float | None:
        if self._plan.has_work:
            return 0.0
        return None if self._to_measure is None else _QUIET

    def _prove(self) -> None:
        started = time.monotonic()
        self._plan.prove_next()
        self._proof_seconds += time.monotonic() - started

    def _measure(self) -> None:
        """Time one pass with all tasks that share a preprocessing and one without any, on a blank image."""
        measured = self._to_measure
        if measured is None:
            return
        task_set, ratios = measured
        preprocessing, names = task_set.groups[0] if task_set.groups else (None, frozenset())
        ordered = [name for name in task_set.tasks if name in names]
        image = _blank(task_set, preprocessing)

        def seconds(compute: Callable[[torch.Tensor], object]) -> float:
            started = time.perf_counter()
            self._pool.map(compute, [image])
            return time.perf_counter() - started

        plain = seconds(lambda x: library_output(self._backbone, x))
        ratios.append(seconds(lambda x: task_set.model(x, ordered)) / plain)
        if len(ratios) == _PAIRS:
            self._on_cost(task_set, statistics.median(ratios))
            if self._to_measure is measured:
                self._to_measure = None


def _shapes(task_set: TaskSet, max_batch: int, threads: int) -> list[PassShape]:
    """The shapes of passes with all tasks that share a preprocessing, for every batch size."""
    model = task_set.model
    chunks = dict.fromkeys(chunk for batch in range(1, max_batch + 1) for chunk in chunk_shapes(batch, threads))
    return [
        shape
        for preprocessing, names in task_set.groups
        for images, own_threads in chunks
        for shape in model.pass_shapes(
            images, _size(task_set, preprocessing), [name for name in task_set.tasks if name in names], own_threads
        )
    ]


def _blank(task_set: TaskSet, preprocessing: Preprocessing | None) -> torch.Tensor:
    backbone = task_set.model.backbone
    size = _size(task_set, preprocessing)
    return torch.zeros(1, backbone.roles.channels, *size, dtype=backbone.dtype, device=backbone.device)


def _size(task_set: TaskSet, preprocessing: Preprocessing | None) -> tuple[int, int]:
    """(height, width) of images preprocessed so; what the backbone was pretrained at where there are many sizes."""
    if preprocessing is not None and (preprocessing.crop or isinstance(preprocessing.resize, tuple)):
        return view_size(preprocessing)
    return task_set.model.backbone.roles.image_size
