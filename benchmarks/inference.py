"""What tasks cost at inference: ratios to the library's own forward, beside the FLOP limit and the alternatives.

    python -m benchmarks.inference --json out.json
    python -m benchmarks.inference --readers --json out.json --keep     # tasks with learned readers instead of memory
    python -m benchmarks.inference --branch-blocks 4 12 --tasks 1 16 --json out.json --keep     # tasks on a branch
    python -m benchmarks.inference --table out.json     # as Markdown

ViT-B/32 and ViT-B/16 of transformers with random weights (costs do not depend on their values), 224 px, float32,
5 memory cells per block (or readers of rank 8 with gains), 10 classes per task. Each row holds, as multiples of the
plain forward of the same batch:

    ratio        the fused pass with all tasks
    flop_limit   (tokens + tasks) / tokens, what the linear layers alone cost, low-rank updates of readers included;
                 for tasks on a branch of k of 12 blocks (tokens · (1 + k / 12) + tasks) / tokens
    dense        the dense reference: everything concatenated under one mask
    separate     one model per task: as many plain forwards as tasks (left out where one call would take over 30 s)

`original_equal` says that the library's logits came out of the measured pass to the bit.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.measure import commit, compare, kept_rows, seconds, write
from vit_memory import Backbone, Branch, MemoryViT, Task, load_backbone, new_branch, new_task
from vit_memory.reference import dense_forward

LONGEST_CALL_S = 30.0
RANK = 8


def tasks_of(backbone: Backbone, count: int, readers: bool) -> list[Task]:
    """Tasks of 10 classes; nothing of a reader is zero, so that nothing is left out."""
    labels = [str(label) for label in range(10)]
    if not readers:
        return [new_task(backbone, f"task-{i}", labels, cells=5) for i in range(count)]
    tasks = [new_task(backbone, f"task-{i}", labels, regime="reader", rank=RANK, gains=True) for i in range(count)]
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator) * 0.02

    return [replace(task, reader=task.reader.map(drawn)) for task in tasks if task.reader is not None]


def branch_of(backbone: Backbone, blocks: int) -> Branch:
    """A branch of rank 8 on q and v in which nothing is zero."""
    branch = new_branch(backbone, "branch", blocks=blocks, rank=RANK)
    generator = torch.Generator().manual_seed(0)
    return replace(branch, adapter=branch.adapter.map(lambda like: torch.randn(like.shape, generator=generator) * 0.02))


def measure(
    library: nn.Module, backbone: Backbone, batch: int, count: int, budget_s: float, readers: bool, blocks: int = 0
) -> dict[str, object]:
    """One row: `count` tasks on a batch of `batch` images, with `blocks` all on a branch of so many blocks."""
    images = torch.randn(batch, 3, 224, 224)
    tasks, branches = tasks_of(backbone, count, readers), []
    if blocks:
        branches = [branch_of(backbone, blocks)]
        tasks = [replace(task, branch=branches[0].ref) for task in tasks]
    model = MemoryViT(backbone, tasks, branches)
    patch = backbone.roles.patch_size[0]
    tokens = (224 // patch) ** 2 + 1
    # A row costs 12 D² multiply-adds per block; two updates of a reader add 2 · 2 · rank · D.
    row = 1 + (4 * RANK / (12 * backbone.width) if readers else 0)
    limit = (tokens * (1 + blocks / backbone.depth) + count * row) / tokens

    def plain() -> Tensor:
        logits: Tensor = library(pixel_values=images).logits
        return logits

    equal = torch.equal(model(images).original.logits, plain())
    ours = compare(lambda: model(images), plain, budget_s=budget_s)
    kind = f"branch{blocks}-" * bool(blocks) + ("readers" if readers else "tasks")
    result: dict[str, object] = {
        "case": f"vit-b{patch}-batch{batch}-{kind}{count}",
        "ratio": ours.median,
        "spread": ours.spread,
        "repeats": ours.repeats,
        "flop_limit": limit,
        "over_limit": ours.median / limit,
        "original_equal": equal,
        "commit": commit(),
    }
    if blocks:
        return result
    if count and not readers:
        dense = compare(lambda: dense_forward(backbone, tasks, images), plain, budget_s=0, least=2)
        result |= {"dense": dense.median, "dense_spread": dense.spread}
    if not readers and 0 < count * seconds(plain) < LONGEST_CALL_S:
        apart = compare(lambda: [plain() for _ in range(count)], plain, budget_s=0, least=1)
        result |= {"separate": apart.median}
    return result


def rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row per model, batch, branch and number of tasks."""
    for patch in options.patches:
        torch.manual_seed(0)
        library = ViTForImageClassification(ViTConfig(patch_size=patch, num_labels=1000)).eval()
        backbone = load_backbone(library)
        for batch, blocks, count in product(options.batches, options.branch_blocks or [0], options.tasks):
            yield measure(library, backbone, batch, count, options.seconds, options.readers, blocks)


def line(row: dict[str, object]) -> str:
    """A row as people read it; a dash where nothing was measured."""
    low, high = row["spread"]  # type: ignore[misc]
    dense, separate = (f"{row[key]:.2f}" if key in row else "-" for key in ("dense", "separate"))
    changed = "" if row["original_equal"] else "   ORIGINAL CHANGED"
    return (
        f"{row['case']:28} {row['ratio']:7.3f} {low:7.3f}-{high:.3f} {row['flop_limit']:8.3f} "
        f"{row['over_limit']:6.3f} {dense:>7} {separate:>9}{changed}"
    )


CASE = re.compile(r"vit-(b\d+)-batch(\d+)-(?:branch(\d+)-)?(tasks|readers)(\d+)")


def tables(record: dict[str, Any]) -> list[str]:
    """A record as Markdown: the cost of tasks, of readers and of branches as multiples of the plain forward.

    In brackets the FLOP limit.
    """
    cells: dict[str, dict[tuple[str, str], dict[tuple[int, int], str]]] = {}
    for row in record["rows"]:
        model, batch, blocks, kind, tasks = CASE.fullmatch(row["case"]).groups()  # type: ignore[union-attr]
        one = cells.setdefault("branch" if blocks else kind, {}).setdefault((model, batch), {})
        one[int(blocks or 0), int(tasks)] = f"{row['ratio']:.2f} ({row['flop_limit']:.2f})"
    return [table(kind) for kind in cells.values()]


def table(cells: dict[tuple[str, str], dict[tuple[int, int], str]]) -> str:
    """One kind of tasks: a line per model and batch, a column per branch and number of tasks."""
    columns = sorted({column for row in cells.values() for column in row})
    head = ["| ViT, batch |", *(f" {title(*column)} |" for column in columns)]
    lines = ["".join(head), "|---|" + "---|" * len(columns)]
    for (model, batch), row in cells.items():
        name = f"{model[0].upper()}/{model[1:]}, {batch}"
        lines.append(f"| {name} | " + " | ".join(row.get(column, "") for column in columns) + " |")
    return "\n".join(lines)


def title(blocks: int, tasks: int) -> str:
    """The head of a column."""
    count = f"{tasks} task{'s' if tasks != 1 else ''}"
    return f"{blocks} blocks, {count}" if blocks else count


def main() -> None:
    """Run, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--patches", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tasks", type=int, nargs="+", default=[0, 1, 4, 16, 64])
    parser.add_argument("--readers", action="store_true", help="tasks with learned readers")
    parser.add_argument("--branch-blocks", type=int, nargs="+", help="tasks on a branch of the last N blocks")
    parser.add_argument("--seconds", type=float, default=60.0, help="budget per row for the fused pass")
    parser.add_argument("--keep", action="store_true", help="keep the record's rows that are not measured again")
    parser.add_argument("--table", type=Path, help="print a record as Markdown instead of measuring")
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(tables(json.loads(options.table.read_text()))))
        return

    done: list[dict[str, object]] = []
    print(f"{'case':28} {'ratio':>7} {'quartiles':>15} {'limit':>7} {'over':>6} {'dense':>7} {'separate':>9}")
    with torch.no_grad():
        for row in rows(options):
            done.append(row)
            print(line(row), flush=True)
            if options.json:
                kept = kept_rows(options.json, [row["case"] for row in done]) if options.keep else []
                write(options.json, [*kept, *done], dtype="float32", cells=5, pixels=224)


if __name__ == "__main__":
    main()
