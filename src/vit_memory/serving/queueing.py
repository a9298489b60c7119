"""Images on their way to the model: a bounded queue, and batches that form by size and waiting time.

One lock guards it. Requests are admitted on the event loop, decoding threads put images in, the model's thread takes
batches out. Nobody polls, and the model's thread is woken when there is something to do, not for every image.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vit_memory.errors import EngineClosed, QueueFull
from vit_memory.serving.requests import Part, Request
from vit_memory.serving.task_set import TaskSet

Job = Callable[[], None]  # work of the model's thread between batches; it must not raise


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Images that share a pass, and the version whose model answers all of them."""

    task_set: TaskSet
    parts: Sequence[Part]


class BatchQueue:
    """A bounded queue of images for one model.

    An image counts from its admission until the model takes it, decoded or not, or until it is given up. One that is to
    be explained waits for the model twice, and counts until it is answered.
    """

    def __init__(self, max_batch: int, max_wait: float, max_waiting: int) -> None:
        self._max_batch, self._max_wait, self._max_waiting = max_batch, max_wait, max_waiting
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[Part] = deque()
        self._jobs: deque[Job] = deque()
        self._job_is_next = False
        self._wake_at: int | None = None  # how many ready parts wake the model's thread; None: it does not wait
        self._stopped = False
        self.waiting = 0

    def admit(self, request: Request) -> None:
        """Count a request; QueueFull if as many wait as may."""
        with self._changed:
            if self._stopped:
                raise EngineClosed("the engine is closed and takes no requests.")
            if self.waiting >= self._max_waiting:
                raise QueueFull(
                    f"{request.name}: {self.waiting} images wait for the model, as many as may (max_queue). "
                    f"Try again later."
                )
            self.waiting += 1

    def leave(self, request: Request) -> None:
        """A request that has ended: what it holds in memory is let go, also where the model never took it."""
        with self._changed:
            self._no_longer_waiting(request)
            request.content = None
            for part in request.parts:
                if not part.taken:
                    part.pixels = None
            request.parts = []  # each names its request: without the circle, both are freed at once

    def put(self, parts: list[Part], ready: float) -> None:
        """Add decoded images; `ready` is now, of time.monotonic."""
        for part in parts:
            part.ready = ready
        with self._changed:
            self._ready.extend(parts)
            if self._wake_at is not None and len(self._ready) >= self._wake_at:
                self._changed.notify()

    def run(self, job: Job) -> None:
        """Have the model's thread run a job; where images wait too, jobs and batches take turns."""
        with self._changed:
            if self._stopped:
                raise EngineClosed("the engine is closed.")
            self._jobs.append(job)
            self._changed.notify()

    def take_full(self, unless: Callable[[], bool]) -> Batch | None:
        """The next batch as soon as it is full; None once `unless` is true, or if there is something else to do.

        `wake` makes the model's thread ask `unless` again.
        """
        with self._changed:
            while not self._jobs and not self._stopped:
                if len(self._ready) >= self._max_batch and (batch := self._next_batch()):
                    return batch
                if unless():
                    break
                self._wait(self._max_batch, None)
            return None

    def wake(self) -> None:
        """Wake up the model's thread."""
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """Let the model's thread end, after what is in the queue."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def take(self, idle: Job, patience: float | None = None) -> Batch | Job | None:
        """The next batch or job; `idle` if nothing comes for `patience` seconds; None once stopped and empty.

        A batch that is not full waits for more until its first image has waited `max_wait`. If the model was busy
        meanwhile, that time is over already and the batch is what has come.
        """
        until = None if patience is None else time.monotonic() + patience
        with self._changed:
            while True:
                if not self._ready and not self._jobs:
                    left = None if until is None else until - time.monotonic()
                    if self._stopped:
                        return None
                    if left is not None and left <= 0:
                        return idle
                    self._wait(1, left)
                elif self._jobs and (self._job_is_next or not self._ready):
                    self._job_is_next = False
                    return self._jobs.popleft()
                elif (left := self._time_to_fill()) > 0:
                    self._wait(self._max_batch, left)
                elif batch := self._next_batch():
                    self._job_is_next = True
                    return batch

    def _time_to_fill(self) -> float:
        """Seconds that the next batch may still wait for more images."""
        if self._stopped or self._jobs or len(self._ready) >= self._max_batch:
            return 0.0
        return self._ready[0].ready + self._max_wait - time.monotonic()

    def _wait(self, wake_at: int, timeout: float | None) -> None:
        self._wake_at = wake_at
        self._changed.wait(timeout)
        self._wake_at = None

    def _next_batch(self) -> Batch | None:
        """The oldest image and those that can share its pass, without those given up; None if all were."""
        batch: list[Part] = []
        others: deque[Part] = deque()
        version: TaskSet | None = None
        for part in self._ready:
            if part.pixels is None or part.request.given_up:
                continue
            shared = _version_of_all(batch, version, part) if len(batch) < self._max_batch else None
            if shared is None:
                others.append(part)
            else:
                version = shared
                part.taken = True
                batch.append(part)
        self._ready = others
        for part in batch:
            if all(other.taken and not other.explain for other in part.request.parts):
                self._no_longer_waiting(part.request)
        return None if version is None else Batch(version, batch)

    def _no_longer_waiting(self, request: Request) -> None:
        if request.waiting:
            request.waiting = False
            self.waiting -= 1


def _version_of_all(batch: Sequence[Part], version: TaskSet | None, part: Part) -> TaskSet | None:
    """The version that can answer a batch, answered by `version` so far, and one more part; None if they cannot share.

    Images of one size can, also of two versions if one of them has the tasks of both: a task answers alike in any
    company. So a change of tasks need not split a batch into two passes.
    """
    own = part.request.task_set
    if version is None:
        return own
    if _size(part) != _size(batch[0]):
        return None
    if own is version or version.can_answer(own, part.tasks):
        return version
    return own if all(own.can_answer(other.request.task_set, other.tasks) for other in batch) else None


def _size(part: Part) -> torch.Size:
    assert part.pixels is not None
    return part.pixels.shape
