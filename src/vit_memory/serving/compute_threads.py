"""How many threads compute a batch: chunks in a thread each, or one chunk by one thread or by all of torch's.

A batch of several chunks gets a thread per chunk (`parallel.py`). A smaller one is computed fastest by all of torch's
threads together, but only while they have the cores: they wait for one another a thousand times per pass, and beside
other programs each wait is for a thread that has no core. Beside a machine's load of 10, passes of a tiny backbone with
two threads took a hundred times as long as with one. So both ways are timed on a few blank images at the start and,
while one thread is in use, now and then, also under load: a server that is never idle would otherwise keep what a noisy
start told it. All threads are given up for one as soon as a pass with them takes far longer than one thread would.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from vit_memory.parallel import ChunkThreads

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")

_TOO_SLOW = 3.0  # times what one thread would take
_TRIALS = 2  # of each way; the fastest counts
_FIRST_RETRY, _LAST_RETRY = 10.0, 600.0  # seconds until all threads are tried again; doubled each time they lose


class ComputeThreads:
    """The threads of the model's thread. Use it as a context there."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._pool = ChunkThreads(device, threads)
        self.threads = self._pool.threads
        self.single_chunk = self.threads  # threads that compute a batch of one chunk
        self._one_thread: float | None = None  # seconds that one thread takes for one token
        self._retry_after = _FIRST_RETRY
        self._compared = 0.0

    def __enter__(self) -> "ComputeThreads":
        torch.set_num_threads(self.threads)  # of this thread
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def map(self, compute: Callable[[Chunk], Result], work: Sequence[Chunk]) -> list[Result]:
        """`compute` of every chunk, in order; an exception of any chunk is raised."""
        return [future.result() for future in self.start(compute, work)]

    def start(
        self, compute: Callable[[Chunk], Result], work: Sequence[Chunk], *, beside_others: bool = False
    ) -> list[Future[Result]]:
        """Begin `compute` of every chunk. Several chunks get a thread each, as soon as one is free.

        A single one is computed here and now, unless chunks of other batches are being computed: then it waits for a
        thread, too.
        """
        if self.threads > 1 and (len(work) > 1 or beside_others):
            each = 1 if beside_others else self.torch_threads(len(work))
            return self._pool.start(compute, work, torch_threads=each)
        return [self._computed(partial(compute, chunk)) for chunk in work]

    def torch_threads(self, chunks: int) -> int:
        """How many of torch's threads compute each of so many chunks of a batch."""
        return self.single_chunk if chunks == 1 else max(1, self.threads // chunks)

    def took(self, tokens: int, chunks: int, seconds: float) -> None:
        """Take note of a pass over so many tokens; if one thread would be far faster than all, use one from now on."""
        if chunks > 1 or self.single_chunk == 1 or self._one_thread is None:
            return
        if seconds > _TOO_SLOW * self._one_thread * tokens:
            self.single_chunk = 1
            self._compared = time.monotonic()

    @property
    def should_compare(self) -> bool:
        """Whether it is time to time one thread and all again."""
        if self.threads == 1:
            return False
        due = self._one_thread is None or time.monotonic() > self._compared + self._retry_after
        return due and (self._one_thread is None or self.single_chunk == 1)

    def compare(self, compute: Callable[[], object], tokens: int) -> None:
        """Time a pass over so many tokens with one thread and with all; what is faster computes single chunks."""
        one = every = math.inf
        for _ in range(_TRIALS):
            one = min(one, self._seconds(1, compute))
            every = min(every, self._seconds(self.threads, compute))
            if every > _TOO_SLOW * one:
                break  # another trial would be slow too
        self._one_thread, self._compared = one / tokens, time.monotonic()
        if every < one:
            self.single_chunk, self._retry_after = self.threads, _FIRST_RETRY
        else:
            self.single_chunk, self._retry_after = 1, min(2 * self._retry_after, _LAST_RETRY)

    def _computed(self, compute: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        try:
            future.set_result(self._with_threads(self.single_chunk, compute))
        except Exception as error:
            future.set_exception(error)
        return future

    def _seconds(self, threads: int, compute: Callable[[], object]) -> float:
        started = time.perf_counter()
        self._with_threads(threads, compute)
        return time.perf_counter() - started

    def _with_threads(self, threads: int, compute: Callable[[], Result]) -> Result:
        before = torch.get_num_threads()
        if threads == before:
            return compute()
        torch.set_num_threads(threads)
        try:
            return compute()
        finally:
            torch.set_num_threads(before)
