"""How this project measures: two sides back to back, many times, as a ratio with its spread."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from vit_memory.atomic import write_atomic

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
    record = {
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version(), **_versions("torch", "transformers", "timm", "vit-memory")},
        "commit": commit(),
        "command": _command(),
        **notes,
        "rows": list(rows),
    }
    text = json.dumps(record, indent=2, allow_nan=False)
    write_atomic(path, [text.encode(), b"\n"])


def _command() -> str:
    """The command, with absolute paths cut to their names: folders say something of the machine only."""
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *arguments])


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Which code is measured. Records do not count: a run that writes one does not change what it measures."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=here, check=False).stdout.strip()

    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", "..", ":!../results") else "")
