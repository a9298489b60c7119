"""Is this code slower than an earlier commit? The time of a pass here over its time there.

    python -m benchmarks.versions 98a07d8 --json out.json     # 98a07d8: the last commit before learned readers

Tasks of 5 memory cells per block on ViT-B/32 and ViT-B/16 with random weights, as in `benchmarks.inference`, which
compares with the library instead. The earlier commit is unpacked into a temporary folder. Both run as processes of
their own that take turns, so that one computes while the other waits.

The rows `overhead-…` have a model of the same depth whose products cost next to nothing, so their time is what Python
and torch spend on calling them. The noise of a shared machine is a few per cent of a large pass and hides such a
difference there; it does not hide it here. `extra_ms` is what a pass takes longer now.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from io import BytesIO
from itertools import product
from pathlib import Path

from benchmarks.measure import compare, seconds, write

# Two tokens of width 24.
NO_WORK = {"patch_size": 224, "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 24}
IMAGES_PER_TURN = 8  # so that few of them find the processor's caches as the other process left them

# What each process runs. Its names are those that both commits have.
WORKER = f"""
import json, sys
import torch
from transformers import ViTConfig, ViTForImageClassification
from vit_memory import MemoryViT, load_backbone, new_task

torch.set_grad_enabled(False)
for line in sys.stdin:
    request = json.loads(line)
    if request:
        torch.manual_seed(0)
        config = ViTConfig(num_labels=1000, **request["config"])
        backbone = load_backbone(ViTForImageClassification(config).eval())
        labels = [str(label) for label in range(10)]
        tasks = [new_task(backbone, f"task-{{i}}", labels, cells=5) for i in range(request["tasks"])]
        model, images = MemoryViT(backbone, tasks), torch.randn(request["batch"], 3, 224, 224)
    for _ in range(max(1, {IMAGES_PER_TURN} // len(images))):
        model(images)
    print("done", flush=True)
"""


class Version:
    """A process that runs one version of the package."""

    def __init__(self, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**os.environ, "PYTHONPATH": str(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, **case: object) -> None:
        """Compute once more, after building the model of a case if one is given."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the measured process ended; its error stands above")

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()


def unpack(commit: str, folder: Path) -> Path:
    """Write the sources of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit, "src"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


def main() -> None:
    """Run, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--patches", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--seconds", type=float, default=60.0, help="budget per row")
    options = parser.parse_args()

    rows: list[dict[str, object]] = []
    print(f"{'case':28} {'now / then':>10} {'quartiles':>15} {'rounds':>7} {'extra, ms':>9}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        earlier, present = Version(unpack(options.commit, folder)), Version(Path("src").resolve())
        for version in (earlier, present):
            stack.callback(version.close)
        cases: list[tuple[str, dict[str, int], int, int]] = [
            *((f"overhead-batch1-tasks{tasks}", NO_WORK, 1, tasks) for tasks in options.tasks),
            *(
                (f"vit-b{patch}-batch{batch}-tasks{tasks}", {"patch_size": patch}, batch, tasks)
                for patch, batch, tasks in product(options.patches, options.batches, options.tasks)
            ),
        ]
        for case, config, batch, tasks in cases:
            for version in (earlier, present):
                version.turn(config=config, batch=batch, tasks=tasks)
            ratio = compare(present.turn, earlier.turn, budget_s=options.seconds)
            low, high = ratio.spread
            turn_ms = 1000 * statistics.median(seconds(present.turn) for _ in range(3))
            pass_ms = turn_ms / max(1, IMAGES_PER_TURN // batch)
            extra_ms = pass_ms * (1 - 1 / ratio.median)
            print(
                f"{case:28} {ratio.median:10.3f} {low:7.3f}-{high:.3f} {ratio.repeats:7} {extra_ms:+9.2f}", flush=True
            )
            row = {"case": case, "ratio": ratio.median, "spread": ratio.spread, "repeats": ratio.repeats}
            rows.append({**row, "pass_ms": pass_ms, "extra_ms": extra_ms})
            if options.json:
                write(options.json, rows, earlier=options.commit)


if __name__ == "__main__":
    main()
