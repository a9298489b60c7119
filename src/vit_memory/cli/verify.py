"""vit-memory verify: check the promises on a backbone."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.choices import Precision
from vit_memory.cli.options import spread_options

if TYPE_CHECKING:
    from vit_memory.evaluation.verification import Verification

_TITLES = f"{'family':28} {'bit-identical':>13} {'interference':>14} {'reference difference':>21}"


@dataclass(frozen=True)
class RandomTasks:
    """The tasks that are attached, and the dtype."""

    tasks: Annotated[int, typer.Option(min=1, help="Random tasks per graph.")] = 6
    graphs: Annotated[int, typer.Option(min=1, help="Random graphs.")] = 3
    seed: Annotated[int, typer.Option(help="Seed of tasks, graphs and images.")] = 0
    dtype: Annotated[Precision, typer.Option(help="The dtype to compute in.")] = "float32"


@spread_options
def verify(
    backbone: Annotated[
        str | None,
        typer.Argument(
            metavar="BACKBONE", help="bundled, a Hugging Face id or folder, or timm:<name>.", show_default=False
        ),
    ] = None,
    *,
    all_families: Annotated[
        bool, typer.Option("--all-families", help="Instead, small random models of every installed family.")
    ] = False,
    random: RandomTasks,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Check that tasks change neither the backbone nor each other.

    Attaches random tasks in random graphs. Prints, per backbone: whether its output is the library's own, bit for bit;
    the largest difference between a task beside others and the same task alone; the largest difference to the dense
    reference. Exit 1 if a promise is broken.
    """
    if all_families == (backbone is not None):
        raise typer.BadParameter("give a backbone or --all-families, one of the two.")
    if not as_json:
        typer.echo(_TITLES)
    results: list[Verification] = []
    for result in _verify_families(random) if backbone is None else [_verify_backbone(backbone, random)]:
        results.append(result)
        if not as_json:
            typer.echo(_row(result))
    if as_json:
        fields = ("family", "base_identical", "worst_interference", "worst_reference_difference")
        typer.echo(json.dumps([{field: getattr(result, field) for field in fields} for result in results], indent=2))
    _fail_if_broken(results)
    if not as_json:
        typer.echo(
            f"\n{len(results)} backbones: the original output is the library's own, bit for bit; the output of every "
            f"task is the same beside others and alone (within {results[0].tolerance:g})."
        )


def _verify_backbone(name: str, random: RandomTasks) -> "Verification":
    import torch

    from vit_memory.backbone import load_backbone
    from vit_memory.evaluation.verification import verify as run

    loaded, dtype = load_backbone(name), getattr(torch, random.dtype)
    return run(loaded.model, name=loaded.name, dtype=dtype, tasks=random.tasks, graphs=random.graphs, seed=random.seed)


def _verify_families(random: RandomTasks) -> "Iterator[Verification]":
    import torch

    from vit_memory.errors import VitMemoryError
    from vit_memory.evaluation.verification import tiny_models
    from vit_memory.evaluation.verification import verify as run

    dtype, sizes = getattr(torch, random.dtype), ((32, 32), (48, 40))
    for name, _, make in tiny_models():
        if isinstance(make, VitMemoryError):
            typer.echo(f"{name}: left out, {make}", err=True)
        else:
            yield run(
                make(), name=name, dtype=dtype, tasks=random.tasks, graphs=random.graphs, seed=random.seed, sizes=sizes
            )


def _row(result: "Verification") -> str:
    return (
        f"{result.family:28} {'yes' if result.base_identical else 'NO':>13} {result.worst_interference:14.1e} "
        f"{result.worst_reference_difference:21.1e}{'' if result.passed else '   BROKEN'}"
    )


def _fail_if_broken(results: "Sequence[Verification]") -> None:
    broken = [result.family for result in results if not result.passed]
    if broken or not results:
        typer.echo(
            f"broken on: {', '.join(broken)}" if broken else "no family is installed: nothing verified", err=True
        )
        raise typer.Exit(1)
