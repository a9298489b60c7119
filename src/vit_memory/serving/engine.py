"""The serving engine: images in, answers of any tasks out, one pass of the backbone per batch. No HTTP here.

An image is admitted on the event loop, decoded and preprocessed in a thread of the decoding pool, computed in the
model's thread together with others, and answered on the event loop: one call back to the loop per batch. The set of
tasks is an immutable version (`task_set.py`); a request keeps the one it was admitted with.

    async with Engine(Bundle.open("my-bundle")) as engine:
        answer = await engine.predict(Path("cat.jpg").read_bytes(), tasks=["pets"])
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from vit_memory.branch import Branch
from vit_memory.data.loading import default_workers
from vit_memory.data.transforms import view_size
from vit_memory.errors import DeadlinePassed, EngineClosed, QueueFull, ServingError
from vit_memory.evaluation.models import open_composable
from vit_memory.files.bundle import Bundle
from vit_memory.joining import JoinPlan
from vit_memory.model import MemoryViT
from vit_memory.parallel import ChunkThreads
from vit_memory.preprocessing import Preprocessing
from vit_memory.serving.answers import Answer, EngineStats, Observer, OriginalAnswer, Refusal
from vit_memory.serving.image_input import as_image_error, check_tensor, decode_image, preprocess
from vit_memory.serving.passes import Pass, run_pass
from vit_memory.serving.queueing import BatchQueue
from vit_memory.serving.requests import Request, split_request
from vit_memory.serving.task_set import TaskSet
from vit_memory.task import Task

__all__ = ["Answer", "Engine", "EngineOptions", "EngineStats", "Observer", "OriginalAnswer", "TaskSet"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine batches, and what it refuses."""

    max_batch: int = 16  # images per pass
    max_wait_ms: float = 2.0  # how long the first image of a batch waits for others while the model is idle
    max_queue: int = 256  # images waiting for the model, decoded or not; more are refused at once
    decode_threads: int | None = None  # default: one per core, at most 8
    threads: int | None = None  # that compute; default: torch's number
    timeout_s: float = 30.0  # deadline of a request that names none
    max_pixels: int = 50_000_000  # of an image, before resizing

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "decode_threads", "threads", "max_pixels"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ServingError(f"{name} is {value}; expected 1 or more.")
        if not self.max_wait_ms >= 0 or not self.timeout_s > 0:
            raise ServingError(
                f"max_wait_ms is {self.max_wait_ms:g} and timeout_s is {self.timeout_s:g}; expected 0 or more "
                f"milliseconds and more than 0 seconds."
            )


_DEFAULTS = EngineOptions()


class Engine:
    """Answers images for any tasks of a changing task set; batches requests; the backbone runs once per batch.

    Use it as an async context, on one event loop, once. Answers are those of `model(image)` alone to rounding,
    whatever shares the batch.
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
        self._plan = JoinPlan(model.backbone.roles, deferred=True)
        self._task_set = TaskSet.of(model, plan=self._plan)
        self._observer = observe or Observer()
        self._queue = BatchQueue(options.max_batch, options.max_wait_ms / 1000, options.max_queue)
        self._threads = options.threads or torch.get_num_threads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._running: set[asyncio.Future[Answer]] = set()
        self._counts = _Counts()

    async def __aenter__(self) -> "Engine":
        if self._loop is not None or self._closing:
            raise EngineClosed("an engine runs once; make another one.")
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._changing = asyncio.Lock()
        self._stopped = asyncio.Event()
        workers = self.options.decode_threads or max(1, default_workers())
        self._decoders = ThreadPoolExecutor(workers, "decode", initializer=_one_torch_thread)
        self._preparer = ThreadPoolExecutor(1, "prepare", initializer=_one_torch_thread)
        self._model_thread = threading.Thread(target=self._run_model, name="model", daemon=True)
        self._model_thread.start()
        try:
            await self._loop.run_in_executor(self._preparer, self._prepare, self._task_set)
            await self._warm(self._task_set, list(self._task_set.tasks))
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
        first = not self._closing
        self._closing = True
        if self._loop is None:
            return
        if not first:
            await self._stopped.wait()
            return
        while self._running:
            await asyncio.wait(self._running)
        async with self._changing:
            self._queue.stop()
        await self._stopped.wait()
        self._model_thread.join()
        self._decoders.shutdown()
        self._preparer.shutdown()

    @property
    def task_set(self) -> TaskSet:
        """The current version of the task set."""
        return self._task_set

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
            raise self._refuse("deadline", DeadlinePassed(f"{name}: the deadline is {timeout:g} s away."))
        now = time.monotonic()
        request = Request(
            name=name,
            content=image,
            task_set=task_set or self._task_set,
            tasks=(),
            check_original=check_original,
            deadline=now + timeout,
            future=loop.create_future(),
            admitted=now,
        )
        split_request(request, tasks, explain)
        try:
            self._queue.admit(request)
        except QueueFull as error:
            raise self._refuse("queue full", error) from None
        self._counts.admitted += 1
        self._running.add(request.future)
        timer = loop.call_later(timeout, self._expire, request, timeout)
        try:
            self._decoders.submit(self._decode, request)
            return await request.future
        except asyncio.CancelledError:
            self._refuse("cancelled")
            raise
        finally:
            timer.cancel()
            self._running.discard(request.future)
            self._queue.leave(request)

    async def replace(self, change: Callable[[TaskSet], TaskSet], commit: Callable[[], None] | None = None) -> TaskSet:
        """Serve the version that `change` makes of the current one; changes are made one after the other.

        `change` runs in a thread. The new version is prepared and has answered an image before requests see it; then
        `commit`, if any, runs in a thread, for example to save it; if any of that fails, the current version stays.
        """
        loop = self._check_open()
        async with self._changing:
            self._check_open()
            old = self._task_set
            new = await loop.run_in_executor(self._preparer, self._changed, change)
            if new is old:
                return old
            fresh = [name for name, task in new.tasks.items() if name not in old.tasks or old.tasks[name] is not task]
            if fresh:
                await self._warm(new, fresh)
            if commit is not None:
                await loop.run_in_executor(self._preparer, commit)
            self._task_set = new
            self._counts.changes += 1
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
            raise self._refuse("closed", EngineClosed("the engine is closed and takes no requests."))
        if self._loop is None:
            raise self._refuse("closed", EngineClosed("the engine is not started: async with Engine(…) as engine."))
        if asyncio.get_running_loop() is not self._loop:
            raise ServingError("the engine runs on another event loop: call it there, or make one engine per loop.")
        return self._loop

    def _refuse(self, reason: Refusal, error: ServingError | None = None) -> Exception:
        self._counts.refused[reason] = self._counts.refused.get(reason, 0) + 1
        self._tell(lambda observer: observer.refused(reason))
        return error or ServingError(reason)

    def _tell(self, event: Callable[[Observer], None]) -> None:
        try:
            event(self._observer)
        except Exception:
            log.exception("an observer of the engine failed")

    def _tell_answered(self, answer: Answer) -> None:
        self._tell(lambda observer: observer.answered(answer))

    def _expire(self, request: Request, timeout: float) -> None:
        if not request.future.done():
            error = DeadlinePassed(
                f"{request.name}: no answer within {timeout:g} s; {self._queue.waiting} images wait for the model."
            )
            request.future.set_exception(self._refuse("deadline", error))

    def _fail(self, request: Request, reason: Refusal, error: Exception) -> None:
        if not request.future.done():
            self._refuse(reason)
            request.future.set_exception(error)

    def _deliver(self, done: Pass) -> None:
        counts = self._counts
        counts.passes += 1
        counts.images += len(done.parts)
        counts.compute_seconds += done.seconds
        counts.last_batch = len(done.parts)
        counts.largest_batch = max(counts.largest_batch, counts.last_batch)
        self._tell(lambda observer: observer.computed(len(done.parts), len(done.tasks), done.seconds))
        if done.error is not None:
            self._fail_pass(done, done.error)
            return
        for part, result in zip(done.parts, done.results(), strict=True):
            if part.request.future.done():
                continue
            part.result = result
            answer = part.request.answer()
            if answer is not None:
                counts.answered += 1
                part.request.future.set_result(answer)
                self._tell_answered(answer)

    def _fail_pass(self, done: Pass, error: Exception) -> None:
        log.error("a pass over %d images failed", len(done.parts), exc_info=error)
        reason = f"the pass over {len(done.parts)} images failed ({type(error).__name__}: {error})"
        for part in done.parts:
            own = ServingError(f"{part.request.name}: {reason}.")
            own.__cause__ = error.with_traceback(None)  # its frames hold the whole batch
            self._fail(part.request, "failed", own)

    # In a thread of the decoding pool.

    def _decode(self, request: Request) -> None:
        content, parts = request.content, request.parts
        if content is None or request.given_up:
            return
        started = time.monotonic()
        try:
            if isinstance(content, Tensor):
                parts[0].pixels = check_tensor(content, self._backbone, request.name)
            else:
                pixels = decode_image(content, request.name, self.options.max_pixels)
                for part in parts:
                    assert part.preprocessing is not None
                    part.pixels = preprocess(pixels, part.preprocessing, request.name)
        except Exception as error:
            self._call(self._fail, request, "bad image", as_image_error(error, request.name))
            return
        ready = time.monotonic()
        request.decode_seconds = ready - started
        for part in parts:
            part.ready = ready
        self._queue.put(parts)

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Run something on the event loop, from another thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop was closed, and the engine was not
            log.warning("the event loop of the engine was closed before the engine was")

    # In the model's thread.

    def _run_model(self) -> None:
        with ChunkThreads(self._backbone.device, self._threads) as pool:
            while True:
                work = self._queue.take(wait=not self._plan.has_work)
                if work is None:
                    break
                if callable(work):
                    work()
                elif work:
                    self._call(self._deliver, run_pass(work, pool))
                else:
                    self._plan.prove_next()
                del work  # it would keep a version alive until the next batch
        self._call(self._stopped.set)

    async def _warm(self, task_set: TaskSet, names: Sequence[str]) -> None:
        """Have the model's thread answer a blank image: a version that cannot is not served, and none pays for it."""
        done: Future[None] = Future()

        def job() -> None:
            try:
                for size, group in _sizes(task_set, names):
                    channels = self._backbone.roles.channels
                    task_set.model(torch.zeros(1, channels, *size, device=self._backbone.device), group)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._queue.run(job)
        await asyncio.wrap_future(done)

    # In the preparing thread.

    def _changed(self, change: Callable[[TaskSet], TaskSet]) -> TaskSet:
        new = change(self._task_set)
        if new.model.backbone is not self._backbone:
            raise ServingError("the new version has another backbone: make it with with_tasks or without.")
        if new is not self._task_set:
            self._prepare(new)
        return new

    def _prepare(self, task_set: TaskSet) -> None:
        for _, group in _sizes(task_set, list(task_set.tasks)):
            task_set.model.prepare(group)


@dataclass(slots=True)
class _Counts:
    """Changed on the event loop only."""

    admitted: int = 0
    answered: int = 0
    passes: int = 0
    images: int = 0
    compute_seconds: float = 0.0
    last_batch: int = 0
    largest_batch: int = 0
    changes: int = 0
    cost: float | None = None

    refused: dict[Refusal, int] = field(default_factory=dict)


def _open(source: Bundle | MemoryViT | Path | str) -> MemoryViT:
    if isinstance(source, MemoryViT):
        return source
    if isinstance(source, Bundle):
        return source.model()
    path = Path(source)
    return Bundle.open(path).model() if path.is_dir() else open_composable([path])[0]


def _sizes(task_set: TaskSet, names: Sequence[str]) -> Iterator[tuple[tuple[int, int], tuple[str, ...]]]:
    """Tasks that share their preprocessing, with its image size (height, width); the backbone's own if it has many."""
    groups: dict[Preprocessing | None, list[str]] = {None: []} if not names else {}
    for name in names:
        groups.setdefault(task_set.preprocessing[name], []).append(name)
    for preprocessing, members in groups.items():
        size = task_set.model.backbone.roles.image_size
        if preprocessing is not None and (preprocessing.crop or isinstance(preprocessing.resize, tuple)):
            size = view_size(preprocessing)
        yield size, tuple(members)


def _one_torch_thread() -> None:
    torch.set_num_threads(1)  # of this thread: images are many, and each is small
