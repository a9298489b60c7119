"""vit-memory task: change what a task file is called, or which parents it is pinned to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vit_memory.files.edit import Change

task_app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Rename a task file, or pin a task to parents that were trained again.",
)

Rename = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE=NAME", help="Call the task of this file NAME here, where two have one name; may be given again."
    ),
]


def parse_rename(given: list[str] | None) -> dict[Path, str]:
    """Names by file, from what was given to --rename."""
    names: dict[Path, str] = {}
    for text in given or ():
        file, _, name = text.rpartition("=")
        if not file or not name:
            raise typer.BadParameter(f"{text!r}: expected FILE=NAME.", param_hint="--rename")
        if Path(file) in names:
            raise typer.BadParameter(f"{file}: given twice.", param_hint="--rename")
        names[Path(file)] = name
    return names


@task_app.command()
def rename(
    file: Annotated[Path, typer.Argument(help="A task file (.safetensors).", exists=True)],
    name: Annotated[str, typer.Argument(help="The new name of the task.")],
    out: Annotated[
        Path | None, typer.Option(help="Write a renamed copy to this file and keep FILE.  [default: NAME beside FILE]")
    ] = None,
    children: Annotated[
        bool, typer.Option("--children", help="Also rewrite the task files beside FILE that extend it.")
    ] = False,
) -> None:
    """Rename a task: NAME.safetensors takes the place of FILE. For tasks of a bundle: vit-memory bundle rename."""
    if out is not None and children:
        raise typer.BadParameter("--children rewrites the files beside FILE, --out leaves them as they are.")
    from vit_memory.files.edit import rename_file

    own, *others = rename_file(file, name, out=out, children=children)
    old_file = f"{file} is kept" if file.exists() else f"{file} is gone"
    typer.echo(
        f"{own.path}: task {own.before.name!r} is now called {name!r}{'' if file == own.path else f'; {old_file}'}"
    )
    for other in others:
        typer.echo(_rewritten(other))


def _rewritten(change: "Change") -> str:
    line = f"{change.path}: rewritten, extends {', '.join(change.after.parents)}"
    if change.after.digest != change.before.digest:
        line += (
            f"; its digest {change.before.digest[:12]}… is now {change.after.digest[:12]}…, because it, or a task that "
            f"it extends, names its parent without pinning it"
        )
    return line


@task_app.command()
def repin(
    child: Annotated[Path, typer.Argument(help="The task file to change.", exists=True)],
    parents: Annotated[
        list[Path], typer.Argument(metavar="PARENT…", help="Task files of parents that it extends.", exists=True)
    ],
    out: Annotated[Path | None, typer.Option(help="Write to this file and keep CHILD.  [default: CHILD]")] = None,
) -> None:
    """Pin a task to parents as they are now, after they were trained again. Its weights stay, its answers change.

    A task is pinned to the content of its parents, because it was trained to read them. This command says that other
    parents of the same names will do. Evaluate the task again afterwards, or better, train it again.
    """
    from vit_memory.files.edit import pinned_beside, repin_file

    change, pins = repin_file(child, parents, out=out)
    for pin in pins:
        old, new = "not pinned" if pin.before is None else f"{pin.before[:12]}…", f"{pin.after[:12]}…"
        said = f"is {new}, as before" if pin.before == pin.after else f"was {old}, is now {new}"
        typer.echo(f"{change.path}: parent {pin.parent!r} {said}")
    for before, after in zip(change.before.parents, change.after.parents, strict=True):
        if before != after:
            typer.echo(f"{change.path}: parent {before!r} is now called {after!r}")
    moved = [repr(pin.parent) for pin in pins if pin.before is not None and pin.before != pin.after]
    if moved:
        typer.echo(
            f"warning: {change.after.name!r} was trained with another {', '.join(moved)}; its answers change. "
            f"Evaluate it again, or train it again.",
            err=True,
        )
    for file in pinned_beside(change) if out is None else ():
        typer.echo(
            f"warning: {file} is pinned to {change.after.name!r} as it was before. Pin it to this one: "
            f"vit-memory task repin {file} {change.path}",
            err=True,
        )
