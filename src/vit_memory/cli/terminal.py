"""Output for a terminal, drawn with rich: a progress bar, log lines above it, a table.

rich is imported when something is drawn, so --help does not wait for it.
"""

import logging
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_REDRAW_S = 0.2
_MIN_BAR_WIDTH = 8


@cache
def console() -> "Console":
    """The console on stderr. The bar and the log share it, so that a log line does not tear the bar."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def is_interactive() -> bool:
    """Whether stderr is a terminal that can redraw a line. FORCE_COLOR does not make a file one."""
    return sys.stderr.isatty() and console().is_interactive


class LogHandler(logging.Handler):
    """Prints log records on the console, above a live bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; the terminal wraps long lines."""
        console().print(self.format(record), soft_wrap=True)


class Bar:
    """A progress bar on one line, with as many of the texts beside it as fit.

    Use it in `contextlib.closing`: an open bar hides the cursor.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._drawn_at = 0.0

    def show(self, done: int, total: int, texts: Sequence[str]) -> None:
        """Draw the bar, at most every 0.2 s and at the end. `texts`: the most important one first."""
        now = time.perf_counter()
        if done < total and now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        text = fitting(texts, console().width - _MIN_BAR_WIDTH - 1)
        if self._progress is None:
            self._progress = _new_bar()
            self._progress.add_task("", completed=done, total=total, text=text)
            self._progress.start()
        else:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total, text=text)
        self._progress.refresh()

    def close(self) -> None:
        """Leave the bar as it was last drawn, and give the cursor back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def fitting(texts: Sequence[str], width: int) -> str:
    """The first text, and each further one that still fits into `width` columns."""
    line = texts[0]
    for text in texts[1:]:
        longer = f"{line}  {text}"
        line = longer if len(longer) <= width else line
    return line


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: the first column left, the others right, the first row bold."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(*row, style=None if i else "bold")
    Console(highlight=False, markup=False).print(table)


def _new_bar() -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    # No refreshing thread: data loading forks processes, and a fork may copy a lock that the thread holds.
    return Progress(
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
        console=console(),
        auto_refresh=False,
        expand=True,
    )
