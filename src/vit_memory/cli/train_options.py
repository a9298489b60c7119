"""The options of vit-memory train in groups, each a frozen value that builds the library's own (`Grid`, `Recipe`, …).

A new option of a recipe is a field of `Recipe` and a field of `RecipeOptions` with the same name; likewise for
`TrainingOptions` and `MachineOptions`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from vit_memory.choices import (
    Augment,
    CacheDtype,
    CacheMode,
    Optimiser,
    Part,
    PrecisionOrAuto,
    Regime,
    Start,
)
from vit_memory.cli.cache import read_size
from vit_memory.cli.data import OnBadImageOption

if TYPE_CHECKING:
    from vit_memory.training.cache import Cache
    from vit_memory.training.grid import BranchGrid, Grid
    from vit_memory.training.options import TrainingOptions
    from vit_memory.training.ranks import Ranks
    from vit_memory.training.recipe import Recipe


def list_of(
    read: Callable[[str], Any], expected: str, or_word: str | None = None
) -> Callable[[str | None], str | None]:
    """A callback that refuses a comma-separated list with a wrong part, at the command line."""

    def check(text: str | None) -> str | None:
        if text is None:
            return None
        try:
            [read(part) for part in text.split(",") if text != or_word]
        except ValueError:
            raise typer.BadParameter(f"{text!r}: expected {expected}, separated by commas.") from None
        return text

    return check


def read_rank(text: str) -> int | None:
    """A rank, or None for the word none; ValueError for anything else."""
    if text == "none":
        return None
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _read_factor(text: str) -> tuple[str, float]:
    part, _, factor = text.partition("=")
    name = part.replace("-", "_")
    if name not in get_args(Part) or not 0 <= float(factor) < math.inf:
        raise ValueError(text)
    return name, float(factor)


def _read_factors(text: str) -> dict[str, float]:
    pairs = [_read_factor(part) for part in text.split(",")]
    if len(dict(pairs)) < len(pairs):
        raise typer.BadParameter(f"--rate-factors {text}: a part is given twice.")
    return dict(pairs)


def _words_of(choices: Any) -> Callable[[str | None], str | None]:
    """A callback that refuses a comma-separated list of words other than these."""
    words = get_args(choices)

    def check(text: str | None) -> str | None:
        if text is None:
            return None
        wrong = [word for word in text.split(",") if word not in words]
        if wrong:
            raise typer.BadParameter(f"{', '.join(wrong)}: expected {', '.join(words)}.")
        return text

    return check


def _same_named(options: Any, target: type) -> dict[str, Any]:
    """The options that were given and that are fields of the target."""
    names = {field.name for field in fields(target)}
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name in names}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class RunOptions:
    """The task, and the folder of the run."""

    name: Annotated[
        str | None, typer.Option(help="Name of the task.  [required, unless --dataset is given]", show_default=False)
    ] = None
    out: Annotated[Path | None, typer.Option(help="Folder of the run.  [default: runs/NAME]")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False
    backbone: Annotated[
        str | None,
        typer.Option(
            help="bundled, a Hugging Face id or folder, or timm:<name>.  [default: bundled, or that of --branch]"
        ),
    ] = None
    extends: Annotated[
        list[Path] | None, typer.Option(help="Task file that this task extends; may be repeated.", exists=True)
    ] = None
    per_class: Annotated[
        int | None, typer.Option(min=1, help="At most N training images per class (single-label).")
    ] = None
    report: Annotated[
        bool, typer.Option(help="Score the task on the test images and write report.html with charts and pictures.")
    ] = True

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.out or Path("runs") / self.task_name

    @property
    def task_name(self) -> str:
        """The name, which has to be given."""
        if self.name is None:
            raise typer.BadParameter("give the task a name.", param_hint="--name")
        return self.name


@dataclass(frozen=True)
class GridOptions:
    """The tasks that are trained at once."""

    regime: Annotated[
        str | None,
        typer.Option(
            callback=_words_of(Regime),
            help="What is trained: head, class, memory, reader, or several of these, separated by commas; or one of "
            "memory-unmasked, propagated, additive and full.  [default: head, class, memory and reader, all at once; "
            "memory or reader alone if an option of theirs is given; head with --branch-blocks]",
            show_default=False,
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory cells per block: 5, or several: 0,1,5.  [default: 5; 0 for readers]",
            callback=list_of(int, "whole numbers"),
        ),
    ] = None
    rank: Annotated[
        str | None,
        typer.Option(
            help="Rank of a reader's low-rank updates, or several: 4,8; none for no updates.  [default: 8]",
            callback=list_of(read_rank, "whole numbers above 0, or none"),
        ),
    ] = None
    gains: Annotated[
        bool | None,
        typer.Option(
            "--gains/--no-gains",
            help="Learn a scale and shift after both norms and a scale of each residual.  [default: gains]",
            show_default=False,
        ),
    ] = None
    projections: Annotated[
        str | None,
        typer.Option(
            help="Projections that a reader updates, joined by +, of q, k, v, o, fc1 and fc2 (k and v: of its class "
            "token only); several choices are separated by commas.  [default: q+o]",
        ),
    ] = None
    read_out: Annotated[
        str | None,
        typer.Option(
            help="What a reader's head reads: final, patches (their mean too), blocks:N (the last N blocks), or both "
            "joined by +; several choices are separated by commas.  [default: final]",
        ),
    ] = None
    start: Annotated[
        str,
        typer.Option(
            help="Start of the class token: original, normal (random), or original,normal to try both.",
            callback=_words_of(Start),
        ),
    ] = "original"
    seeds: Annotated[
        str,
        typer.Option(
            help="Seeds of new tasks and branches: 0, or several: 0,1,2.", callback=list_of(int, "whole numbers")
        ),
    ] = "0"

    @property
    def reader_options(self) -> bool:
        """Whether an option that only readers have was given."""
        return any(option is not None for option in (self.rank, self.gains, self.projections, self.read_out))

    def build(self, branches: "BranchGrid | None" = None) -> "Grid":
        """Every combination; without any option about regimes, the default grid, or heads on branches in training."""
        from vit_memory.training.grid import DEFAULT_GRID, Grid

        values: dict[str, Any] = {
            "starts": tuple(self.start.split(",")),
            "seeds": tuple(map(int, self.seeds.split(","))),
            "branch_grid": branches,
        }
        if self.regime is None and self.memory is None and not self.reader_options:
            return Grid(regimes=("head",), **values) if branches is not None else replace(DEFAULT_GRID, **values)
        regimes = tuple((self.regime or ("reader" if self.reader_options else "memory")).split(","))
        if self.reader_options and "reader" not in regimes:
            raise typer.BadParameter(
                f"--rank, --gains, --projections and --read-out are for --regime reader, not {', '.join(regimes)}."
            )
        if self.memory is not None:
            values["cells"] = tuple(map(int, self.memory.split(",")))
            if "reader" in regimes:
                values["reader_cells"] = values["cells"]
        if self.rank is not None:
            values["ranks"] = tuple(map(read_rank, self.rank.split(",")))
            if self.projections is not None and set(values["ranks"]) == {None}:
                raise typer.BadParameter("--projections are updated with a --rank, which is none.")
        if self.gains is not None:
            values["gains"] = (self.gains,)
        if self.projections is not None:
            values["projections"] = tuple(tuple(choice.split("+")) for choice in self.projections.split(","))
        if self.read_out is not None:
            values["read_outs"] = tuple(self.read_out.split(","))
        return Grid(regimes=regimes, **values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RecipeOptions:
    """What is learned. Fields with the name of a field of Recipe replace it."""

    lr: Annotated[
        str,
        typer.Option(
            help="Learning rate, or several: 0.1,0.3; auto trains two or three at once.",
            callback=list_of(float, "numbers or auto", or_word="auto"),
        ),
    ] = "auto"
    weight_decay: Annotated[
        str, typer.Option(help="Weight decay, or several: 0,0.01.", callback=list_of(float, "numbers"))
    ] = "0"
    recipe: Annotated[
        Literal["default", "paper"],
        typer.Option(help="Recipe that the other options change; paper: 20 000 steps of 512 images, always new views."),
    ] = "default"
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimiser steps.  [default: 300; 125 with readers or branches]")
    ] = None
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step.  [default: 64]")] = None
    optimiser: Annotated[
        Optimiser | None,
        typer.Option(help="Optimiser.  [default: sgd; adamw with readers or branches]", show_default=False),
    ] = None
    rate_factors: Annotated[
        str | None,
        typer.Option(
            metavar="PART=FACTOR,…",
            help="Factors on the learning rate, such as head=0.3,gains=10, of head, token, cells, gains and low-rank.  "
            "[default: 1; with adamw token=3,cells=3,gains=10]",
            callback=list_of(_read_factor, "PART=FACTOR, such as gains=10"),
        ),
    ] = None
    augment: Annotated[Augment, typer.Option(help="Augmentation of training images.")] = "inception"
    flip: Annotated[bool, typer.Option(help="Mirror half of the views; not for digits or letters.")] = True
    label_smoothing: Annotated[float, typer.Option(min=0, max=0.99, help="Label smoothing.")] = 0.0
    balance: Annotated[
        bool, typer.Option("--balance", help="Weigh rare classes and labels as much as frequent ones.")
    ] = False
    views: Annotated[
        int | None,
        typer.Option(min=0, help="Fixed views per image, one per epoch in turn; 0: always new views.  [default: 8]"),
    ] = None
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between evaluations on the validation images.  [default: 50; 25 with readers or branches]",
        ),
    ] = None
    keep_best: Annotated[
        bool | None,
        typer.Option(
            "--keep-best/--keep-last",
            help="End with the weights of the best evaluation, or with the last.  [default: last; best with readers or "
            "branches]",
            show_default=False,
        ),
    ] = None
    patience: Annotated[
        int | None, typer.Option(min=1, help="End after N evaluations without a better validation score.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, order and augmentation.")] = 0

    def build(self, grid: "Grid") -> "Recipe":
        """The chosen recipe, or the default one for this grid, with the given options."""
        from vit_memory.training.recipe import Recipe

        return self._changed(Recipe.for_regimes(grid.regimes, train_branches=grid.branch_grid is not None))

    def build_for_branches(self) -> "Recipe":
        """The chosen recipe, or the default one for branches, with the given options."""
        from vit_memory.training.recipe import Recipe

        return self._changed(Recipe.for_regimes((), train_branches=True))

    def _changed(self, default: "Recipe") -> "Recipe":
        from vit_memory.training.recipe import AUTO_RATES, RATE_FACTORS, Recipe

        if self.keep_best is False and self.patience is not None:
            raise typer.BadParameter("--patience ends with the best weights; it does not go with --keep-last.")
        base = Recipe.paper() if self.recipe == "paper" else default
        values = _same_named(self, Recipe)
        if self.views == 0:
            values["views"] = None
        optimiser = self.optimiser or base.optimiser
        if self.rate_factors is not None:
            values["rate_factors"] = replace(RATE_FACTORS[optimiser], **_read_factors(self.rate_factors))
        rates = AUTO_RATES[optimiser] if self.lr == "auto" else tuple(map(float, self.lr.split(",")))
        decays = tuple(map(float, self.weight_decay.split(",")))
        return replace(base, learning_rates=rates, weight_decays=decays, **values)


@dataclass(frozen=True)
class CacheOptions:
    """Whether and where trunks are stored."""

    cache: Annotated[
        CacheMode,
        typer.Option(help="Where to store the backbone's keys and values, so that each view is computed once."),
    ] = "auto"
    cache_dtype: Annotated[CacheDtype, typer.Option(help="Precision of stored values.")] = "float16"
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of --cache disk.  [default: user cache]")] = None
    cache_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=read_size,
            help="Most that all stores in --cache-dir may take, such as 20GB; the least recently used are removed "
            "first.  [default: 50GB, or a quarter of a smaller disk]",
        ),
    ] = None

    def build(self) -> "Cache":
        """The library's value."""
        from vit_memory.training.cache import Cache

        return Cache(self.cache, self.cache_dtype, self.cache_dir, self.cache_limit)


@dataclass(frozen=True)
class MachineOptions:
    """How the training runs. Fields with the name of a field of TrainingOptions set it."""

    image_size: Annotated[int | None, typer.Option(min=1, help="Image size.  [default: the backbone's]")] = None
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that load images.  [default: one per core, at most 8]")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.  [default: cores]")] = None
    on_bad_image: OnBadImageOption = "fail"
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu"
    precision: Annotated[
        PrecisionOrAuto, typer.Option(help="Precision of the backbone; auto: bfloat16 if CUDA has it, else float32.")
    ] = "auto"

    def build(self, cache: "Cache", ranks: "Ranks", *, resume: bool) -> "TrainingOptions":
        """The library's value."""
        from vit_memory.data.loading import default_workers
        from vit_memory.training.options import TrainingOptions

        values = {"workers": default_workers(), **_same_named(self, TrainingOptions)}
        return TrainingOptions(cache=cache, ranks=ranks, resume=resume, **values)
