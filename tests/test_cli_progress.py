"""Progress on stderr: a bar that fits a terminal and survives log lines; plain lines elsewhere."""

import io
import logging
import re
from contextlib import closing

import pytest
from rich.console import Console

from vit_memory.cli import progress as cli_progress
from vit_memory.cli import terminal
from vit_memory.cli.progress import TrainingProgress, show_log
from vit_memory.training.callbacks import Progress

NAN = float("nan")
STEPS = [
    Progress(1, 2, stage="storing"),
    Progress(2, 2, stage="storing"),
    Progress(1, 3, (NAN, NAN)),
    Progress(2, 3, (0.5, NAN), scores=(0.75, NAN)),
    Progress(3, 3, (0.25, NAN), scores=(0.875, NAN)),
]


@pytest.fixture
def screen(monkeypatch):
    """Pretend that stderr is a terminal of some columns; returns what is written to it."""

    def of_width(columns):
        written = io.StringIO()
        console = Console(file=written, force_terminal=True, width=columns, highlight=False, markup=False, _environ={})
        for module in (cli_progress, terminal):
            monkeypatch.setattr(module, "is_interactive", lambda: True)
        monkeypatch.setattr(terminal, "console", lambda: console)
        monkeypatch.setattr(terminal, "_REDRAW_S", 0)
        return written

    return of_width


def lines_of(written):
    """What the lines show, one by one as they are drawn over each other."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_bar_fits_the_terminal_and_gives_the_cursor_back(columns, screen):
    written = screen(columns)
    with closing(TrainingProgress()) as report:
        for step in STEPS:
            report(step)
    lines = lines_of(written)
    assert max(map(len, lines)) <= columns
    assert any("storing views 2/2" in line for line in lines)
    assert "step 3/3  val accuracy 87.5 %" in lines[-1]
    assert ("loss 0.250" in lines[-1]) == (columns > 40)  # what matters most stays
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")


def test_the_cursor_comes_back_after_an_interrupted_training(screen):
    written = screen(80)

    def train():
        with closing(TrainingProgress()) as report:
            report(STEPS[2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert written.getvalue().endswith("\n\x1b[?25h")


def test_a_warning_is_a_whole_line_above_the_bar(screen):
    written = screen(40)
    logger = logging.getLogger("vit_memory")
    before = logger.handlers, logger.level
    try:
        show_log()
        with closing(TrainingProgress()) as report:
            report(STEPS[2])
            logger.warning("setting 1 [diverged] at step 1 and is left out of what follows")
            report(STEPS[3])
    finally:
        logger.handlers = before[0]
        logger.setLevel(before[1])
    lines = lines_of(written)
    assert "setting 1 [diverged] at step 1 and is left out of what follows" in lines
    assert "step 2/3" in lines[-1]


def test_without_a_terminal_there_is_a_plain_line_per_evaluation(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some CI services do
    with closing(TrainingProgress()) as report:
        for step in STEPS:
            report(step)
    lines = [
        re.sub(r"  [\d.]+ (steps|views)/s(, \d+ s left)?$", "", line) for line in capsys.readouterr().err.split("\n")
    ]
    assert lines == [
        "storing views 2 of 2",
        "step 2 of 3  loss 0.500  validation accuracy 75.0 %",
        "step 3 of 3  loss 0.250  validation accuracy 87.5 %",
        "",
    ]
