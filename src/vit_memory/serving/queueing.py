"""Images on their way to the model: a bounded queue, and batches that form by size and waiting time.

One lock guards it; requests are admitted on the event loop, decoding threads put images in, the model's thread takes
batches out. Nobody polls, and the model's thread is woken when there is something to do, not for every image.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from vit_memory.errors import EngineClosed, QueueFull
from vit_memory.serving.requests import Part, Request

Job = Callable[[], None]  # work of the model's thread between batches


class BatchQueue:
    """A bounded queue of images for one model.

    An image counts from admission until the model takes it, decoded or not; given-up images do not count.
    """

    def __init__(self, max_batch: int, max_wait: float, max_waiting: int) -> None:
        self._max_batch, self._max_wait, self._max_waiting = max_batch, max_wait, max_waiting
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[Part] = deque()
        self._jobs: deque[Job] = deque()
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

    def put(self, parts: list[Part]) -> None:
        """Add decoded images."""
        with self._changed:
            self._ready.extend(parts)
            if self._wake_at is not None and len(self._ready) >= self._wake_at:
                self._changed.notify()

    def run(self, job: Job) -> None:
        """Have the model's thread run a job before its next batch; it must not raise."""
        with self._changed:
            if self._stopped:
                raise EngineClosed("the engine is closed.")
            self._jobs.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Let the model's thread end, after what is in the queue."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def take(self, *, wait: bool) -> list[Part] | Job | None:
        """The next job or batch. None when stopped and empty; an empty batch if there is nothing and not to `wait`.

        A batch that is not full waits for more until its first image has waited `max_wait`. If the model was busy
        meanwhile, that time is over already and the batch is what has come.
        """
        with self._changed:
            while True:
                while not self._ready and not self._jobs:
                    if self._stopped:
                        return None
                    if not wait:
                        return []
                    self._wait(1)
                if self._jobs:
                    return self._jobs.popleft()
                if not self._stopped and len(self._ready) < self._max_batch:
                    left = self._ready[0].ready + self._max_wait - time.monotonic()
                    if left > 0:
                        self._wait(self._max_batch, left)
                        continue
                batch = self._next_batch()
                if batch:
                    return batch

    def _wait(self, wake_at: int, timeout: float | None = None) -> None:
        self._wake_at = wake_at
        self._changed.wait(timeout)
        self._wake_at = None

    def _next_batch(self) -> list[Part]:
        """The oldest image and those that can share its pass, without those given up."""
        batch: list[Part] = []
        others: deque[Part] = deque()
        for part in self._ready:
            if part.pixels is None or part.request.given_up:
                continue
            if len(batch) < self._max_batch and (not batch or part.key == batch[0].key):
                batch.append(part)
            else:
                others.append(part)
        self._ready = others
        still_waiting = {id(part.request) for part in others}
        for part in batch:
            part.taken = True
            if id(part.request) not in still_waiting:
                self._no_longer_waiting(part.request)
        return batch

    def _no_longer_waiting(self, request: Request) -> None:
        if request.waiting:
            request.waiting = False
            self.waiting -= 1
