"""Options of the commands that run trained tasks: which tasks, on which backbone, with which hardware."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.cli.tasks import Rename, parse_rename

if TYPE_CHECKING:
    from vit_memory.evaluation.models import Model


@dataclass(frozen=True)
class ModelOptions:
    """Which tasks of the files to run, and on which backbone."""

    backbone: Annotated[
        str | None, typer.Option(help="Load this backbone.  [default: the one that the tasks name]")
    ] = None
    task: Annotated[list[str] | None, typer.Option(help="Only this task; may be repeated.  [default: all]")] = None
    rename: Rename = None
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu"

    def open(self, sources: Sequence[Path]) -> "Model":
        """A model with all tasks of these task files and bundles."""
        from vit_memory.evaluation.models import open_model

        return open_model(sources, self.backbone, self.device, parse_rename(self.rename))


@dataclass(frozen=True)
class ComputeOptions:
    """How images are loaded and computed."""

    batch: Annotated[int | None, typer.Option(min=1, help="Images per forward pass.  [default: 64]")] = None
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that load images.  [default: one per core, at most 8]")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.  [default: cores]")] = None

    def limit_threads(self) -> None:
        """Let torch use `--threads` threads in this process."""
        from vit_memory.parallel import limit_threads

        limit_threads(self.threads)

    @property
    def images_per_pass(self) -> int:
        """`--batch`, or 64."""
        return 64 if self.batch is None else self.batch

    @property
    def loader_processes(self) -> int:
        """`--workers`, or as many as there are cores."""
        from vit_memory.data.loading import default_workers

        return default_workers() if self.workers is None else self.workers
