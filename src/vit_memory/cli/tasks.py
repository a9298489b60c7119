"""Options of commands that take several task files."""

from pathlib import Path
from typing import Annotated

import typer

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
