"""Options of the 2023 reproduction's vit_train.py and vit_validation.py that train and evaluate accept.

Each means what one of ours means, so the two are not given together. docs/coming-from-2023.md lists them, and what
differs behind them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from vit_memory.cli.data import DataOptions
from vit_memory.cli.models import ComputeOptions
from vit_memory.cli.train_options import GridOptions, RecipeOptions, RunOptions

if TYPE_CHECKING:
    from vit_memory.data.sources import Dataset
    from vit_memory.task import Task
    from vit_memory.training.runs import TrainingPlan

Dataset2023 = Literal["CIFAR100", "INaturalist", "Places", "Sun"]
DATASETS_2023: Mapping[str, str] = {  # our names by theirs
    "CIFAR100": "cifar100",
    "INaturalist": "inaturalist-2017",
    "Places": "places365",
    "Sun": "sun397",
}
BACKBONE_2023 = "google/vit-base-patch32-224-in21k"
_PANEL = "Options of the 2023 reproduction (docs/coming-from-2023.md)"
_Value = TypeVar("_Value")


def _one_of(ours: str, value: _Value | None, theirs: str, alias: _Value | None) -> _Value | None:
    if value is not None and alias is not None:
        raise typer.BadParameter(f"{theirs} and {ours} mean the same; give one of them.")
    return value if alias is None else alias


@dataclass(frozen=True)
class SharedOptions2023:
    """The options that both scripts have."""

    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            "-r",
            rich_help_panel=_PANEL,
            help="Same as --data-dir: this folder, or datasets/ in it if that exists.",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option("--batch_size", "-b", min=1, rich_help_panel=_PANEL, help="Same as --batch.")
    ] = None

    def data_options(self, data: DataOptions) -> DataOptions:
        """The data options, with the folder of a named dataset from --directory."""
        if self.directory is None:
            return data
        datasets = self.directory / "datasets"  # where the reproduction has them
        folder = datasets if datasets.is_dir() else self.directory
        return replace(data, data_dir=_one_of("--data-dir", data.data_dir, "--directory", folder))


@dataclass(frozen=True)
class TrainOptions2023(SharedOptions2023):
    """The options of vit_train.py."""

    dataset: Annotated[
        Dataset2023 | None,
        typer.Option(
            "--dataset",
            "-d",
            rich_help_panel=_PANEL,
            help="Same as DATA: cifar100, inaturalist-2017, places365 or sun397; also the task's name without --name.",
            show_default=False,
        ),
    ] = None
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            "-e",
            min=1,
            rich_help_panel=_PANEL,
            help="In place of --steps: so many passes over the training images, with an evaluation after each.",
        ),
    ] = None
    number_of_memory_tokens: Annotated[
        int | None,
        typer.Option("--number_of_memory_tokens", "-m", min=0, rich_help_panel=_PANEL, help="Same as --memory."),
    ] = None

    def source(self, data: str | None) -> str:
        """DATA, or the dataset of --dataset."""
        if data is not None and self.dataset is not None:
            raise typer.BadParameter(
                f"DATA ({data}) and --dataset {self.dataset} both name the images; give one of them."
            )
        if self.dataset is not None:
            return DATASETS_2023[self.dataset]
        if data is None:
            raise typer.BadParameter("give DATA, the images to train on (vit-memory train --help lists the layouts).")
        return data

    def run_options(self, run: RunOptions) -> RunOptions:
        """The run's options, with a task named after --dataset if it has no other name."""
        return run if run.name is not None else replace(run, name=self.dataset)

    def grid_options(self, grid: GridOptions) -> GridOptions:
        """The grid's options, with --number_of_memory_tokens as --memory."""
        cells = None if self.number_of_memory_tokens is None else str(self.number_of_memory_tokens)
        return replace(grid, memory=_one_of("--memory", grid.memory, "--number_of_memory_tokens", cells))

    def recipe_options(self, recipe: RecipeOptions) -> RecipeOptions:
        """The recipe's options, with --batch_size as --batch."""
        if self.epochs is not None and recipe.steps is not None:
            raise typer.BadParameter(
                f"--epochs {self.epochs} and --steps {recipe.steps} both say how long to train; give one of them."
            )
        return replace(recipe, batch=_one_of("--batch", recipe.batch, "--batch_size", self.batch_size))

    def plan(self, plan: "TrainingPlan", dataset: "Dataset", evaluate_every: int | None) -> "TrainingPlan":
        """The plan with the steps of --epochs on this dataset; `evaluate_every` is the option, if it was given."""
        if self.epochs is None:
            return plan
        from vit_memory.training.batch_plan import steps_per_epoch

        per_epoch = steps_per_epoch(len(plan.train_split(dataset)), plan.recipe)
        steps = self.epochs * per_epoch
        return replace(plan, recipe=replace(plan.recipe, steps=steps, evaluate_every=evaluate_every or per_epoch))

    def notes(self, run: RunOptions, plan: "TrainingPlan", dataset: "Dataset") -> list[str]:
        """What to tell people about these options."""
        notes = []
        if self.epochs is not None:
            images, recipe = len(plan.train_split(dataset)), plan.recipe
            notes.append(
                f"--epochs {self.epochs}: {recipe.steps} optimiser steps, {recipe.steps // self.epochs} per epoch "
                f"({images} training images in batches of {recipe.batch})"
            )
        if self.dataset is not None and run.backbone is None and plan.branch is None:
            notes.append(f"backbone: bundled; the 2023 reproduction's is --backbone {BACKBONE_2023}")
        return notes


@dataclass(frozen=True)
class EvaluateOptions2023(SharedOptions2023):
    """The options of vit_validation.py."""

    models_list: Annotated[
        list[str] | None,
        typer.Option(
            "--models-list",
            "--models_list",
            "-m",
            metavar="NAME...",
            rich_help_panel=_PANEL,
            help="CIFAR100, INaturalist, Places or Sun, or several: score runs/NAME/NAME.safetensors (or "
            "models/NAME.safetensors) of each on its own dataset, all in one model.",
            show_default=False,
        ),
    ] = None
    number_of_memory_tokens: Annotated[
        int | None,
        typer.Option(
            "--number_of_memory_tokens",
            "-t",
            min=0,
            rich_help_panel=_PANEL,
            help="Refuse task files with another number of memory cells; the files know theirs.",
        ),
    ] = None

    def models(self, sources: Sequence[Path]) -> dict[str, Path]:
        """The task files of --models-list by dataset; empty without it. Words after the first are in `sources`."""
        if not self.models_list:
            return {}
        names = [*self.models_list, *map(str, sources)]
        for name in names:
            if name not in DATASETS_2023:
                raise typer.BadParameter(
                    f"{name}: --models-list takes {', '.join(DATASETS_2023)}. For other tasks: vit-memory evaluate "
                    f"TASK.safetensors --data DATA",
                    param_hint="--models-list",
                )
        if len(set(names)) < len(names):
            raise typer.BadParameter(f"{' '.join(names)}: a name is given twice.", param_hint="--models-list")
        return {name: _task_file(name) for name in names}

    def compute_options(self, compute: ComputeOptions) -> ComputeOptions:
        """The options for computing, with --batch_size as --batch."""
        return replace(compute, batch=_one_of("--batch", compute.batch, "--batch_size", self.batch_size))

    def check_cells(self, tasks: "Sequence[Task]") -> None:
        """Refuse tasks whose number of memory cells is not --number_of_memory_tokens."""
        wanted = self.number_of_memory_tokens
        other = [f"{task.name} has {task.cells}" for task in tasks if wanted is not None and task.cells != wanted]
        if other:
            raise typer.BadParameter(
                f"{wanted}, but of memory cells per block {', '.join(other)}. Leave the option out: a task file knows "
                f"its number.",
                param_hint="--number_of_memory_tokens",
            )


def _task_file(name: str) -> Path:
    """The task that was trained with --dataset NAME, or imported from NAME_model.pt."""
    trained, imported = Path("runs") / name / f"{name}.safetensors", Path("models") / f"{name}.safetensors"
    existing = [path for path in (trained, imported) if path.exists()]
    if len(existing) == 1:
        return existing[0]
    data = f"--data {DATASETS_2023[name]} --data-dir FOLDER"
    if existing:
        message = f"both {trained} and {imported} exist. Name the one to score: vit-memory evaluate {trained} {data}"
    else:
        message = (
            f"no {trained}, which vit-memory train --dataset {name} writes, and no {imported}, which "
            f"vit-memory import models/{name}_model.pt --backbone {BACKBONE_2023} --out models writes. "
            f"For a task elsewhere: vit-memory evaluate TASK.safetensors {data}"
        )
    raise typer.BadParameter(f"{name}: {message}", param_hint="--models-list")
