"""The size of one image's trunk, and how many images are computed at a time because of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vit_memory.backbone import Backbone
from vit_memory.parallel import MIN_CHUNK
from vit_memory.trunk import run_trunk

_LIVE_BYTES = 80 * 2**20  # of trunks, over all threads
_STORED_BYTES = 720 * 2**20  # of trunks and graphs, over all threads
_GRAPH_WIDTHS = 16  # values, in widths, that the graph of one class token holds per block


@dataclass(frozen=True, slots=True)
class TrunkShape:
    """The shape of the keys and values of one image."""

    blocks: int
    heads: int
    tokens: int
    head_width: int
    width: int

    @classmethod
    def of(cls, backbone: Backbone, image_size: tuple[int, int]) -> "TrunkShape":
        """Measured with one blank image."""
        image = torch.zeros(1, backbone.roles.channels, *image_size, device=backbone.device, dtype=backbone.dtype)
        keys = run_trunk(backbone.roles, backbone.check_images(image)).keys
        _, heads, tokens, head_width = keys[0].shape
        return cls(len(keys), heads, tokens, head_width, backbone.width)

    @property
    def row(self) -> tuple[int, ...]:
        """(L, 2, H, N, D/H): keys and values of one image."""
        return (self.blocks, 2, self.heads, self.tokens, self.head_width)

    def bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Bytes of so many stored rows: keys and values, two float32 features, and a done mark."""
        return rows * (math.prod(self.row) * dtype.itemsize + 2 * self.width * 4 + 1)

    def live_chunk(self, dtype: torch.dtype, threads: int) -> int:
        """How many images each thread computes at a time, so that a step needs about the memory of inference.

        What a block frees is then also small enough for the C allocator to keep for the next (`backbone.py`).
        """
        return max(MIN_CHUNK, _LIVE_BYTES // (threads * self.bytes(1, dtype)))

    def stored_chunk(self, dtype: torch.dtype, threads: int, settings: int) -> int:
        """How many stored images each thread computes at a time: a few long products are faster than many short ones.

        There is no backbone pass beside a stored trunk, but the graphs of many settings take memory.
        """
        graphs = settings * self.blocks * _GRAPH_WIDTHS * self.width * dtype.itemsize
        return max(MIN_CHUNK, _STORED_BYTES // (threads * (self.bytes(1, dtype) + graphs)))


def even_slices(count: int, at_most: int) -> Iterator[slice]:
    """`count` rows in as few slices of at most `at_most` as possible, all about the same length."""
    size = math.ceil(count / math.ceil(count / at_most)) if count else 1
    return (slice(i, i + size) for i in range(0, count, size))
