"""vit-memory demo: three tasks learned before your eyes, and what one pass says of them."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.cli.progress import Meter, duration

if TYPE_CHECKING:
    from vit_memory.evaluation.demo import Demonstration
    from vit_memory.training.callbacks import Progress


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the task files and the page.")] = Path("demo"),
) -> None:
    """Teach the bundled backbone three tasks, one of them built on another, and show that nothing else changed.

    The pictures are real handwritten digits on real photographs, both from scikit-learn; nothing is downloaded.
    """
    import shutil

    from vit_memory.evaluation.demo import TEST, TRAIN, demonstrate
    from vit_memory.evaluation.demo_page import render
    from vit_memory.files.atomic import write_atomic

    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    typer.echo(
        f"One frozen backbone learns three questions about {TRAIN} pictures: handwritten digits laid on photographs.\n"
        f"Digits and photographs are real and come with scikit-learn; laying one on the other is our doing.\n"
    )
    try:
        shown = demonstrate(out, _Told())
    finally:
        shutil.rmtree(out / "trunks", ignore_errors=True)
    page = out / "index.html"
    write_atomic(page, [render(shown).encode()])
    typer.echo(_table(shown))
    typer.echo(f"One pass over {TEST} test pictures, all three tasks attached:")
    typer.echo(f"  original output bit-identical    {'yes' if shown.identical else 'NO'}")
    typer.echo(f"  cost against the plain backbone  {shown.cost:.2f} x")
    typer.echo(
        f"\n{page}: the same with pictures. Task files are beside it. {duration(time.perf_counter() - began)} in all."
    )
    if not shown.identical:
        raise typer.Exit(1)


def _table(shown: "Demonstration") -> str:
    from vit_memory.evaluation.demo_page import score_text

    lines = [f"{'task':16} {'kind':13} {'score':>11} {'head only':>11} {'file':>8} {'trained in':>11}"]
    for known in shown.learned:
        name = known.question.name
        title = f"{name}, on {known.question.extends}" if known.question.extends else name
        lines.append(
            f"{title:16} {known.question.kind:13} {score_text(shown.scores[name]):>11} "
            f"{score_text(shown.head_scores[name]):>11} {known.file_bytes / 1000:5.0f} kB {known.seconds:9.0f} s"
        )
    return "\n".join(lines) + "\n"


class _Told:
    """A meter per task, under its name."""

    def __init__(self) -> None:
        self.name, self.meter = "", Meter()

    def __call__(self, name: str, progress: "Progress") -> None:
        if name != self.name:
            self.name, self.meter = name, Meter()
            sys.stderr.write(f"{name}:\n")
        self.meter(progress)
