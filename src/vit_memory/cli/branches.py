"""vit-memory branch: rename the branch of a file."""

from pathlib import Path
from typing import Annotated

import typer

branch_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Rename a branch.")


@branch_app.callback()
def about() -> None:
    """Rename a branch. Train one with vit-memory train --branch-blocks, use it with vit-memory train --branch FILE."""


@branch_app.command()
def rename(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A branch file (.safetensors).", exists=True)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name of the branch.")],
) -> None:
    """Rename the branch of a file; NAME.branch.safetensors replaces FILE. Tasks on it find it by its content."""
    from vit_memory.files.edit import rename_branch_file

    path = rename_branch_file(file, name)
    typer.echo(f"{path}: the branch is now called {name!r}; {file} is removed")
