"""Several processes that train one model: each computes its share of every batch, and the gradients are summed.

accelerate sets up the processes that `torchrun` or `accelerate launch` start. A single process imports nothing of it.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor

from vit_memory.errors import TrainingError, TrainingStopped, VitMemoryError

_TIMEOUT = timedelta(hours=24)  # one process may fill its store for hours while another finds its own complete


class _OtherProcessFailed(Exception):  # noqa: N818 - never leaves this file
    """Ends this process's work early; the error to show is that of the other process."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together, seen from one of them. The default is a single process."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # processes that share this machine's memory and disk
    accelerator: Any = None
    key_value_store: Any = None  # torch.distributed's; a failed process leaves a message here that the others poll
    _blocks: Iterator[int] = field(default_factory=count, compare=False)  # numbers the `fail_together` blocks

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def device(self, requested: str) -> str:
        """The device of this process: with several processes on one machine, each has its own GPU."""
        return str(self.accelerator.device) if self.world_size > 1 and requested == "cuda" else requested

    def shard(self, count: int) -> list[int]:
        """Which of `count` images belong to this process: the same ones in every batch and epoch."""
        return list(range(self.rank, count, self.world_size))

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over the processes, in one message."""
        if self.world_size == 1:
            return
        # NCCL sends from a GPU only, and some of these sums are on the CPU.
        device = self.accelerator.device
        flat = torch.cat([tensor.detach().reshape(-1).to(device, torch.float32) for tensor in tensors])
        with self._explain_lost_processes():
            summed = self.accelerator.reduce(flat, reduction="sum")
        for tensor, part in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            # A new tensor, of one layout in all processes: a gradient that one process computed, and that another
            # without images of that task filled with zeros, may have other strides, so that its norm rounds otherwise.
            tensor.data = part.view(tensor.shape).to(tensor.device, tensor.dtype, copy=True)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process: all must stop at the same step, or the others would wait forever."""
        return self._votes(flag) > 0

    def all(self, flag: bool) -> bool:
        """Whether the flag is set in every process."""
        return self._votes(flag) == self.world_size

    def _votes(self, flag: bool) -> float:
        votes = torch.tensor([float(flag)])
        self.all_reduce([votes])
        return float(votes)

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        if self.world_size > 1:
            with self._explain_lost_processes():
                self.accelerator.wait_for_everyone()

    @contextmanager
    def fail_together(self) -> Iterator[Callable[[], None]]:
        """Run work that may fail in one process only; if it does, every process leaves the block with an error.

        The process that failed raises its own error, the others a TrainingError that quotes it; a stop request
        raises TrainingStopped everywhere. The work must contain no all_reduce and no barrier. Its duration may differ
        between processes: they meet at the end of the block. The block receives a function to call now and then; it
        ends the work early once another process has failed.
        """
        if self.world_size == 1:
            yield lambda: None
            return
        key = f"failed/{next(self._blocks)}"

        def check_other_processes() -> None:
            with self._explain_lost_processes():
                failed = self.key_value_store is not None and self.key_value_store.check([key])
            if failed:
                raise _OtherProcessFailed

        error: Exception | None = None
        try:
            yield check_other_processes
        except _OtherProcessFailed:
            pass
        except BaseException as caught:
            with suppress(RuntimeError):  # the process that hosts the key-value store may have ended
                if self.key_value_store is not None:
                    self.key_value_store.set(key, str(self.rank))
            if not isinstance(caught, Exception):  # a second Ctrl-C: do not wait for the others
                raise
            error = caught
        self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        from accelerate.utils import gather_object  # noqa: PLC0415 - only with several processes

        own = None if error is None else (self.rank, isinstance(error, TrainingStopped), _message(error))
        try:
            with self._explain_lost_processes():
                reported = [report for report in gather_object([own]) if report is not None]
        except TrainingError:
            if error is not None:
                raise error from None
            raise
        failures = [(rank, message) for rank, stopped, message in reported if not stopped]
        if error is not None and (not failures or not isinstance(error, TrainingStopped)):
            raise error
        if failures:
            rank, message = failures[0]
            raise TrainingError(f"process {rank} of {self.world_size} (counted from 0) failed: {message}")
        if reported:
            raise TrainingStopped(reported[0][2])

    @contextmanager
    def _explain_lost_processes(self) -> Iterator[None]:
        """Raise a TrainingError if a message to the other processes fails."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0].split(". ")[0]
            raise TrainingError(
                f"process {self.rank} of {self.world_size} (counted from 0) lost the others: {reason}. "
                f"One of them has probably ended; see its own error."
            ) from error


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, VitMemoryError) else f"{type(error).__name__}: {error}"


def init_ranks(device: str = "cpu") -> Ranks:
    """The ranks described by the environment variables of torchrun or accelerate launch; else a single process."""
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if expected == 1:
        return Ranks()
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs  # noqa: PLC0415 - only with several processes
    except ImportError as error:
        raise TrainingError(
            f"started as one of {expected} processes, which needs accelerate: pip install 'vit-memory[distributed]'"
        ) from error
    process_group = InitProcessGroupKwargs(timeout=_TIMEOUT)  # the default is ten minutes
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[process_group])
    if accelerator.num_processes != expected:  # each process would silently train on all images
        raise TrainingError(
            f"started as one of {expected} processes, but accelerate sees {accelerator.num_processes}. "
            f"Start them with torchrun or accelerate launch."
        )
    atexit.register(_destroy_gloo_group)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", expected))
    return Ranks(
        accelerator.process_index, accelerator.num_processes, local_world_size, accelerator, _key_value_store()
    )


def _destroy_gloo_group() -> None:
    """Close gloo's connections before the interpreter shuts down, which otherwise sometimes aborts the process.

    NCCL's stay open until the process ends: closing them may wait for processes that have failed.
    """
    from torch import distributed  # noqa: PLC0415 - only with several processes

    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def _key_value_store() -> Any:
    """A client of the key-value store that the process group was set up with."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:  # started another way: a failure is then noticed at the end of a block only
        return None
    from torch import distributed  # noqa: PLC0415 - only with several processes

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store when it restarts
    client = distributed.TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    return distributed.PrefixStore(f"vit-memory/{attempt}", client)  # type: ignore[attr-defined]
