"""Threads that decode and preprocess images.

Not a ThreadPoolExecutor: its future and its locks cost about 20 µs per image, and nobody waits for them.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from vit_memory.serving.requests import Request


class DecodePool:
    """A number of threads that read requests in the order in which they come. `read` must not raise."""

    def __init__(self, threads: int, read: Callable[[Request], None]) -> None:
        self._read = read
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"decode-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> None:
        """Have a request read."""
        self._inbox.put(request)

    def shutdown(self) -> None:
        """End the threads after what was submitted, and wait for that."""
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: images are many, and each is small
        while (request := self._inbox.get()) is not None:
            self._read(request)
            del request  # it would keep its version alive until the next image
