"""Chunks of a batch in threads: one thread computes a whole chunk, and threads wait for one another once per batch.

torch's own parallelism cuts every operation into parts and waits after each. A ViT on small images is a thousand short
operations, and where other programs use the cores too, each wait is for a thread that has no core: beside one busy
process per core a training ran at 0.2 of its idle speed (`benchmarks/contention.py`). A thread that computes a chunk by
itself gets its fair share of a core.

The result of a chunk depends on its images only, so results depend on how a batch is cut, never on how busy the machine
is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

MIN_CHUNK = 8  # images in a chunk: below, every product is bound by reading its weights
Chunk = TypeVar("Chunk")
Result = TypeVar("Result")


def chunk_slices(count: int, threads: int, at_most: int | None = None) -> Iterator[slice]:
    """Cut `count` images into chunks of about equal size: one per thread, or more where `at_most` images fit into one.

    >>> list(chunk_slices(64, threads=2))
    [slice(0, 32, None), slice(32, 64, None)]
    """
    number = math.ceil(count / (at_most or max(1, count)))
    if number < threads:
        number = max(number, min(threads, count // MIN_CHUNK), 1)
    else:
        number = min(math.ceil(number / threads) * threads, count)
    size = max(1, math.ceil(count / max(1, number)))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def limit_threads(threads: int | None) -> None:
    """Set the number of threads that torch uses in this process; None leaves it unchanged."""
    if threads is not None:
        torch.set_num_threads(threads)


class ChunkThreads:
    """Threads that share the cores torch was given. Use as a context; torch's setting is restored at its end.

    `threads` is how many there are: torch's number by default, one on a device other than the CPU.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self.threads = (threads or torch.get_num_threads()) if device.type == "cpu" else 1
        self._before = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "ChunkThreads":
        if self.threads > 1:
            self._before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="chunk")
            torch.set_num_threads(1)  # what lies between batches is too short to be cut up
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            torch.set_num_threads(self._before)

    def map(self, compute: Callable[[Chunk], Result], work: Sequence[Chunk]) -> list[Result]:
        """`compute` of every chunk, in order. A single chunk gets all cores; an exception of any chunk is raised."""
        if self._pool is None:
            return [compute(chunk) for chunk in work]
        if len(work) == 1:
            torch.set_num_threads(self.threads)
            try:
                return [compute(work[0])]
            finally:
                torch.set_num_threads(1)
        running = self.start(compute, work, torch_threads=max(1, self.threads // max(1, len(work))))
        try:
            return [future.result() for future in running]
        finally:
            for future in running:
                future.cancel()

    def start(
        self, compute: Callable[[Chunk], Result], work: Sequence[Chunk], *, torch_threads: int
    ) -> list[Future[Result]]:
        """Begin `compute` of every chunk, each in a thread of its own as soon as one is free; for two threads or more.

        `torch_threads` is how many of torch's threads each of them uses.
        """
        assert self._pool is not None
        graph = torch.is_grad_enabled()  # a setting of each thread

        def run(chunk: Chunk) -> Result:
            torch.set_num_threads(torch_threads)
            with torch.set_grad_enabled(graph):
                return compute(chunk)

        return [self._pool.submit(run, chunk) for chunk in work]

    def rounds(self, work: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """`work` in as many chunks at a time as there are threads, so that results can be added up as they come."""
        return (work[start : start + self.threads] for start in range(0, len(work), self.threads))
