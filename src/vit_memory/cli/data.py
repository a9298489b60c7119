"""vit-memory data: check images before training on them; the data options that several commands share."""

import csv
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.choices import Check, KindOrAuto, OnBadImage
from vit_memory.cli.options import spread_options
from vit_memory.cli.progress import show_log
from vit_memory.cli.terminal import Bar, is_interactive

if TYPE_CHECKING:
    from vit_memory.data.sources import Dataset
    from vit_memory.data.summary import Summary

SHOWN_CLASSES, SHOWN_BAD = 20, 10
DECODED_AT_MOST = 20_000  # images that are decoded before a training: half a minute
NOUNS = {"single-label": ("class", "classes"), "multi-label": ("label", "labels"), "regression": ("value", "values")}


_SOURCE = typer.Argument(
    metavar="DATA",
    show_default=False,
    help="A folder of class folders (or of train/, val/, test/ with such), a table (.csv, .tsv, .jsonl) "
    "with file and label, several labels or values, "
    "an .npz, a folder of IDX files, .parquet, hf:<dataset>[:config], digits, or the name of a known dataset.",
)
Source = Annotated[str, _SOURCE]
OptionalSource = Annotated[str | None, _SOURCE]  # where another option can name it too
DataDir = Annotated[Path | None, typer.Option(help="Folder of a named dataset, unpacked.", show_default=False)]
Download = Annotated[bool, typer.Option("--download", help="Download a named dataset to --data-dir with torchvision.")]
ImageColumn = Annotated[str | None, typer.Option(help="Column of a table with the images.  [default: file or image]")]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        help="Column of a table with the labels or values, or several, separated by commas (a name with a comma in "
        "double quotes).  [default: label]"
    ),
]
KindOption = Annotated[
    KindOrAuto,
    typer.Option("--kind", help="Kind of task: one label per image, several labels, or values (regression)."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed for splits that have to be drawn.")]
OnBadImageOption = Annotated[OnBadImage, typer.Option("--on-bad-image", help="Stop at a bad image, or leave it out.")]


@dataclass(frozen=True)
class DataOptions:
    """How DATA is read. A command declares `--seed` itself, since its meaning differs."""

    data_dir: DataDir = None
    download: Download = False
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    kind: KindOption = "auto"

    def open(
        self,
        source: str,
        seed: int,
        *,
        columns: Sequence[str] = ("label",),
        kind: KindOrAuto = "auto",
        labels: Sequence[str] | None = None,
    ) -> "Dataset":
        """Open DATA. `columns` and `kind` apply where --label-column and --kind were not given; `labels` as in
        `open_data`.
        """
        from vit_memory.data.sources import open_data

        return open_data(
            source,
            data_dir=self.data_dir,
            download=self.download,
            image_column=self.image_column,
            label_column=column_names(self.label_column, tuple(columns)),
            kind=kind if self.kind == "auto" else self.kind,
            labels=labels,
            seed=seed,
        )


@spread_options
def data(
    source: Source,
    *,
    options: DataOptions,
    seed: Seed = 0,
    check: Annotated[Check, typer.Option(help="Decode every image, read its header only, or neither.")] = "decode",
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON, with all classes and bad files, instead of text.")
    ] = False,
    write_labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the labels, one per line, in the order of their class numbers."),
    ] = None,
) -> None:
    """Check images before training: classes, splits, sizes, bad files."""
    show_log()
    dataset = options.open(source, seed)
    if write_labels is not None:
        _write_labels(write_labels, dataset.labels)
    summary = summarise_images(dataset, check)
    typer.echo(json.dumps(summary.as_json(), indent=2, ensure_ascii=False) if as_json else page(summary))


def _write_labels(path: Path, labels: Sequence[str]) -> None:
    from vit_memory.atomic import write_atomic
    from vit_memory.errors import FileError

    if path.exists():
        raise FileError(f"{path}: exists already; nothing was written. Use another name.")
    write_atomic(path, [f"{label}\n".encode() for label in labels])


def column_names(option: str | None, default: tuple[str, ...] = ("label",)) -> tuple[str, ...]:
    """The columns in --label-column, read as a line of CSV: a name with a comma is in double quotes."""
    names = next(csv.reader([option or ""], skipinitialspace=True), [])
    return tuple(name.strip() for name in names if name.strip()) or default


def summarise_images(dataset: "Dataset", check: Check | None = None) -> "Summary":
    """A summary, with progress on a terminal. By default, of large datasets only the headers are checked."""
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
    """The summary as text."""
    noun = NOUNS[summary.kind]
    lines = [
        f"{summary.source}: {_count(len(summary.labels), *noun)}, {summary.layout}",
        f"kind: {summary.kind} ({summary.kind_reason})",
        "",
        *(f"  {name:12}{count:8}  {summary.origin[name]}" for name, count in summary.images.items()),
        *_size_lines(summary),
        "",
        *_class_lines(summary, noun[0]),
        *([""] if summary.notes() else []),
        *(f"note: {note}" for note in summary.notes()),
        *(f"  {name}: {reason}" for name, reason in list(summary.bad.items())[:SHOWN_BAD]),
    ]
    return "\n".join([*lines, *_more(len(summary.bad) - SHOWN_BAD)])


def _size_lines(summary: "Summary") -> list[str]:
    if summary.sizes is None:
        return []
    small, middle, large = (" × ".join(map(str, summary.sizes[k])) for k in ("smallest", "median", "largest"))
    formats = ", ".join(f"{count} {name}" for name, count in summary.formats.items())
    span = f"all {small}" if small == large else f"{small} to {large}, median {middle}"
    return ["", f"  pixels      {span} ({formats})"]


def _class_lines(summary: "Summary", noun: str) -> list[str]:
    lines = ["  " + noun.ljust(32) + "".join(f"{name:>12}" for name in summary.counts)]
    for label in summary.labels[:SHOWN_CLASSES]:
        shown = label if len(label) <= 30 else label[:29] + "…"
        row = "  " + shown.ljust(32) + "".join(f"{counts[label]:12}" for counts in summary.counts.values())
        lines.append(row + _range(summary.values.get(label)))
    return [*lines, *_more(len(summary.labels) - SHOWN_CLASSES)]


def _more(count: int) -> list[str]:
    return [f"  … and {count} more (--json lists all)"] if count > 0 else []


def _range(facts: "dict[str, float] | None") -> str:
    if facts is None:
        return ""
    return f"   {facts['min']:.4g} to {facts['max']:.4g}, mean {facts['mean']:.4g}, std {facts['std']:.4g}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
