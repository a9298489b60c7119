"""vit-memory cache: list and delete the stores that trainings keep on disk."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit_memory.cli.files import AsJson

if TYPE_CHECKING:
    from vit_memory.training.stores import StoreInfo

cache_app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List or delete the stored keys and values that train keeps on disk.",
)

CacheDir = Annotated[Path | None, typer.Option(help="Folder of the stores.  [default: user cache]", file_okay=False)]


def read_size(text: str) -> int:
    """Bytes from an option such as 20GB; a usage error if it is not a size."""
    from vit_memory.training.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@cache_app.command("list")
def list_cache(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the stores with size, last use, content and state."""
    from vit_memory.training.sizes import size
    from vit_memory.training.stores import default_folder, list_stores

    folder = cache_dir or default_folder()
    stores = list_stores(folder)
    total = sum(store.bytes for store in stores)
    if as_json:
        record = {"folder": str(folder), "bytes": total, "stores": [_record(store) for store in stores]}
        typer.echo(json.dumps(record, indent=2, ensure_ascii=False))
        return
    width = max([8, *(len(store.backbone) for store in stores)])
    if stores:
        typer.echo(
            f"{'store':8} {'size':>8}  {'last used':16}  {'images':>6} {'views':>5}  {'precision':9}  "
            f"{'backbone':{width}}  state"
        )
    for store in stores:
        typer.echo(
            f"{store.name:8} {size(store.bytes):>8}  {_time(store):16}  {store.images:6} {store.views:5}  "
            f"{store.precision:9}  {store.backbone:{width}}  {_state(store)}"
        )
    typer.echo(f"{folder}: {_counted(stores)}, {size(total)}")


@cache_app.command()
def clear(
    older_than: Annotated[
        float | None,
        typer.Option(min=0, metavar="DAYS", help="Only stores last used more than DAYS days ago."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Delete the stores that no running training uses. A training that needs one computes it again."""
    from vit_memory.training.sizes import size
    from vit_memory.training.stores import clear_stores, default_folder, describe

    folder = cache_dir or default_folder()
    cleared = clear_stores(folder, older_than_days=older_than, dry_run=dry_run)
    for store in cleared.removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {describe(store)}: {size(store.bytes)}")
    for store, reason in cleared.kept:
        typer.echo(f"kept {describe(store)}: {reason}")
    typer.echo(
        f"{folder}: {'would free' if dry_run else 'freed'} {size(cleared.bytes)} "
        f"from {_counted(cleared.removed)}; {_counted(cleared.kept)} kept"
    )


def _counted(stores: Sequence[object]) -> str:
    return f"{len(stores)} store{'' if len(stores) == 1 else 's'}"


def _time(store: "StoreInfo") -> str:
    return datetime.fromtimestamp(store.last_used).strftime("%Y-%m-%d %H:%M")


def _state(store: "StoreInfo") -> str:
    state = "complete" if store.complete else f"incomplete ({store.rows_stored} of {store.rows} views)"
    return f"{state}, in use by process {', '.join(map(str, store.users))}" if store.users else state


def _record(store: "StoreInfo") -> dict[str, Any]:
    return {
        "store": store.folder.name,
        "bytes": store.bytes,
        "bytes_when_complete": store.full_bytes,
        "last_used": datetime.fromtimestamp(store.last_used).astimezone().isoformat(timespec="seconds"),
        "backbone": store.backbone,
        "images": store.images,
        "views": store.views,
        "precision": store.precision,
        "complete": store.complete,
        "views_to_store": store.rows,
        "views_stored": store.rows_stored,
        "views_left_out": store.rows_left_out,
        "in_use_by": list(store.users),
    }
