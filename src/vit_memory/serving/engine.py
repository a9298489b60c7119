"""The serving engine: images in, answers of any tasks out, one pass of the backbone per batch. No HTTP here.

An image is admitted on the event loop, decoded and preprocessed in a thread of the decoding pool, computed in the
model's thread together with others, and answered on the event loop: one call back to the loop per batch. The set of
tasks is an immutable version (`task_set.py`); a request keeps the one it was admitted with. docs/design/serving.md says
why.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from vit_memory.branch import Branch
from vit_memory.data.loading import default_workers
from vit_memory.errors import DeadlinePassed, EngineClosed, QueueFull, ServingError
from vit_memory.evaluation.models import open_composable
from vit_memory.files.bundle import Bundle
from vit_memory.joining import JoinPlan
from vit_memory.model import MemoryViT
from vit_memory.serving.answers import Answer, OriginalAnswer
from vit_memory.serving.decode_pool import DecodePool
from vit_memory.serving.image_input import as_image_error, read_image, warm_up
from vit_memory.serving.model_thread import ModelThread
from vit_memory.serving.options import EngineOptions
from vit_memory.serving.passes import Pass
from vit_memory.serving.queueing import BatchQueue
from vit_memory.serving.requests import Part, PartResult, Request, split_request
from vit_memory.serving.stats import Counts, EngineStats, Observer, Refusal
from vit_memory.serving.task_set import Group, TaskSet
from vit_memory.task import Task

__all__ = ["Answer", "Engine", "EngineOptions", "EngineStats", "Observer", "OriginalAnswer", "TaskSet"]

log = logging.getLogger(__name__)
_DEFAULTS = EngineOptions()
_FAILURES, _FAULT_S = 3, 60.0  # so many failed passes in a row are a fault, for so long


class Engine:
    """Answers images for any tasks of a changing task set; batches requests; the backbone runs once per batch.

    Use it as an async context, on one event loop, once. Answers are those of `model(image)` alone to rounding,
    whatever shares the batch.

    >>> import asyncio
    >>> async def answer():
    ...     async with Engine(MemoryViT(backbone, [new_task(backbone, "pets", ["cat", "dog"])])) as engine:
    ...         return await engine.predict(torch.zeros(3, 32, 32), tasks=["pets"])
    >>> tuple(asyncio.run(answer()).outputs["pets"].shape)
    (2,)
    """

    def __init__(
        self,
        source: Bundle | MemoryViT | Path | str,
        options: EngineOptions = _DEFAULTS,
        *,
        observe: Observer | None = None,
    ) -> None:
        model = _open(source)
        self.options = options
        self._backbone = model.backbone
        plan = JoinPlan(model.backbone.roles, deferred=True)
        self._task_set = TaskSet.of(model, plan=plan)
        self._observer = observe or Observer()
        self._queue = BatchQueue(options.max_batch, options.max_wait_ms / 1000, options.max_queue)
        self._model_thread = ModelThread(
            self._queue,
            self._backbone,
            plan,
            options.threads or torch.get_num_threads(),
            on_pass=partial(self._call, self._deliver),
            on_explained=partial(self._call, self._deliver_explained),
            on_cost=partial(self._call, self._set_cost),
            at_end=self._end_threads,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._running: set[asyncio.Future[Answer]] = set()
        self._counts = Counts()

    async def __aenter__(self) -> "Engine":
        if self._loop is not None or self._closing:
            raise EngineClosed("an engine runs once; make another one.")
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._changing = asyncio.Lock()
        self._stopped = asyncio.Event()
        workers = self.options.decode_threads or max(1, default_workers())
        self._decoders = DecodePool(workers, self._read)
        self._preparer = ThreadPoolExecutor(1, "prepare", initializer=_one_torch_thread)
        self._model_thread.start()
        try:
            each = [preprocessing for preprocessing, _ in self._task_set.groups]
            await self._loop.run_in_executor(self._preparer, warm_up, each)
            await self._prepare(self._task_set, self._task_set.groups or [(None, frozenset())])
            self._queue.run(partial(self._model_thread.prepare_for, self._task_set, self.options.max_batch))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Refuse new requests, answer what was admitted, and stop the threads."""
        self._closing = True
        if self._loop is None:
            return
        while self._running:
            await asyncio.wait(self._running)
        async with self._changing:
            self._queue.stop()
        await self._stopped.wait()
        self._model_thread.join()

    @property
    def task_set(self) -> TaskSet:
        """The current version of the task set."""
        return self._task_set

    @property
    def fault(self) -> str | None:
        """Why requests cannot be answered now; None if they can.

        After a minute without a failed pass it is None again: without requests nobody would learn that all is well.
        """
        counts = self._counts
        if self._loop is not None and not self._model_thread.is_alive():
            return "the thread of the model has ended."
        if counts.failures >= _FAILURES and time.monotonic() - counts.failed_at < _FAULT_S:
            return f"the last {counts.failures} passes of the model failed; the log has the reason."
        return None

    @property
    def stats(self) -> EngineStats:
        """Counts since the start."""
        counts = self._counts
        return EngineStats(
            version=self._task_set.version,
            waiting=self._queue.waiting,
            running=len(self._running),
            admitted=counts.admitted,
            answered=counts.answered,
            refused=dict(counts.refused),
            passes=counts.passes,
            images=counts.images,
            compute_seconds=counts.compute_seconds,
            last_batch=counts.last_batch,
            largest_batch=counts.largest_batch,
            changes=counts.changes,
            cost=counts.cost,
            uptime=0.0 if self._loop is None else time.monotonic() - self._started,
        )

    async def predict(
        self,
        image: bytes | Tensor,
        tasks: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
        explain: Sequence[str] = (),
        check_original: bool = False,
        name: str = "image",
        task_set: TaskSet | None = None,
    ) -> Answer:
        """Answer one image for `tasks` (all by default).

        image: the bytes of an image file, or a tensor (3, height, width) normalised by the tasks' preprocessing.
        `explain` names tasks whose attention is wanted too. `check_original` compares the batch's original output with
        the library's own forward. `name` is used in messages. `task_set` is a version taken from `self.task_set`
        before, so that several images see the same one.

        Raises UnknownTask, TaskError, BadImage, ImageError, QueueFull, DeadlinePassed, EngineClosed, or ServingError
        if the pass failed. A request that is cancelled, or whose deadline passes, is dropped before the model.
        """
        loop = self._check_open()
        timeout = self.options.timeout_s if timeout_s is None else timeout_s
        if not timeout > 0:
            raise self._refused("deadline", DeadlinePassed(f"{name}: the deadline is {timeout:g} s away."))
        now = time.monotonic()
        version = task_set or self._task_set
        request = Request(name, image, version, (), check_original, now, now + timeout, loop.create_future())
        split_request(request, tasks, explain)
        try:
            self._queue.admit(request)
        except QueueFull as error:
            raise self._refused("queue full", error) from None
        self._counts.admitted += 1
        self._running.add(request.future)
        timer = loop.call_later(timeout, self._expire, request, timeout)
        try:
            self._decoders.submit(request)
            return await request.future
        except asyncio.CancelledError as error:
            raise self._refused("cancelled", error) from None
        finally:
            timer.cancel()
            self._running.discard(request.future)
            self._queue.leave(request)

    async def replace(self, change: Callable[[TaskSet], TaskSet], commit: Callable[[], None] | None = None) -> TaskSet:
        """Serve the version that `change` makes of the current one; changes are made one after the other.

        `change` runs in a thread. The new version is prepared and has answered a blank image before requests see it;
        then `commit`, if any, runs in a thread, for example to save it. If any of that fails, the current version
        stays. A change that has begun ends, also if its caller is cancelled: what was saved is served.
        """
        self._check_open()
        running = asyncio.ensure_future(self._replace(change, commit))
        running.add_done_callback(_retrieve)
        return await asyncio.shield(running)

    async def _replace(self, change: Callable[[TaskSet], TaskSet], commit: Callable[[], None] | None) -> TaskSet:
        async with self._changing:
            loop = self._check_open()
            old = self._task_set
            new = await loop.run_in_executor(self._preparer, change, old)
            if new is old:
                return old
            if new.model.backbone is not self._backbone:
                raise ServingError("the new version has another backbone: make it of the version that `change` gets.")
            await self._prepare(new, [group for group in new.groups if not group[1] <= old.unchanged_in(new)])
            if commit is not None:
                await loop.run_in_executor(self._preparer, commit)
            self._task_set = new
            self._queue.run(partial(self._model_thread.prepare_for, new, self.options.max_batch))
            self._counts.changes += 1
            self._counts.cost = None
            self._tell(lambda observer: observer.changed(new))
            return new

    async def add(self, tasks: Sequence[Task], branches: Sequence[Branch] = ()) -> TaskSet:
        """Serve more tasks and branches, all or none."""
        return await self.replace(lambda current: current.with_tasks(tasks, branches))

    async def remove(self, names: Sequence[str], branches: Sequence[str] = ()) -> TaskSet:
        """Serve some tasks and branches no longer; refused while a task that stays needs one of them."""
        return await self.replace(lambda current: current.without(names, branches))

    # On the event loop.

    def _check_open(self) -> asyncio.AbstractEventLoop:
        if self._closing:
            raise self._refused("closed", EngineClosed("the engine is closed and takes no requests."))
        if self._loop is None:
            raise EngineClosed("the engine is not started: async with Engine(…) as engine.")
        if asyncio.get_running_loop() is not self._loop:
            raise ServingError("the engine runs on another event loop: call it there, or make one engine per loop.")
        return self._loop

    async def _prepare(self, task_set: TaskSet, untried: Sequence[Group]) -> None:
        """Gather what passes with all tasks need, and have a blank image answered: a version that cannot is refused."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._preparer, _gather, task_set)
        tried: Future[None] = Future()

        def job() -> None:
            if not tried.set_running_or_notify_cancel():
                return
            try:
                self._model_thread.answer_blank(task_set, untried)
            except Exception as error:
                tried.set_exception(error)
            else:
                tried.set_result(None)

        if untried:
            self._queue.run(job)
            await asyncio.wrap_future(tried)

    def _tell(self, event: Callable[[Observer], None]) -> None:
        try:
            event(self._observer)
        except Exception:
            log.exception("an observer of the engine failed")

    def _refused(self, reason: Refusal, error: BaseException) -> BaseException:
        """Count a request that gets no answer; returns the error."""
        self._counts.refused[reason] = self._counts.refused.get(reason, 0) + 1
        self._tell(lambda observer: observer.refused(reason))
        return error

    def _fail(self, request: Request, reason: Refusal, error: Exception) -> None:
        if not request.future.done():
            request.future.set_exception(self._refused(reason, error))

    def _expire(self, request: Request, timeout: float) -> None:
        waiting = self._queue.waiting
        message = f"{request.name}: no answer within {timeout:g} s; {waiting} images wait for the model."
        self._fail(request, "deadline", DeadlinePassed(message))

    def _deliver(self, done: Pass) -> None:
        self._counts.computed(len(done.parts), done.seconds)
        self._tell(lambda observer: observer.computed(len(done.parts), len(done.tasks), done.seconds))
        if done.error is None:
            self._counts.failures = 0
        else:
            self._counts.failures += 1
            self._counts.failed_at = time.monotonic()
            self._fail_pass(done, done.error)
        for part, result in done.results():
            if not part.explain:
                self._resolve(part, result)

    def _deliver_explained(self, part: Part, result: PartResult | Exception) -> None:
        if isinstance(result, Exception):
            log.error("an explanation failed", exc_info=result)
            error = ServingError(f"{part.request.name}: the explanation failed ({type(result).__name__}: {result}).")
            self._fail(part.request, "failed", error)
        else:
            self._resolve(part, result)

    def _resolve(self, part: Part, result: PartResult) -> None:
        part.result = result
        future = part.request.future
        answer = None if future.done() else part.request.answer()
        if answer is not None:
            self._counts.answered += 1
            future.set_result(answer)
            self._tell(lambda observer: observer.answered(answer))

    def _fail_pass(self, done: Pass, error: Exception) -> None:
        log.error("a pass over %d images failed", len(done.parts), exc_info=error)
        error = error.with_traceback(None)  # its frames hold the whole batch
        for part in done.parts:
            own = ServingError(
                f"{part.request.name}: the pass over {len(done.parts)} images failed ({type(error).__name__}: {error})."
            )
            own.__cause__ = error
            self._fail(part.request, "failed", own)

    def _set_cost(self, task_set: TaskSet, cost: float) -> None:
        if task_set is self._task_set:
            self._counts.cost = cost

    # In other threads.

    def _read(self, request: Request) -> None:
        """Decode and preprocess an image, in a thread of the decoding pool."""
        parts = request.parts
        if request.given_up or not parts:
            return
        started = time.monotonic()
        try:
            read_image(request, self._backbone, self.options.max_pixels)
        except Exception as error:
            self._call(self._fail, request, "bad image", as_image_error(error, request.name))
            return
        ready = time.monotonic()
        request.decode_seconds = ready - started
        self._queue.put(parts, ready)

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Run something on the event loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # nobody can be answered any more
            log.warning("the event loop was closed before the engine: its threads stop")
            self._queue.stop()

    def _end_threads(self) -> None:
        """The last act of the model's thread."""
        self._decoders.shutdown()
        self._preparer.shutdown()
        self._call(self._stopped.set)


def _open(source: Bundle | MemoryViT | Path | str) -> MemoryViT:
    if isinstance(source, MemoryViT):
        return source
    if isinstance(source, Bundle):
        return source.model()
    path = Path(source)
    return Bundle.open(path).model() if path.is_dir() else open_composable([path])[0]


def _gather(task_set: TaskSet) -> None:
    """Gather what passes with all tasks need, so that no request waits for it."""
    for _, names in task_set.groups:
        task_set.model.prepare([name for name in task_set.tasks if name in names])


def _retrieve(ended: "asyncio.Future[TaskSet]") -> None:
    """Take the exception of a change whose caller has gone, so that asyncio does not report it."""
    if not ended.cancelled():
        ended.exception()


def _one_torch_thread() -> None:
    torch.set_num_threads(1)  # of this thread: images are many, and each is small
