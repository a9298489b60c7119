"""Progress of a training or a prediction on stderr, the log, and stopping with Ctrl-C."""

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from vit_memory.cli.terminal import Bar, LogHandler, is_interactive

if TYPE_CHECKING:
    from vit_memory.serving.ray_data import Progress as Scored
    from vit_memory.training.callbacks import Progress


class TrainingProgress:
    """Shows step, loss, validation score and rate: as a bar in a terminal, elsewhere as a line per evaluation.

    Use it in `contextlib.closing`.
    """

    def __init__(self) -> None:
        self._bar = Bar() if is_interactive() else None
        self._stage = ""
        self._start_time, self._start_step = 0.0, 0
        self._score: float | None = None  # the best setting's, of the last evaluation

    def __call__(self, progress: "Progress") -> None:
        """Show the progress of one step."""
        if progress.stage != self._stage:
            self.close()
            self._stage = progress.stage
            self._start_time, self._start_step = time.perf_counter(), progress.step
        if progress.scores is not None:
            self._score = max(_without_nan(progress.scores), default=None)
        last = progress.step == progress.steps
        if self._bar is not None:
            self._bar.show(progress.step, progress.steps, self._texts(progress))
        elif progress.scores is not None or (last and progress.stage == "storing"):
            sys.stderr.write(self._line(progress) + "\n")
        if last:
            self.close()

    def close(self) -> None:
        """End the bar; the next step starts another one."""
        if self._bar is not None:
            self._bar.close()
        self._stage, self._score = "", None

    def _texts(self, progress: "Progress") -> list[str]:
        """Beside the bar, the most important first."""
        unit, each_s = self._unit(progress), self._seconds_per_step(progress)
        done = f"{progress.step}/{progress.steps}"
        texts = [f"step {done}" if unit == "steps" else f"storing views {done}"]
        if unit == "steps" and self._score is not None:
            texts.append(f"val {progress.metric} {score_text(progress.metric, self._score)}")
        if losses := _without_nan(progress.losses):
            texts.append(f"loss {min(losses):.3f}")
        if each_s and progress.step < progress.steps:
            texts.append(f"{duration(each_s * (progress.steps - progress.step))} left")
        if each_s:
            texts.append(f"{1 / each_s:.1f} {unit}/s")
        return texts

    def _line(self, progress: "Progress") -> str:
        unit, each_s = self._unit(progress), self._seconds_per_step(progress)
        rate = ""
        if each_s:
            left = duration(each_s * (progress.steps - progress.step))
            rate = f"  {1 / each_s:.1f} {unit}/s" + (f", {left} left" if progress.step < progress.steps else "")
        if unit == "views":
            return f"storing views {progress.step} of {progress.steps}{rate}"
        losses = _without_nan(progress.losses)
        loss = f"  loss {min(losses):.3f}" if losses else ""
        score = ""
        if self._score is not None:
            score = f"  validation {progress.metric} {score_text(progress.metric, self._score)}"
        return f"step {progress.step} of {progress.steps}{loss}{score}{rate}"

    def _unit(self, progress: "Progress") -> str:
        return "steps" if progress.stage == "training" else "views"

    def _seconds_per_step(self, progress: "Progress") -> float | None:
        done, seconds = progress.step - self._start_step, time.perf_counter() - self._start_time
        return seconds / done if done > 0 and seconds > 0 else None


class ScoringProgress:
    """Shows how many images are predicted, and the rate: as a bar in a terminal, elsewhere a line every few seconds.

    Use it in `contextlib.closing`.
    """

    _EVERY_S = 5.0

    def __init__(self) -> None:
        self._bar = Bar() if is_interactive() else None
        self._start_time = self._shown_at = time.perf_counter()

    def __call__(self, progress: "Scored") -> None:
        """Show the progress after one part."""
        now = time.perf_counter()
        texts = [f"{progress.images}/{progress.total} images"]
        if progress.scored:
            rate = progress.scored / max(now - self._start_time, 1e-9)  # with the start of Ray
            texts.append(f"{rate:.1f} images/s")
            if left := progress.total - progress.images:
                texts.append(f"{duration(left / rate)} left")
        if progress.bad:
            texts.append(f"{progress.bad} bad")
        if self._bar is not None:
            self._bar.show(progress.images, progress.total, texts)
        elif now - self._shown_at >= self._EVERY_S or progress.images == progress.total:
            self._shown_at = now
            sys.stderr.write("  ".join(texts) + "\n")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def _without_nan(values: tuple[float, ...]) -> list[float]:
    return [value for value in values if value == value]  # noqa: PLR0124 - NaN is not itself


def show_log() -> None:
    """Print what the library logs on stderr; of several processes, only the first one's."""
    handler: logging.Handler = logging.NullHandler()
    if os.environ.get("RANK", "0") == "0":
        handler = LogHandler() if is_interactive() else logging.StreamHandler()
    logger = logging.getLogger("vit_memory")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def typed_command() -> str | None:
    """The command line as it was typed; None where no command line started this process."""
    if Path(sys.argv[0]).name not in ("vit-memory", "vit-memory.exe", "__main__.py"):
        return None
    return shlex.join(["vit-memory", *sys.argv[1:]])


def score_text(metric: str, score: float) -> str:
    """A validation score for a person: accuracies in per cent, mAP and R² as they are."""
    return f"{100 * score:.1f} %" if metric.endswith("accuracy") else f"{score:.3f}"


def duration(seconds: float) -> str:
    """Seconds for a person: 45 s, 3 min, 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Yields whether to stop: after Ctrl-C or SIGTERM, at the next step. A second one stops at once."""
    requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        # Past sys.stderr: a signal may arrive in the middle of a write to it, which cannot be entered twice.
        os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
