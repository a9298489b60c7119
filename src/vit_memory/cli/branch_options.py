"""Options about branches, of vit-memory train and of vit-memory branch train."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit_memory.cli.train_options import list_of, read_rank

if TYPE_CHECKING:
    from vit_memory.training.grid import BranchGrid


def _branch_grid(blocks: str, rank: str | None, gains: bool | None, projections: str | None) -> "BranchGrid":
    """Every combination of comma-separated options; what is not given has its default."""
    from vit_memory.training.grid import BranchGrid

    values: dict[str, Any] = {"blocks": tuple(map(int, blocks.split(",")))}
    if rank is not None:
        values["ranks"] = tuple(map(read_rank, rank.split(",")))
    if gains is not None:
        values["gains"] = gains
    if projections is not None:
        values["projections"] = tuple(tuple(choice.split("+")) for choice in projections.split(","))
    return BranchGrid(**values)


_BLOCKS_HELP = "of the last N blocks, or several: 2,4,6."
_RANK_HELP = "Rank of the branch's low-rank updates, or several: 4,8; none: no updates, gains alone.  [default: 8]"
_GAINS_HELP = (
    "Let the branch also learn a scale and shift after both norms and a scale of each residual.  [default: no]"
)
_PROJECTIONS_HELP = (
    "Projections that the branch updates, joined by +, of q, k, v, o, fc1 and fc2; several choices are separated by "
    "commas.  [default: q+v]"
)


@dataclass(frozen=True)
class BranchOptions:
    """The branch that the task stands on: a frozen one, or one that is trained with it."""

    branch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Branch that the task reads; it does not change.", exists=True),
    ] = None
    branch_blocks: Annotated[
        str | None,
        typer.Option(
            help=f"Train a branch {_BLOCKS_HELP}  [default: no branch]", callback=list_of(int, "whole numbers")
        ),
    ] = None
    branch_rank: Annotated[
        str | None, typer.Option(help=_RANK_HELP, callback=list_of(read_rank, "whole numbers above 0, or none"))
    ] = None
    branch_gains: Annotated[
        bool | None, typer.Option("--branch-gains/--no-branch-gains", help=_GAINS_HELP, show_default=False)
    ] = None
    branch_projections: Annotated[str | None, typer.Option(help=_PROJECTIONS_HELP)] = None

    def build(self) -> "BranchGrid | None":
        """The branches to train; None if none is."""
        sizes = {
            "--branch-rank": self.branch_rank,
            "--branch-gains": self.branch_gains,
            "--branch-projections": self.branch_projections,
        }
        given = [option for option, value in sizes.items() if value is not None]
        if self.branch_blocks is None:
            if given:
                raise typer.BadParameter(f"{', '.join(given)}: for a branch that is trained; give --branch-blocks too.")
            return None
        if self.branch is not None:
            raise typer.BadParameter(
                "--branch FILE uses a trained branch, --branch-blocks trains a new one: give one of them."
            )
        return _branch_grid(self.branch_blocks, self.branch_rank, self.branch_gains, self.branch_projections)


@dataclass(frozen=True)
class BranchSizes:
    """The branches that `vit-memory branch train` tries."""

    blocks: Annotated[str, typer.Option(help=f"A branch {_BLOCKS_HELP}", callback=list_of(int, "whole numbers"))] = "4"
    rank: Annotated[
        str | None, typer.Option(help=_RANK_HELP, callback=list_of(read_rank, "whole numbers above 0, or none"))
    ] = None
    gains: Annotated[bool | None, typer.Option("--gains/--no-gains", help=_GAINS_HELP, show_default=False)] = None
    projections: Annotated[str | None, typer.Option(help=_PROJECTIONS_HELP)] = None

    def build(self) -> "BranchGrid":
        """Every combination."""
        return _branch_grid(self.blocks, self.rank, self.gains, self.projections)
