"""vit-memory data: look at images before anything is trained on them."""

import csv
import enum
import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vit_memory.cli.progress import show_log
from vit_memory.cli.terminal import Bar, is_interactive

if TYPE_CHECKING:
    from vit_memory.data.sources import Dataset
    from vit_memory.data.summary import Summary

SHOWN_CLASSES, SHOWN_BAD = 20, 10
DECODED_AT_MOST = 20_000  # images that are decoded whole before a training: half a minute


class Check(str, enum.Enum):
    """How closely to look."""

    decode = "decode"
    headers = "headers"
    none = "none"


class TaskKind(str, enum.Enum):
    """What an image has."""

    auto = "auto"
    single_label = "single-label"
    multi_label = "multi-label"
    regression = "regression"


# What every command that reads DATA takes.
Source = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        show_default=False,
        help="A folder of class folders (or of train/, val/, test/ with such), a table (.csv, .tsv, .jsonl) "
        "with file and label, several labels or values, "
        "an .npz, a folder of IDX files, .parquet, hf:<dataset>[:config], digits, or the name of a known dataset.",
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Where a named dataset lies unpacked.", show_default=False)]
Download = Annotated[bool, typer.Option("--download", help="Fetch a named dataset into --data-dir with torchvision.")]
ImageColumn = Annotated[str | None, typer.Option(help="A table's column of images.  [default: file or image]")]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        help="A table's column of labels or values; several, separated by commas (a name with a comma in double "
        "quotes).  [default: label]"
    ),
]
KindOption = Annotated[
    TaskKind, typer.Option("--kind", help="What an image has: one label, several labels, or values (regression).")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the splits that have to be drawn.")]


def data(
    source: Source,
    data_dir: DataDir = None,
    download: Download = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    kind: KindOption = TaskKind.auto,
    seed: Seed = 0,
    check: Annotated[Check, typer.Option(help="Decode every image, read its header only, or neither.")] = Check.decode,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON instead of a page.")] = False,
) -> None:
    """Print what is in DATA: classes, counts, splits, sizes, and which files are bad."""
    from vit_memory.data.sources import open_data

    show_log()
    dataset = open_data(
        source,
        data_dir=data_dir,
        download=download,
        image_column=image_column,
        label_column=column_names(label_column),
        kind=kind.value,
        seed=seed,
    )
    summary = looked_at(dataset, check.value)
    typer.echo(json.dumps(summary.as_json(), indent=2, ensure_ascii=False) if as_json else page(summary))


def column_names(option: str | None, default: tuple[str, ...] = ("label",)) -> tuple[str, ...]:
    """The columns that --label-column names, as in a line of CSV: a name with a comma stands in double quotes."""
    names = next(csv.reader([option or ""], skipinitialspace=True), [])
    return tuple(name.strip() for name in names if name.strip()) or default


def looked_at(dataset: "Dataset", check: "Literal['decode', 'headers', 'none'] | None" = None) -> "Summary":
    """A summary, with progress on a terminal. Unless told, large datasets are looked at by their headers only."""
    from vit_memory.data.loading import default_workers
    from vit_memory.data.summary import summarise

    if check is None:
        check = "decode" if sum(map(len, dataset.splits.values())) <= DECODED_AT_MOST else "headers"
    with closing(Bar()) as bar:

        def show(done: int, total: int) -> None:
            bar.show(done, total, [f"checked {done}/{total} images"])

        progress = show if is_interactive() else None
        return summarise(dataset, check=check, workers=default_workers(), progress=progress)


def page(summary: "Summary") -> str:
    """The summary for a person to read."""
    what = {"single-label": ("class", "classes"), "multi-label": ("label", "labels"), "regression": ("value", "values")}
    shape = f"{summary.source}: {_count(len(summary.labels), *what[summary.kind])}, {summary.layout}"
    lines = [shape, f"kind: {summary.kind} ({summary.kind_reason})", ""]
    for name, count in summary.images.items():
        lines.append(f"  {name:12}{count:8}  {summary.origin[name]}")
    if summary.sizes is not None:
        small, middle, large = (" × ".join(map(str, summary.sizes[k])) for k in ("smallest", "median", "largest"))
        formats = ", ".join(f"{count} {name}" for name, count in summary.formats.items())
        span = f"all {small}" if small == large else f"{small} to {large}, median {middle}"
        lines += ["", f"  pixels      {span} ({formats})"]
    lines += ["", "  " + what[summary.kind][0].ljust(32) + "".join(f"{name:>12}" for name in summary.counts)]
    for label in summary.labels[:SHOWN_CLASSES]:
        shown = label if len(label) <= 30 else label[:29] + "…"
        row = "  " + shown.ljust(32) + "".join(f"{counts[label]:12}" for counts in summary.counts.values())
        lines.append(row + _range(summary.values.get(label)))
    if len(summary.labels) > SHOWN_CLASSES:
        lines.append(f"  … and {len(summary.labels) - SHOWN_CLASSES} more (--json lists all)")
    lines += [""] if summary.notes() else []
    lines += [f"note: {note}" for note in summary.notes()]
    lines += [f"  {name}: {reason}" for name, reason in list(summary.bad.items())[:SHOWN_BAD]]
    if len(summary.bad) > SHOWN_BAD:
        lines.append(f"  … and {len(summary.bad) - SHOWN_BAD} more (--json lists all)")
    return "\n".join(lines)


def _range(facts: "dict[str, float] | None") -> str:
    if facts is None:
        return ""
    return f"   {facts['min']:.4g} to {facts['max']:.4g}, mean {facts['mean']:.4g}, std {facts['std']:.4g}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
