"""How a long command shows where it is: a live line in a terminal, a line now and then elsewhere; how it is stopped."""

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

if TYPE_CHECKING:
    from vit_memory.training.loop import Progress

_REDRAW_S = 0.2


class Meter:
    """Progress of a training on stderr: rate, what is left, loss and validation accuracy."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.stage = ""
        self.began = (0.0, 0)
        self.drawn = 0.0
        self.score: float | None = None

    def __call__(self, progress: "Progress") -> None:
        """Show it, if it is time to."""
        now = time.perf_counter()
        if progress.stage != self.stage:
            self._end()
            self.stage, self.began = progress.stage, (now, progress.step)
        looked = progress.scores is not None
        if looked:
            living = [a for a in progress.scores or () if a == a]  # noqa: PLR0124 - NaN is not itself
            self.score = max(living) if living else None
        last = progress.step == progress.steps
        if self.live and (last or now - self.drawn > _REDRAW_S):
            sys.stderr.write(f"\r\x1b[K{self._line(progress, now)}")
            sys.stderr.flush()
            self.drawn = now
        elif not self.live and (looked or (last and progress.stage == "storing")):
            sys.stderr.write(self._line(progress, now) + "\n")
        if last:
            self._end()

    def _line(self, progress: "Progress", now: float) -> str:
        since, first = self.began
        done = progress.step - first
        rate = ""
        if done > 0 and now > since:
            each = (now - since) / done
            left = duration(each * (progress.steps - progress.step))
            unit = "steps" if progress.stage == "training" else "views"
            rate = f"  {1 / each:.1f} {unit}/s" + (f", {left} left" if progress.step < progress.steps else "")
        if progress.stage == "storing":
            return f"storing views {progress.step} of {progress.steps}{rate}"
        losses = [loss for loss in progress.losses if loss == loss]  # noqa: PLR0124 - NaN
        loss = f"  loss {min(losses):.3f}" if losses else ""
        best = "" if self.score is None else f"  validation {progress.metric} {score_text(progress.metric, self.score)}"
        return f"step {progress.step} of {progress.steps}{loss}{best}{rate}"

    def _end(self) -> None:
        if self.live and self.stage:
            sys.stderr.write("\n")
        self.stage = ""


def show_log() -> None:
    """Print what the library logs as plain lines on stderr; of several processes, the first one's only."""
    handler = logging.StreamHandler() if os.environ.get("RANK", "0") == "0" else logging.NullHandler()
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
    """For a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or a polite kill asks to stop at the next step; a second one stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        sys.stderr.write("\nstopping after this step; once more stops at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
