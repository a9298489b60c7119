"""vit-memory demo: train three small tasks and write a page of results."""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.cli.progress import TrainingProgress, duration

if TYPE_CHECKING:
    from vit_memory.demo.run import DemoResult
    from vit_memory.training.callbacks import Progress


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the task files and the page.")] = Path("demo"),
) -> None:
    """Train three tasks on the bundled backbone, one of them extending another, and write a page of results.

    The images are real handwritten digits on real photographs, both from scikit-learn; nothing is downloaded.
    """
    import shutil

    from vit_memory.atomic import write_atomic
    from vit_memory.demo.page import render
    from vit_memory.demo.run import TEST, TRAIN, run_demo

    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    typer.echo(
        f"Training three tasks on one frozen backbone, with {TRAIN} images: handwritten digits pasted on photographs.\n"
        f"Digits and photographs come with scikit-learn; nothing is downloaded.\n"
    )
    try:
        with closing(TrainingProgress()) as progress:
            result = run_demo(out, _TaskProgress(progress))
    finally:
        shutil.rmtree(out / "trunks", ignore_errors=True)
    page = out / "index.html"
    write_atomic(page, [render(result).encode()])
    typer.echo(_table(result))
    typer.echo(f"One pass over {TEST} test images, all three tasks attached:")
    typer.echo(f"  original output bit-identical    {'yes' if result.identical else 'NO'}")
    typer.echo(f"  time against the plain backbone  {result.relative_time:.2f} x")
    typer.echo(
        f"\n{page} shows the predictions; the task files are beside it. {duration(time.perf_counter() - start)} in all."
    )
    if not result.identical:
        raise typer.Exit(1)


def _table(result: "DemoResult") -> str:
    lines = [f"{'task':16} {'kind':13} {'test score':>15} {'linear head':>15} {'file':>8} {'training':>10}"]
    for trained in result.trained:
        name, kind, extends = trained.demo_task.name, trained.demo_task.kind, trained.demo_task.extends
        title = f"{name}, on {extends}" if extends else name
        lines.append(
            f"{title:16} {kind:13} {result.scores[name].headline:>15} "
            f"{result.linear_head_scores[name].headline:>15} {trained.file_bytes / 1000:5.0f} kB "
            f"{trained.seconds:8.0f} s"
        )
    return "\n".join(lines) + "\n"


class _TaskProgress:
    """Prints each task's name above its progress."""

    def __init__(self, progress: TrainingProgress) -> None:
        self._name, self._progress = "", progress

    def __call__(self, name: str, progress: "Progress") -> None:
        if name != self._name:
            self._progress.close()
            self._name = name
            sys.stderr.write(f"{name}:\n")
        self._progress(progress)
