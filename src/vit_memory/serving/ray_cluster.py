"""A connection to Ray: to the cluster that RAY_ADDRESS names, or to one of its own on this machine.

Who reaches the ports of a Ray cluster can run code on it. So a Ray of our own listens on this machine only, has no
dashboard, and ends with the command. Nothing is sent to Ray's makers.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import ray

from vit_memory.errors import ServingError

ADDRESS_VARIABLE = "RAY_ADDRESS"
_NO_USAGE_STATISTICS = "RAY_USAGE_STATS_ENABLED"
_STARTS = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a connection leads to."""

    own: bool  # started by us, on this machine
    node_cpus: tuple[float, ...]  # of every machine in it
    gpus: float

    @property
    def cpus(self) -> float:
        """Of all machines together."""
        return sum(self.node_cpus)

    def share(self, count: int) -> float:
        """The processors of one of `count` processes: whole ones where there are enough, of one machine."""
        if count >= self.cpus:
            return self.cpus / count
        return max(1.0, min(self.cpus // count, max(self.node_cpus)))


@contextmanager
def connected() -> Iterator[Cluster]:
    """A connection to Ray until the block ends; then what was started for it has ended too."""
    address = os.environ.get(ADDRESS_VARIABLE)
    if ray.is_initialized():
        raise ServingError("this process is connected to Ray already: end that connection with ray.shutdown().")
    if address:
        try:
            ray.init(address, logging_level=logging.WARNING)
        except Exception as error:  # of many kinds, bare ones too
            raise ServingError(
                f"the Ray cluster at {address} ({ADDRESS_VARIABLE}) cannot be reached: {error}"
            ) from error
    else:
        _start()
    try:
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = tuple(one["CPU"] for one in resources if one.get("CPU"))
        yield Cluster(not address, cpus or (1.0,), sum(one.get("GPU", 0.0) for one in resources))
    finally:
        ray.shutdown()


def _start() -> None:
    """Start Ray on this machine. It gives up after 30 s, which is little on a busy one; then it is started again."""
    os.environ.setdefault(_NO_USAGE_STATISTICS, "0")
    for attempts_left in reversed(range(_STARTS)):
        others = psutil.Process().children(recursive=True)
        try:
            ray.init("local", logging_level=logging.WARNING, include_dashboard=False, _node_ip_address="127.0.0.1")
            return
        except Exception as error:
            started = [one for one in psutil.Process().children(recursive=True) if one not in others]
            for one in started:  # Ray leaves them where it gives up
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(started, timeout=10)
            if not attempts_left or "timed out" not in str(error):
                raise ServingError(f"Ray did not start: {error}") from error
            log.warning("Ray did not start in time, trying again: %s", error)
