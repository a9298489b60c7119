"""How an engine batches, and what it refuses."""

from dataclasses import dataclass

from vit_memory.data.decoding import LARGEST_PIXELS
from vit_memory.errors import ServingError


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine batches, and what it refuses."""

    max_batch: int = 16  # images per pass
    max_wait_ms: float = 2.0  # how long the first image of a batch waits for others while the model is idle
    max_queue: int = 256  # images waiting for the model, decoded or not; more are refused at once
    decode_threads: int | None = None  # default: one per core, at most 8
    threads: int | None = None  # that compute; default: torch's number
    timeout_s: float = 30.0  # deadline of a request that names none
    max_pixels: int = 50_000_000  # of an image, before and after resizing

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "decode_threads", "threads", "max_pixels"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ServingError(f"{name} is {value}; expected 1 or more.")
        if self.max_pixels > LARGEST_PIXELS:
            raise ServingError(
                f"max_pixels is {self.max_pixels}; images of more than {LARGEST_PIXELS} pixels are never decoded, so "
                f"expected at most that."
            )
        if not self.max_wait_ms >= 0:
            raise ServingError(f"max_wait_ms is {self.max_wait_ms:g}; expected 0 or more milliseconds.")
        if not self.timeout_s > 0:
            raise ServingError(f"timeout_s is {self.timeout_s:g}; expected more than 0 seconds.")
