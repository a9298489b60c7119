"""Options of a command as frozen values: typer sees every field as an option, the command receives the whole value.

    @dataclass(frozen=True)
    class Sizes:
        batch: Annotated[int, typer.Option(help="Images per pass.")] = 64

    @app.command()
    @spread_options
    def predict(path: Path, sizes: Sizes) -> None: ...  # vit-memory predict PATH --batch 64

So an option is written once, where its value is defined, however many commands take it. `GroupedHelp` prints options
with a `rich_help_panel` in a section of their own.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from typer.core import TyperCommand


class GroupedHelp(TyperCommand):
    """A command whose help has a section for every `rich_help_panel`, below the other options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections; typer itself writes them only with rich."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its dataclass parameters replaced by their fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _options_of(groups[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def run(**options: Any) -> None:
        values = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **options)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
