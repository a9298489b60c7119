"""vit-memory verify: see for yourself that nothing changes."""

import enum
import json
from typing import Annotated

import typer


class Precision(str, enum.Enum):
    """What to compute in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def verify(
    backbone: Annotated[
        str | None, typer.Argument(help="A Hugging Face id or folder, or timm:<name>.", show_default=False)
    ] = None,
    all_families: Annotated[
        bool, typer.Option("--all-families", help="Small random models of every installed family instead.")
    ] = False,
    tasks: Annotated[int, typer.Option(min=1, help="Random tasks per graph.")] = 6,
    graphs: Annotated[int, typer.Option(min=1, help="Random graphs.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of tasks, graphs and images.")] = 0,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.float32,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """Attach random tasks in random graphs and check what is promised.

    Prints, per backbone: whether the original output is the library's own to the bit; the worst difference of a task in
    company to itself alone; the worst difference to the dense reference. Exit code 1 when a promise is broken.
    """
    if all_families == (backbone is not None):
        raise typer.BadParameter("give a backbone or --all-families, one of the two.")

    import torch

    from vit_memory.backbone import load_backbone
    from vit_memory.errors import VitMemoryError
    from vit_memory.evaluation.verification import Verdict, tiny_models
    from vit_memory.evaluation.verification import verify as run

    precision: torch.dtype = getattr(torch, dtype.value)
    verdicts: list[Verdict] = []

    def report(verdict: Verdict) -> None:
        verdicts.append(verdict)
        if not as_json:
            typer.echo(
                f"{verdict.family:28} {'yes' if verdict.base_identical else 'NO':>13} "
                f"{verdict.worst_interference:14.1e} {verdict.worst_reference_difference:21.1e}"
                f"{'' if verdict.kept else '   BROKEN'}"
            )

    if not as_json:
        typer.echo(f"{'family':28} {'bit-identical':>13} {'interference':>14} {'reference difference':>21}")
    if backbone is not None:
        loaded = load_backbone(backbone)
        report(run(loaded.model, name=loaded.name, dtype=precision, tasks=tasks, graphs=graphs, seed=seed))
    else:
        for name, _, make in tiny_models():
            if isinstance(make, VitMemoryError):
                typer.echo(f"{name}: left out, {make}", err=True)
                continue
            model = make()
            sizes = ((32, 32), (48, 40))
            report(run(model, name=name, dtype=precision, tasks=tasks, graphs=graphs, seed=seed, sizes=sizes))
    if as_json:
        fields = ("family", "base_identical", "worst_interference", "worst_reference_difference")
        typer.echo(json.dumps([{field: getattr(v, field) for field in fields} for v in verdicts], indent=2))
    broken = [verdict.family for verdict in verdicts if not verdict.kept]
    if broken or not verdicts:
        typer.echo(
            f"broken on: {', '.join(broken)}" if broken else "no family is installed: nothing verified", err=True
        )
        raise typer.Exit(1)
    if not as_json:
        typer.echo(
            f"\n{len(verdicts)} backbones: the original output is the library's own, bit for bit; every task answers "
            f"as if it were alone (within {verdicts[0].tolerance:g})."
        )
