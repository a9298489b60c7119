"""vit-memory branch: train a branch on several datasets, or rename one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.choices import Regime
from vit_memory.cli.branch_options import BranchSizes
from vit_memory.cli.data import DataOptions
from vit_memory.cli.options import spread_options
from vit_memory.cli.progress import score_text, show_log
from vit_memory.cli.settings_table import print_settings
from vit_memory.cli.train import backbone_dtype, run_training, show_and_check, write_run_report
from vit_memory.cli.train_options import CacheOptions, MachineOptions, RecipeOptions

if TYPE_CHECKING:
    from vit_memory.data.sources import Dataset
    from vit_memory.training.results import FitResult

branch_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Train a branch on several datasets, or rename one."
)


@dataclass(frozen=True)
class BranchRunOptions:
    """The branch, its datasets, and the folder of the run."""

    name: Annotated[str, typer.Option(help="Name of the branch.", show_default=False)]
    data: Annotated[
        list[str],
        typer.Option(
            metavar="[TASK=]DATA",
            help="Images to train on, as in vit-memory train; repeated for every dataset. The task of a dataset is "
            "called TASK, or after DATA.",
            show_default=False,
        ),
    ]
    out: Annotated[Path | None, typer.Option(help="Folder of the run.  [default: runs/NAME]")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False
    backbone: Annotated[str, typer.Option(help="bundled, a Hugging Face id or folder, or timm:<name>.")] = "bundled"
    regime: Annotated[
        Regime, typer.Option(help="What each dataset trains on the branch: head, class, memory or reader.")
    ] = "class"
    per_class: Annotated[
        int | None, typer.Option(min=1, help="At most N training images per class (single-label).")
    ] = None
    report: Annotated[
        bool, typer.Option(help="Score the tasks on the test images and write report.html with charts and pictures.")
    ] = True

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.out or Path("runs") / self.name

    def sources(self) -> dict[str, str]:
        """What to open, by the names of the tasks."""
        sources: dict[str, str] = {}
        for text in self.data:
            name, equals, source = text.partition("=")
            if not equals or not re.fullmatch(r"[\w.-]+", name):
                name, source = re.sub(r"[^0-9A-Za-z._-]+", "-", Path(text).stem).strip("-._") or "task", text
            if name in sources:
                raise typer.BadParameter(
                    f"{sources[name]} and {source} would both be called {name}: use --data TASK=DATA."
                )
            sources[name] = source
        return sources


@branch_app.command()
@spread_options
def train(
    run: BranchRunOptions,
    branch: BranchSizes,
    recipe: RecipeOptions,
    cache: CacheOptions,
    machine: MachineOptions,
    options: DataOptions,
) -> None:
    """Train one branch on several datasets at once, with a task of its own for each.

    That is how a domain gets its branch: further tasks then stand on it, which does not change any more (vit-memory
    train --branch FILE). The best setting by the mean of the datasets' validation scores becomes the files NAME.branch
    and TASK, one for every dataset.
    """
    from vit_memory.backbone import load_backbone
    from vit_memory.files.branchfile import branch_file
    from vit_memory.parallel import limit_threads
    from vit_memory.task import check_name
    from vit_memory.training.branch_runs import BranchPlan, train_branch_run
    from vit_memory.training.ranks import init_ranks

    check_name(run.name, "branch")
    sources = run.sources()
    for name in sources:
        check_name(name)
    show_log()
    limit_threads(machine.threads)
    plan = BranchPlan(run.name, branch.build(), recipe.build_for_branches(), run.regime, recipe.seed, run.per_class)
    ranks = init_ranks(machine.device)
    datasets: dict[str, Dataset] = {name: options.open(source, recipe.seed) for name, source in sources.items()}
    with ranks.fail_together():
        if ranks.is_main:
            for name, dataset in datasets.items():
                show_and_check(dataset, sources[name], machine.on_bad_image)
    dtype = backbone_dtype(machine.precision, machine.device)
    backbone = load_backbone(run.backbone, device=ranks.device(machine.device), dtype=dtype)
    training = machine.build(cache.build(), ranks, resume=run.resume)
    result = run_training(
        run.folder, ranks, lambda callbacks: train_branch_run(run.folder, backbone, datasets, plan, training, callbacks)
    )
    if ranks.is_main:
        _show(run, result, datasets)
        if run.report:
            write_run_report(run.folder, backbone, datasets, result, training)
        typer.echo(
            f"further tasks on it: vit-memory train DATA --name TASK --branch {branch_file(run.folder, run.name)}"
        )


def _show(run: BranchRunOptions, result: "FitResult", datasets: "Mapping[str, Dataset]") -> None:
    from vit_memory.files.branchfile import branch_file
    from vit_memory.training.results import metric_key

    print_settings(result)
    best = result.best
    path = branch_file(run.folder, run.name)
    assert best.branch is not None
    typer.echo(f"\n{path}: {best.branch.method}, {path.stat().st_size / 1000:.0f} kB")
    for task in best.tasks:
        metric, score = next(iter(task.record.metrics.items()))
        shown = next(m for m in ("accuracy", "balanced accuracy", "mAP", "R²") if metric_key(m) == metric)
        size = (run.folder / f"{task.name}.safetensors").stat().st_size / 1000
        typer.echo(
            f"{run.folder / task.name}.safetensors: {len(datasets[task.name].labels)} labels, validation {shown} "
            f"{score_text(shown, score)}, {size:.0f} kB"
        )


@branch_app.command()
def rename(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A branch file (.safetensors).", exists=True)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name of the branch.")],
) -> None:
    """Rename the branch of a file; NAME.branch.safetensors replaces FILE. Tasks on it find it by its content."""
    from vit_memory.files.edit import rename_branch_file

    path = rename_branch_file(file, name)
    typer.echo(f"{path}: the branch is now called {name!r}; {file} is removed")
