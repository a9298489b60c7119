"""Is this code slower than an earlier commit? The time of a pass here over its time there.

    python -m benchmarks.versions 98a07d8 --json out.json     # 98a07d8: the last commit before learned readers

Tasks of 5 memory cells per block on ViT-B/32 and ViT-B/16 with random weights, as in `benchmarks.inference`, which
compares with the library instead. The earlier commit is unpacked into a temporary folder and imported beside the
present code. Both run in one process on the same weights: as two processes, the same code differed from itself by
several per cent for as long as they lived, depending on where their memory lay.

The rows `overhead-…` have a model of the same depth whose products cost next to nothing, so their time is what Python
and torch spend on calling them. `extra_ms` is what a pass takes longer now. The rows `control-…` compare the earlier
commit with a second copy of itself: what they differ from 1 is noise.
"""

import argparse
import importlib
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.measure import Work, compare, seconds, write

# Two tokens of width 24.
NO_WORK = {"patch_size": 224, "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 24}


class Version:
    """The package as it is in a folder, imported beside other versions of it."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._modules: dict[str, ModuleType] = {}
        with self._imported():
            self._package: Any = importlib.import_module("vit_memory")

    @contextmanager
    def _imported(self) -> Iterator[None]:
        """Let `import vit_memory` mean this version, for as long as it imports more of itself."""
        others = _take_modules()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self._source))
        try:
            yield
        finally:
            sys.path.remove(str(self._source))
            self._modules = _take_modules()
            sys.modules.update(others)

    @torch.no_grad()
    def work(self, library_model: torch.nn.Module, images: torch.Tensor, tasks: int) -> Work:
        """A pass over the images with so many tasks attached, ready to be timed."""
        with self._imported():
            backbone = self._package.load_backbone(library_model)
            labels = [str(label) for label in range(10)]
            attached = [self._package.new_task(backbone, f"task-{i}", labels, cells=5) for i in range(tasks)]
            model = self._package.MemoryViT(backbone, attached)
            model(images)  # imports what the first pass imports, and proves the join plan
        return lambda: model(images)


def _take_modules() -> dict[str, ModuleType]:
    """Remove the imported version of the package from `sys.modules`."""
    names = [name for name in sys.modules if name.partition(".")[0] == "vit_memory"]
    return {name: sys.modules.pop(name) for name in names}


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
    cases: list[tuple[str, dict[str, int], int, int]] = [
        *((f"overhead-batch1-tasks{tasks}", NO_WORK, 1, tasks) for tasks in options.tasks),
        *(
            (f"vit-b{patch}-batch{batch}-tasks{tasks}", {"patch_size": patch}, batch, tasks)
            for patch, batch, tasks in product(options.patches, options.batches, options.tasks)
        ),
    ]

    rows: list[dict[str, object]] = []
    print(f"{'case':34} {'now / then':>10} {'quartiles':>15} {'rounds':>7} {'extra, ms':>9}")
    with tempfile.TemporaryDirectory() as folder:
        source = unpack(options.commit, Path(folder))
        earlier, again, present = Version(source), Version(source), Version(Path("src").resolve())
        for case, config, batch, tasks in cases:
            torch.manual_seed(0)
            library_model = ViTForImageClassification(ViTConfig(num_labels=1000, **config)).eval()
            images = torch.randn(batch, 3, 224, 224)
            then, control, now = (version.work(library_model, images, tasks) for version in (earlier, again, present))
            for name, work in ((case, now), (f"control-{case}", control)):
                ratio = compare(work, then, budget_s=options.seconds)
                low, high = ratio.spread
                pass_ms = 1000 * statistics.median(seconds(work) for _ in range(5))
                extra_ms = pass_ms * (1 - 1 / ratio.median)
                print(
                    f"{name:34} {ratio.median:10.3f} {low:7.3f}-{high:.3f} {ratio.repeats:7} {extra_ms:+9.2f}",
                    flush=True,
                )
                row = {"case": name, "ratio": ratio.median, "spread": ratio.spread, "repeats": ratio.repeats}
                rows.append({**row, "pass_ms": pass_ms, "extra_ms": extra_ms})
                if options.json:
                    write(options.json, rows, earlier=options.commit)


if __name__ == "__main__":
    main()
