"""vit-memory task: rename the task of a file, or pin it to other parents."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vit_memory.files.edit import Change

task_app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Rename a task, or pin it to parents that were trained again.",
)

Rename = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE=NAME", help="Use NAME for the task of FILE, if two tasks have one name; may be repeated."
    ),
]


def parse_rename(options: list[str] | None) -> dict[Path, str]:
    """New names by file, from the values of --rename."""
    names: dict[Path, str] = {}
    for text in options or ():
        file, _, name = text.rpartition("=")
        if not file or not name:
            raise typer.BadParameter(f"{text!r}: expected FILE=NAME.", param_hint="--rename")
        if Path(file) in names:
            raise typer.BadParameter(f"{file}: given twice.", param_hint="--rename")
        names[Path(file)] = name
    return names


@task_app.command()
def rename(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A task file (.safetensors).", exists=True)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name of the task.")],
    out: Annotated[
        Path | None, typer.Option(help="Write a renamed copy to this file and keep FILE.  [default: NAME beside FILE]")
    ] = None,
    children: Annotated[
        bool, typer.Option("--children", help="Also rewrite the task files beside FILE that extend it.")
    ] = False,
) -> None:
    """Rename the task of a file; NAME.safetensors replaces FILE. For a task of a bundle: vit-memory bundle rename."""
    if out is not None and children:
        raise typer.BadParameter("--children rewrites the files beside FILE, --out leaves them as they are.")
    from vit_memory.files.edit import rename_file

    own, *others = rename_file(file, name, out=out, children=children)
    old_file = f"{file} is kept" if file.exists() else f"{file} is removed"
    typer.echo(
        f"{own.path}: task {own.before.name!r} is now called {name!r}{'' if file == own.path else f'; {old_file}'}"
    )
    for other in others:
        typer.echo(_rewritten_line(other))


def _rewritten_line(change: "Change") -> str:
    line = f"{change.path}: rewritten, extends {', '.join(change.after.parents)}"
    if change.after.digest != change.before.digest:
        line += (
            f"; its digest {change.before.digest[:12]}… is now {change.after.digest[:12]}…, because it, or a task that "
            f"it extends, names its parent without pinning it"
        )
    return line


@task_app.command()
def repin(
    child: Annotated[Path, typer.Argument(metavar="CHILD", help="The task file to change.", exists=True)],
    parents: Annotated[
        list[Path], typer.Argument(metavar="PARENT", help="Task files of the parents that it extends.", exists=True)
    ],
    out: Annotated[Path | None, typer.Option(help="Write to this file and keep CHILD.  [default: CHILD]")] = None,
) -> None:
    """Pin a task to parents that were trained again.

    A task is pinned to the content of its parents, because it was trained to read them. This command accepts other
    parents of the same names: its weights stay, its outputs change. Evaluate the task again afterwards, or better,
    train it again.
    """
    from vit_memory.files.edit import pinned_beside, repin_file

    change, pins = repin_file(child, parents, out=out)
    for pin in pins:
        old, new = "not pinned" if pin.before is None else f"{pin.before[:12]}…", f"{pin.after[:12]}…"
        pinned = f"is {new}, as before" if pin.before == pin.after else f"was {old}, is now {new}"
        typer.echo(f"{change.path}: parent {pin.parent!r} {pinned}")
    for before, after in zip(change.before.parents, change.after.parents, strict=True):
        if before != after:
            typer.echo(f"{change.path}: parent {before!r} is now called {after!r}")
    replaced = [repr(pin.parent) for pin in pins if pin.before is not None and pin.before != pin.after]
    if replaced:
        typer.echo(
            f"warning: {change.after.name!r} was trained with another {', '.join(replaced)}; its outputs change. "
            f"Evaluate it again, or train it again.",
            err=True,
        )
    for file in pinned_beside(change) if out is None else ():
        typer.echo(
            f"warning: {file} is pinned to {change.after.name!r} as it was before. Pin it to this one: "
            f"vit-memory task repin {file} {change.path}",
            err=True,
        )
