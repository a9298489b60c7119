"""`vit-memory train` told nothing, beside what it did before there were learned readers: accuracy and time.

    python -m benchmarks.defaults --json results/defaults.json

Bundled backbone, all training images of a pack, default options but for --seed. `before` is `--memory 5`: five cells,
three learning rates, 300 steps. The two commands run one after the other, and take turns in which comes first; the time
is that of the whole command without the report, by the clock and by the processor (all cores added up), which other
work on the machine changes less. Test images are read once per command, pack and seed, by `evaluate`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import commit, kept_rows, write
from vit_memory import load_task

COMMANDS: dict[str, list[str]] = {"before": ["--memory", "5"], "now": []}


def train(name: str, pack: Path, seed: int) -> dict[str, Any]:
    """One training in a folder of its own, then its test accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", str(pack.resolve()), "--name", "task", "--seed", str(seed), "--no-report", "--out", folder]
        start, before = time.perf_counter(), _processor_seconds()
        _vit_memory([*words, *COMMANDS[name]])
        seconds, processor_seconds = time.perf_counter() - start, _processor_seconds() - before
        file = Path(folder) / "task.safetensors"
        task = load_task(file)
        scored = json.loads(_vit_memory(["evaluate", str(file), "--data", str(pack.resolve()), "--json"]))
        scores = scored["tasks"]["task"]
    return {
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "kept": task.method,
        "parameters": task.parameters,
        "validation": task.record.metrics["validation_accuracy"],
        "test": scores["top1"],
        "test_images": scores["images"],
    }


def _processor_seconds() -> float:
    """Of all commands that have ended, their loading processes included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _vit_memory(words: list[str]) -> str:
    command = [sys.executable, "-m", "vit_memory", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here; rows of other packs in it are kept")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder of data/")
    parser.add_argument("--packs", nargs="+", default=["trashnet6", "aid30"])
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for pack in asked.packs:
        for seed in range(asked.seeds):
            for name in COMMANDS if seed % 2 else reversed(COMMANDS):
                row = {"case": f"{pack}, {name}, seed {seed}", "pack": pack, "command": name, "seed": seed}
                rows.append({**row, **train(name, asked.shared / "data" / pack, seed), "commit": commit()})
                last = rows[-1]
                print(
                    f"{last['case']:32} test {100 * last['test']:.1f} %  {last['seconds']:.0f} s  "
                    f"{last['processor_seconds']:.0f} s of processors  {last['kept']}",
                    flush=True,
                )
        for name in COMMANDS:
            own = [row for row in rows if (row["pack"], row["command"]) == (pack, name)]
            keys = ("test", "seconds", "processor_seconds")
            test, seconds, processors = (statistics.mean(row[key] for row in own) for key in keys)
            print(f"{pack}, {name}: mean test {100 * test:.1f} %, {seconds:.0f} s, {processors:.0f} s of processors")
        if asked.json:
            write(asked.json, [*kept_rows(asked.json, [row["case"] for row in rows]), *rows], backbone="bundled")


if __name__ == "__main__":
    main()
