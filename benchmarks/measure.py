"""How this project measures: two sides back to back, many times, as a ratio with its spread."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from vit_memory.atomic import write_atomic
from vit_memory.evaluation.environment import command_line, commit, environment

__all__ = ["add_rows", "commit", "compare", "kept_rows", "seconds", "write"]

Work = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Time of one side over time of the other."""

    median: float
    spread: tuple[float, float]  # quartiles
    repeats: int


def seconds(work: Work) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(work: Work, baseline: Work, *, budget_s: float, least: int = 5) -> Ratio:
    """Time `work` against `baseline`: after one warm-up each, rounds of baseline, work, work, baseline.

    The mirrored order cancels a drift of the machine within a round; the median over rounds drops what a neighbour on
    the same machine did to some of them. Rounds go on until the budget is spent, and for `least` rounds at least.
    """
    baseline()
    work()
    ratios: list[float] = []
    end = time.perf_counter() + budget_s
    while len(ratios) < least or time.perf_counter() < end:
        before, first, second, after = (seconds(side) for side in (baseline, work, work, baseline))
        ratios.append((first + second) / (before + after))
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Ratio(statistics.median(ratios), (low, high), len(ratios))


def kept_rows(path: Path, cases: Sequence[object]) -> list[dict[str, object]]:
    """Rows of an earlier record that are not measured again; each remembers its own commit."""
    earlier: list[dict[str, object]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in earlier if row["case"] not in cases]


def write(path: Path, rows: Sequence[dict[str, object]], **notes: object) -> None:
    """Write a benchmark's record; an interrupted write leaves the previous file intact."""
    command = command_line(_program())
    record = {**environment(), "command": command, **notes, "rows": list(rows)}
    text = json.dumps(record, indent=2, allow_nan=False)
    write_atomic(path, [text.encode(), b"\n"])


def add_rows(path: Path, rows: Sequence[dict[str, object]], **notes: object) -> None:
    """Add rows to a record, in place of those of the same cases. Several processes may write one record.

    The record names the command that makes all rows, not the part of it that this process was asked for. Each row
    says on which processor, and with how many threads, its own process computed.
    """
    command = f"{_program()} --json results/{path.name}"
    machine = environment()["machine"]
    threads = machine.pop("threads")
    rows = [{**row, "threads": threads, "processor": machine["processor"]} for row in rows]
    with FileLock(Path(tempfile.gettempdir()) / f"{path.name}.lock"):
        kept = kept_rows(path, [row["case"] for row in rows])
        write(path, [*kept, *rows], command=command, machine=machine, **notes)


def _program() -> str:
    return f"python -m benchmarks.{Path(sys.argv[0]).stem}"
