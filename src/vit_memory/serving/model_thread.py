"""The model's thread: computes batches and jobs of a queue, and uses idle moments to prove join plans and measure.

Only this thread gives work to the threads that compute, so a pass never competes with another one for cores. Where full
batches wait, it gives them the next one before the last is done: a thread that has ended its chunk begins the next one,
and waits neither for the slowest nor for answers to be sent. A deferred join plan is proved here,
module by module: when nothing waits, or for a small share of the time that passes take. Proofs in another thread would
slow the pass that they run beside, and would be of another shape: the number of torch's threads belongs to it.
"""

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from vit_memory.backbone import Backbone
from vit_memory.data.transforms import view_size
from vit_memory.evaluation.comparisons import library_output
from vit_memory.joining import JoinPlan, PassShape
from vit_memory.preprocessing import Preprocessing
from vit_memory.serving.compute_threads import ComputeThreads
from vit_memory.serving.passes import (
    Pass,
    RunningPass,
    chunk_shapes,
    explain_part,
    finish_pass,
    start_pass,
    tokens_per_image,
)
from vit_memory.serving.queueing import Batch, BatchQueue
from vit_memory.serving.requests import Part, PartResult
from vit_memory.serving.task_set import Group, TaskSet

log = logging.getLogger(__name__)

_PROOF_SHARE = 0.05  # of the time of passes, while the model is never idle
_QUIET = 0.5  # seconds without a request before the cost of a pass is measured
_COMPARED = 4  # images that one thread and all compute in turn; a single one says little about small batches
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
        self._threads = ComputeThreads(backbone.device, threads)
        self._on_pass, self._on_explained = on_pass, on_explained
        self._on_cost, self._at_end = on_cost, at_end
        self._to_measure: tuple[TaskSet, list[float]] | None = None
        self._idle_work = True
        self._pass_seconds = self._proof_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def prepare_for(self, task_set: TaskSet, max_batch: int) -> None:
        """In idle moments from now on, prove the join plan of passes with all tasks of this version, and measure them.

        In this thread, as a job, so that the thread wakes up for it.
        """
        self._plan.plan_ahead(_shapes(task_set, max_batch, self._threads))
        self._to_measure = task_set, []

    def answer_blank(self, task_set: TaskSet, groups: Sequence[Group]) -> None:
        """Answer a blank image for each of these groups of tasks. In this thread, as a job."""
        for preprocessing, names in groups:
            compute = partial(task_set.model, tasks=[name for name in task_set.tasks if name in names])
            self._threads.map(compute, [_blank(self._backbone, _size(self._backbone, preprocessing))])

    def _run(self) -> None:
        try:
            with self._threads:
                self._use_idle_moment()
                self._work()
        finally:
            self._queue.stop()
            self._at_end()

    def _work(self) -> None:
        while (work := self._queue.take(self._use_idle_moment, self._patience())) is not None:
            try:
                if isinstance(work, Batch):
                    running = deque([self._start(work)])
                    work = None  # it would keep an old version alive for as long as full batches follow
                    self._compute(running)
                else:
                    work()
            except Exception:  # a bug of ours: other requests are answered nevertheless
                log.exception("the model's thread goes on after an error")
            work = None  # or until the next one comes

    def _use_idle_moment(self) -> None:
        if self._plan.has_work:
            self._attempt(self._prove)
        elif self._to_measure is not None:
            self._attempt(partial(self._measure, self._to_measure))
        elif self._threads.should_compare:
            self._attempt(self._compare_threads)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # requests are answered without any of it
            log.exception("work for idle moments failed; it is left out from now on")
            self._idle_work = False

    def _compute(self, running: deque[RunningPass]) -> None:
        """Finish a pass, and those of full batches that come while chunks of it are being computed."""
        while running:
            following = self._following(running)
            if following is None:
                self._finish(running.popleft())
            else:
                running.append(self._start(following, beside_others=True))
        if work := self._work_between_passes():
            self._attempt(work)

    def _following(self, running: Sequence[RunningPass]) -> Batch | None:
        """The batch whose chunks may wait for the threads of the one that is running, as soon as it is full.

        None where chunks use several of torch's threads each: then all are in use although some of the pool are free.
        """
        first, chunks = running[0], len(running[0].chunks)
        if len(running) > 1 or chunks == 1 or self._threads.torch_threads(chunks) > 1 or self._work_between_passes():
            return None
        return self._queue.take_full(unless=lambda: first.done)

    def _start(self, batch: Batch, *, beside_others: bool = False) -> RunningPass:
        running = start_pass(batch, self._threads, beside_others=beside_others)
        running.after_each_chunk(self._queue.wake)
        return running

    def _finish(self, running: RunningPass) -> None:
        done = finish_pass(running, self._threads)
        self._on_pass(done)
        if any(part.explain for part in done.parts):
            for part, result in done.results():
                if part.explain:  # as jobs: other batches need not wait for all of them
                    self._queue.run(partial(self._explain, part, result))
        self._pass_seconds += done.seconds

    def _work_between_passes(self) -> Callable[[], None] | None:
        """What is due although requests wait."""
        if not self._idle_work:
            return None
        if self._plan.has_work and self._proof_seconds < _PROOF_SHARE * self._pass_seconds:
            return self._prove
        return self._compare_threads if self._threads.should_compare else None

    def _explain(self, part: Part, result: PartResult) -> None:
        if not part.request.given_up:
            self._on_explained(part, explain_part(part, result, self._threads))

    def _patience(self) -> float | None:
        if not self._idle_work:
            return None
        if self._plan.has_work:
            return 0.0
        return _QUIET if self._to_measure is not None or self._threads.should_compare else None

    def _prove(self) -> None:
        started = time.monotonic()
        self._plan.prove_next()
        self._proof_seconds += time.monotonic() - started

    def _compare_threads(self) -> None:
        size = self._backbone.roles.image_size
        images = _blank(self._backbone, size, _COMPARED)
        tokens = _COMPARED * tokens_per_image(self._backbone, size)
        self._threads.compare(partial(library_output, self._backbone, images), tokens)

    def _measure(self, measured: tuple[TaskSet, list[float]]) -> None:
        """Time one pass with all tasks that share a preprocessing and one without any, on a blank image."""
        task_set, ratios = measured
        preprocessing, names = task_set.groups[0] if task_set.groups else (None, frozenset())
        image = _blank(self._backbone, _size(self._backbone, preprocessing))

        def seconds(compute: Callable[[torch.Tensor], object]) -> float:
            started = time.perf_counter()
            self._threads.map(compute, [image])
            return time.perf_counter() - started

        plain = seconds(partial(library_output, self._backbone))
        ratios.append(seconds(partial(task_set.model, tasks=[n for n in task_set.tasks if n in names])) / plain)
        if len(ratios) == _PAIRS:
            self._on_cost(task_set, statistics.median(ratios))
            if self._to_measure is measured:
                self._to_measure = None


def _shapes(task_set: TaskSet, max_batch: int, threads: ComputeThreads) -> list[PassShape]:
    """The shapes of passes with all tasks that share a preprocessing, for every batch size."""
    model = task_set.model
    chunks = dict.fromkeys(chunk for batch in range(1, max_batch + 1) for chunk in chunk_shapes(batch, threads))
    return [
        shape
        for preprocessing, names in task_set.groups
        for images, own_threads in chunks
        for shape in model.pass_shapes(
            images,
            _size(model.backbone, preprocessing),
            [name for name in task_set.tasks if name in names],
            own_threads,
        )
    ]


def _blank(backbone: Backbone, size: tuple[int, int], images: int = 1) -> torch.Tensor:
    return torch.zeros(images, backbone.roles.channels, *size, dtype=backbone.dtype, device=backbone.device)


def _size(backbone: Backbone, preprocessing: Preprocessing | None) -> tuple[int, int]:
    """(height, width) of images preprocessed so; what the backbone was pretrained at where there are many sizes."""
    if preprocessing is not None and (preprocessing.crop or isinstance(preprocessing.resize, tuple)):
        return view_size(preprocessing)
    return backbone.roles.image_size
