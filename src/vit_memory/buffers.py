"""Memory that one batch after another is computed in: fresh pages cost more time than what is written to them."""

import threading
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


class BufferPool:
    """Tensors by key, handed out again for every batch. What a buffer holds lasts until its key is asked for again."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def get(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of that shape, uninitialised."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1:] != shape[1:] or len(buffer) < shape[0] or buffer.dtype != dtype:
            buffer = self._buffers[key] = torch.empty(shape, dtype=dtype, device=device)
        return buffer[: shape[0]]

    def copy_in(self, key: Hashable, x: Tensor) -> Tensor:
        """A contiguous copy of x (B, …) in the buffer of that key."""
        return self.get(key, x.shape, x.dtype, x.device).copy_(x)


class ThreadBuffers(threading.local):
    """A pool for each thread: threads compute different chunks of a batch at the same time."""

    def __init__(self) -> None:
        self.pool = BufferPool()
