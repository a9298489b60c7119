"""TensorBoard event files, written with the `tensorboard` package where it is installed."""

import io
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from vit_memory.atomic import write_atomic

logger = logging.getLogger(__name__)


def write_events(folder: Path, name: str, start_time: float, curves: Mapping[str, Iterable[tuple[int, float]]]) -> None:
    """Write one event file of scalars: for every tag, pairs of step and value.

    The file is named after the time of the run's start, so a resumed run replaces it instead of adding a second one.
    Without the `tensorboard` package nothing is written.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - optional
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415
    except ImportError:
        _log_missing_package()
        return
    content = io.BytesIO()
    writer = RecordWriter(content)
    writer.write(Event(wall_time=start_time, file_version="brain.Event:2").SerializeToString())
    for tag, points in curves.items():
        for step, value in points:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.write(Event(wall_time=start_time, step=step, summary=summary).SerializeToString())
    write_atomic(folder / f"events.out.tfevents.{int(start_time):010d}.{name}", [content.getvalue()])


@cache  # once per process, however many settings a run has
def _log_missing_package() -> None:
    logger.info("no TensorBoard files written: tensorboard is not installed (pip install 'vit-memory[tensorboard]')")
