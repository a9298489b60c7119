"""The `vit-memory` command: one file per group, thin functions over the library."""

import sys

import typer

from vit_memory.cli import (
    branches,
    cache,
    certify,
    data,
    demo,
    evaluate,
    files,
    interop,
    predict,
    reproduce,
    serve,
    tasks,
    train,
    verify,
)
from vit_memory.cli.options import GroupedHelp

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


@app.callback()
def about() -> None:
    """Teach a frozen vision transformer any number of image tasks without changing its own output."""


app.command("demo")(demo.demo)
app.command("data")(data.data)
app.command("train", cls=GroupedHelp)(train.train)
app.command("evaluate", cls=GroupedHelp)(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("serve", cls=GroupedHelp)(serve.serve)
app.command("verify")(verify.verify)
app.command("certify")(certify.certify)
app.command("reproduce")(reproduce.reproduce)
app.command("inspect")(files.inspect)
app.add_typer(files.bundle_app, name="bundle")
app.add_typer(tasks.task_app, name="task")
app.add_typer(branches.branch_app, name="branch")
app.add_typer(cache.cache_app, name="cache")
app.command("import")(interop.import_model)
app.command("export")(interop.export)
app.command("push")(files.push)
app.command("pull")(files.pull)


def main() -> None:
    """Run the command. A VitMemoryError prints its message and exits 1; a traceback means a bug."""
    from vit_memory.errors import VitMemoryError

    try:
        app()
    except VitMemoryError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
