"""vit-memory reproduce: the paper's experiments, at their own scale or at one that two cores can do."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from vit_memory.cli.options import spread_options
from vit_memory.cli.progress import TrainingProgress, duration, show_log, stopping, typed_command
from vit_memory.cli.terminal import print_table
from vit_memory.cli.train_options import CacheOptions, MachineOptions, list_of

if TYPE_CHECKING:
    from vit_memory.backbone import Backbone
    from vit_memory.evaluation.reproduce.cost import Estimate
    from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
    from vit_memory.evaluation.reproduce.runner import Runner, Sources
    from vit_memory.evaluation.reproduce.scale import Scale
    from vit_memory.training.options import TrainingOptions

ExperimentName = Literal[
    "table2", "concatenation", "extension", "ablations", "continual", "fewshot", "architectures", "all", "report"
]
ScaleName = Literal["small", "paper"]


@dataclass(frozen=True)
class ReproduceOptions:
    """What is trained, on what, and where the records go."""

    scale: Annotated[
        ScaleName,
        typer.Option(help="small: 20 images per class of any datasets, for two cores. paper: its recipe and datasets."),
    ] = "small"
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with a folder per dataset; for paper, the archives as they unpack.  [default: digits, which "
            "comes with the package]",
            exists=True,
            file_okay=False,
        ),
    ] = None
    datasets: Annotated[
        str | None, typer.Option(help="Names of datasets, separated by commas.  [default: every folder of --data]")
    ] = None
    backbones: Annotated[
        str | None,
        typer.Option(
            "--backbones",
            "--backbone",
            help="bundled, Hugging Face ids or folders, or timm:<name>, separated by commas.  [default: bundled; for "
            "paper, its ViT-B/32]",
        ),
    ] = None
    title: Annotated[str | None, typer.Option(help="What tables call the backbone.  [default: its id or folder]")] = (
        None
    )
    seeds: Annotated[
        str | None,
        typer.Option(help="Separated by commas.  [default: 0,1,2]", callback=list_of(int, "whole numbers")),
    ] = None
    per_class: Annotated[int | None, typer.Option(min=1, help="Training images per class.")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps of every training.")] = None
    methods: Annotated[
        str | None,
        typer.Option(
            help="Only these methods, by their names in the tables, separated by semicolons; measures nothing."
        ),
    ] = None
    pictures: Annotated[
        str, typer.Option(help="Datasets whose images the report may show, separated by commas.  [default: none]")
    ] = ""
    out: Annotated[Path | None, typer.Option(help="Folder of records and report.  [default: reproduce/SCALE]")] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it would cost here, from a short timing, and stop.")
    ] = False

    @property
    def folder(self) -> Path:
        """Of records and report."""
        return self.out or Path("reproduce") / self.scale

    def build_scale(self) -> "Scale":
        """The scale, with what was asked to be different."""
        from vit_memory.evaluation.reproduce.scale import SCALES

        scale = SCALES[self.scale]
        if self.seeds is not None:
            scale = replace(scale, seeds=tuple(dict.fromkeys(int(seed) for seed in self.seeds.split(","))))
        if self.per_class is not None:
            scale = replace(scale, per_class=self.per_class)
        if self.steps is not None:
            steps = self.steps
            recipes = {
                group: replace(recipe, steps=steps, evaluate_every=min(recipe.evaluate_every, steps))
                for group, recipe in scale.recipes.items()
            }
            scale = replace(scale, recipes=recipes)
        return scale


@spread_options
def reproduce(
    experiment: Annotated[
        ExperimentName,
        typer.Argument(metavar="EXPERIMENT", help=", ".join(get_args(ExperimentName)) + ".", show_default=False),
    ],
    options: ReproduceOptions,
    cache: CacheOptions,
    machine: MachineOptions,
) -> None:
    """Run an experiment of the paper, and write records and a report.

    Every training writes one JSON record; the same command goes on after an interruption, and trains only what has no
    record. Records of other settings are never mixed. With --cache disk, trainings on the same images share what the
    backbone computed once. `report` writes the report from the records that are there.
    """
    from vit_memory.evaluation.reproduce.experiments import EXPERIMENTS

    show_log()
    if experiment != "report":
        chosen = list(EXPERIMENTS.values()) if experiment == "all" else [EXPERIMENTS[experiment]]
        _run(chosen, options, cache, machine)
        if options.dry_run:
            return
    _write_report(options)


def _run(
    experiments: "Sequence[Experiment]", options: ReproduceOptions, cache: CacheOptions, machine: MachineOptions
) -> None:
    from vit_memory.errors import TrainingStopped
    from vit_memory.evaluation.reproduce.runner import Sources
    from vit_memory.parallel import limit_threads
    from vit_memory.training.ranks import Ranks

    training = machine.build(cache.build(), Ranks(), resume=False)
    limit_threads(training.threads)
    scale, sources = options.build_scale(), Sources(options.data)
    for name in (options.backbones or scale.backbone).split(","):
        backbone = _load(name, options, machine)
        plans = list(_plans(experiments, scale, sources, backbone.depth, options))
        if options.dry_run:
            for experiment, plan in plans:
                _print_cost(experiment, plan, backbone, sources, options, training.image_size)
            continue
        with stopping() as should_stop, closing(TrainingProgress()) as progress:
            for experiment, plan in plans:
                runner = _runner(backbone, plan, sources, options, training, should_stop, progress)
                try:
                    _run_one(experiment, runner, plan, options)
                except TrainingStopped as stopped:
                    progress.close()
                    typer.echo(
                        f"{stopped} Go on with the same command: what has a record is not trained again.", err=True
                    )
                    raise typer.Exit(130) from None


def _run_one(experiment: "Experiment", runner: "Runner", plan: "Plan", options: ReproduceOptions) -> None:
    typer.echo(f"{experiment.name}: {experiment.question} {', '.join(plan.datasets)}", err=True)
    if options.methods is None:
        experiment.run(runner, plan)
    else:
        runner.train(
            [one for one in experiment.trainings(plan) if one.method.name in _names(experiment, plan, options)]
        )


def _names(experiment: "Experiment", plan: "Plan", options: ReproduceOptions) -> list[str]:
    """The methods that were asked for; refuses unknown ones."""
    known = list(dict.fromkeys(one.method.name for one in experiment.trainings(plan)))
    names = [name.strip() for name in (options.methods or "").split(";")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{'; '.join(unknown)}: {experiment.name} has {'; '.join(known)}.")
    return names


def _plans(
    experiments: "Sequence[Experiment]", scale: "Scale", sources: "Sources", depth: int, options: ReproduceOptions
) -> "Iterator[tuple[Experiment, Plan]]":
    """Every experiment with its plan; of several, those that the datasets do not suit are left out and named."""
    from vit_memory.errors import DataError
    from vit_memory.evaluation.reproduce.extension import COARSE

    for experiment in experiments:
        plan = _plan(experiment, scale, sources, depth, options)
        if experiment.name == "extension" and not plan.coarse and not options.dry_run:
            reason = (
                f"none of {', '.join(plan.datasets)} has a column {COARSE}: extension needs coarse and fine labels of "
                f"the same images."
            )
            if len(experiments) == 1:
                raise DataError(reason)
            typer.echo(f"extension is left out: {reason}", err=True)
            continue
        yield experiment, plan


def _plan(
    experiment: "Experiment", scale: "Scale", sources: "Sources", depth: int, options: ReproduceOptions
) -> "Plan":
    from vit_memory.evaluation.reproduce.experiment import Plan
    from vit_memory.evaluation.reproduce.extension import COARSE

    names = scale.datasets or sources.names()
    if options.datasets is not None:
        names = tuple(dict.fromkeys(name.strip() for name in options.datasets.split(",")))
    coarse: tuple[str, ...] = ()
    if experiment.name == "extension":
        coarse = tuple(name for name in names if sources.has(name, COARSE))
    return Plan(scale, names, coarse, depth)


def _runner(
    backbone: "Backbone",
    plan: "Plan",
    sources: "Sources",
    options: ReproduceOptions,
    training: "TrainingOptions",
    should_stop: Callable[[], bool],
    progress: TrainingProgress,
) -> "Runner":
    from vit_memory.evaluation.environment import command_line
    from vit_memory.evaluation.reproduce.records import RecordFolder
    from vit_memory.evaluation.reproduce.runner import Runner

    return Runner(
        backbone,
        plan.scale,
        sources,
        RecordFolder(options.folder),
        training,
        command_line("vit-memory") if typed_command() else "",
        tuple(name.strip() for name in options.pictures.split(",")),
        progress,
        should_stop,
    )


def _load(name: str, options: ReproduceOptions, machine: MachineOptions) -> "Backbone":
    """The backbone; for a dry run, random weights of its shape where that is known: they cost the same."""
    from vit_memory.backbone import load_backbone
    from vit_memory.cli.train import backbone_dtype
    from vit_memory.families.vit import random_model
    from vit_memory.preprocessing import Preprocessing

    model = random_model(name) if options.dry_run else None
    device, dtype = machine.device, backbone_dtype(machine.precision, machine.device)
    if model is None:
        return load_backbone(name, name=options.title, device=device, dtype=dtype)
    facts = Preprocessing(224, (224, 224), (0.5,) * 3, (0.5,) * 3, "bilinear")
    return load_backbone(model, name=options.title or name, preprocessing=facts, device=device, dtype=dtype)


def _print_cost(
    experiment: "Experiment",
    plan: "Plan",
    backbone: "Backbone",
    sources: "Sources",
    options: ReproduceOptions,
    image_size: int | None,
) -> None:
    from vit_memory.errors import DataError
    from vit_memory.evaluation.reproduce.cost import KNOWN_DATASETS, Counts, estimate, time_backbone
    from vit_memory.evaluation.reproduce.runner import rate_chooser, with_prerequisites
    from vit_memory.training.fit import training_preprocessing
    from vit_memory.training.trunk_shape import TrunkShape

    trainings = experiment.trainings(plan)
    if options.methods is not None:
        names = _names(experiment, plan, options)
        trainings = [one for one in trainings if one.method.name in names]
    trainings = with_prerequisites(trainings, plan.scale)
    counts = {}
    for name in dict.fromkeys(one.dataset for one in trainings):
        try:
            counts[name] = Counts.of(sources.open(name, "label", 0))
        except DataError:
            if name not in KNOWN_DATASETS:
                raise
            counts[name] = KNOWN_DATASETS[name]
    preprocessing = training_preprocessing(backbone, image_size)
    seconds = time_backbone(backbone, image_size, dict.fromkeys(one.method for one in trainings))
    rows = estimate(
        trainings,
        plan.scale,
        lambda one: one == rate_chooser(one, plan.scale),
        counts,
        seconds,
        TrunkShape.of(backbone, preprocessing.crop or backbone.roles.image_size),
    )
    _print_estimates(experiment.name, backbone.name, plan, rows)


def _print_estimates(experiment: str, backbone: str, plan: "Plan", rows: "Sequence[Estimate]") -> None:
    from vit_memory.training.sizes import size

    table: dict[tuple[str, str], list[Estimate]] = {}
    for row in rows:
        name = row.methods[0] if len(row.methods) == 1 else f"{len(row.methods)} methods at once"
        table.setdefault((row.dataset, name), []).append(row)
    columns = ("dataset", "trained", "settings", "passes", "time", "stored")
    lines = []
    for (dataset, name), group in table.items():
        lines.append(
            (
                dataset,
                name,
                str(sum(row.settings for row in group)),
                f"{sum(row.passes for row in group) / 1e6:.2f} M",
                _long_duration(sum(row.hours for row in group)),
                size(max(row.stored_bytes for row in group)) if any(row.stored_bytes for row in group) else "-",
            )
        )
    seeds = ", ".join(map(str, plan.scale.seeds))
    typer.echo(f"{experiment} on {backbone}, scale {plan.scale.name}, seeds {seeds}; on this machine about:\n")
    print_table(columns, lines)
    hours, passes = sum(row.hours for row in rows), sum(row.passes for row in rows)
    stored = max((row.stored_bytes for row in rows), default=0)
    typer.echo(
        f"\n{len(rows)} runs, {passes / 1e6:.1f} million passes of one image, {_long_duration(hours)}, at most "
        f"{size(stored)} of stored trunks at a time.\n"
        f"A pass is one image forward through the backbone. From a timing of a few steps on random images: half or "
        f"double of it is possible.\n"
    )


def _long_duration(hours: float) -> str:
    return f"{hours / 24:.0f} days" if hours > 72 else duration(3600 * hours)


def _write_report(options: ReproduceOptions) -> None:
    from vit_memory.report.experiments import write_experiment_report

    for path in write_experiment_report(options.folder):
        typer.echo(str(path))
