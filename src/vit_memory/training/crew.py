"""Several processes that train as one: each looks at its share of every batch, and their gradients are added up.

Through accelerate, which sets up the processes that `torchrun` or `accelerate launch` start. A process that is not one
of several works alone, and nothing of this is imported.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from vit_memory.errors import TrainingError, TrainingStopped, VitMemoryError

Kind = Literal["ram", "disk", "off"]
_LONGEST_WAIT = timedelta(hours=24)  # one process may store its share for hours while another has found its own stored


class _OtherProcessFailed(Exception):  # noqa: N818 - never leaves this file
    """Ends this process's work early; the error to show is the other's."""


@dataclass(frozen=True, slots=True)
class Crew:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    here: int = 1  # how many of them share this machine's memory and disk
    accelerator: Any = None
    notices: Any = None  # a torch.distributed store: a notice in it is seen by all, and nobody waits for it
    _blocks: Iterator[int] = field(default_factory=count, compare=False)  # numbers of the blocks of `together`

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """Where this process computes: of several on one machine, each has a GPU of its own."""
        return str(self.accelerator.device) if self.size > 1 and asked == "cuda" else asked

    def share(self, count: int) -> list[int]:
        """Which of `count` images this process looks at: the same in every batch and every epoch."""
        return list(range(self.rank, count, self.size))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over the processes: one message for all."""
        if self.size == 1:
            return
        # NCCL sends from a GPU only, and some of what is summed is counted on the CPU.
        device = self.accelerator.device
        flat = torch.cat([tensor.detach().reshape(-1).to(device, torch.float32) for tensor in tensors])
        with self._peers_alive():
            summed = self.accelerator.reduce(flat, reduction="sum")
        for tensor, part in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.data.copy_(part.view_as(tensor))

    def agreed(self, kind: Kind) -> Kind:
        """What all can do where each would do this: a store only where all have room for one."""
        if self.size == 1:
            return kind
        votes = torch.tensor([float(kind == choice) for choice in ("ram", "disk", "off")])
        self.sum([votes])
        ram, disk, _ = votes.tolist()
        if ram == self.size:
            return "ram"
        return "disk" if disk == self.size else "off"

    def any(self, flag: bool) -> bool:
        """Whether it is so for one of them: all stop at the same step, or the others would wait for ever."""
        if self.size == 1:
            return flag
        votes = torch.tensor([float(flag)])
        self.sum([votes])
        return bool(votes > 0)

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            with self._peers_alive():
                self.accelerator.wait_for_everyone()

    @contextmanager
    def together(self) -> Iterator[Callable[[], None]]:
        """Run work that may fail on one process only; if it does, every process leaves the block with an error.

        The process that failed raises its own error, the others a TrainingError that quotes it; a stop request
        raises TrainingStopped everywhere. The work must hold no sum and no wait. It may take any time, and differ
        between processes: they meet at its end. It gets a function to call now and then, which ends the work early
        once another process has failed.
        """
        if self.size == 1:
            yield lambda: None
            return
        notice = f"failed/{next(self._blocks)}"

        def check_others() -> None:
            with self._peers_alive():
                noticed = self.notices is not None and self.notices.check([notice])
            if noticed:
                raise _OtherProcessFailed

        error: Exception | None = None
        try:
            yield check_others
        except _OtherProcessFailed:
            pass
        except BaseException as caught:
            with suppress(RuntimeError):  # the process that keeps the notices may be gone
                if self.notices is not None:
                    self.notices.set(notice, str(self.rank))
            if not isinstance(caught, Exception):  # a second Ctrl-C: do not wait for anybody
                raise
            error = caught
        self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        from accelerate.utils import gather_object  # noqa: PLC0415 - only where there are several processes

        own = None if error is None else (self.rank, isinstance(error, TrainingStopped), _message(error))
        try:
            with self._peers_alive():
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
            raise TrainingError(f"process {rank} of {self.size} (counted from 0) failed: {message}")
        if reported:
            raise TrainingStopped(reported[0][2])

    @contextmanager
    def _peers_alive(self) -> Iterator[None]:
        """Explain the error of a message that cannot be delivered."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0].split(". ")[0]
            raise TrainingError(
                f"process {self.rank} of {self.size} (counted from 0) lost the others: {reason}. "
                f"One of them has probably ended; its own error says why."
            ) from error


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, VitMemoryError) else f"{type(error).__name__}: {error}"


def join_crew(device: str = "cpu") -> Crew:
    """The crew that this process was started into, as its environment tells."""
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if expected == 1:
        return Crew()
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs  # noqa: PLC0415 - only with several processes
    except ImportError as error:
        raise TrainingError(
            f"started as one of {expected} processes, which needs accelerate: pip install 'vit-memory[distributed]'"
        ) from error
    patient = InitProcessGroupKwargs(timeout=_LONGEST_WAIT)  # the default takes ten minutes of waiting for a failure
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[patient])
    if accelerator.num_processes != expected:  # separate copies would train in silence, each on everything
        raise TrainingError(
            f"started as one of {expected} processes, but accelerate sees {accelerator.num_processes}. "
            f"Start them with torchrun or accelerate launch."
        )
    atexit.register(_leave)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", expected))
    return Crew(accelerator.process_index, accelerator.num_processes, here, accelerator, _notices())


def _leave() -> None:
    """Close the connections of gloo before Python takes its threads apart, which now and then ends in an abort.

    NCCL's are left to the end of the process: closing them may wait for processes that have failed.
    """
    from torch import distributed  # noqa: PLC0415 - only where there are several processes

    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def _notices() -> Any:
    """The key-value store through which the processes found one another, as one more client of it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:  # another way of starting: failures are then told at the end of a block only
        return None
    from torch import distributed  # noqa: PLC0415 - only where there are several processes

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store when it starts anew
    client = distributed.TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    return distributed.PrefixStore(f"vit-memory/{attempt}", client)  # type: ignore[attr-defined]
