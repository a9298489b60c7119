"""vit-memory inspect, bundle, import, push, pull: tasks and bundles on disk."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vit_memory.cli.tasks import Rename, parse_rename

bundle_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Put tasks side by side in a folder with one backbone."
)

BundleFolder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.")]
TaskFiles = Annotated[list[Path], typer.Argument(metavar="FILE…", help="Task files (.safetensors).", exists=True)]
Half = Annotated[bool, typer.Option("--half", help="Write the tasks as float16.  [default: as their files are]")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def inspect(files: TaskFiles, as_json: AsJson = False) -> None:
    """Show what task files hold: labels, backbone, size, parents, metrics."""
    from vit_memory.files.card import card, facts
    from vit_memory.files.taskfile import load_task

    tasks = [(path, load_task(path)) for path in files]
    if as_json:
        typer.echo(json.dumps([facts(path, task) for path, task in tasks], indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join(card(path, task) for path, task in tasks))


@bundle_app.command()
def create(
    folder: BundleFolder,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE…", help="Task files to begin with.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Backbone id, folder or timm:<name>; by default that of the first task.")
    ] = None,
    half: Half = False,
    rename: Rename = None,
) -> None:
    """Begin a bundle in a new folder."""
    from vit_memory.backbone import load_backbone
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.card import counted
    from vit_memory.files.collect import add_files
    from vit_memory.files.taskfile import load_task

    if not files and backbone is None:
        raise typer.BadParameter("give task files, or --backbone for an empty bundle.")
    identity = load_backbone(backbone).identity if backbone else load_task((files or [])[0]).backbone
    names = parse_rename(rename)
    bundle = add_files(Bundle.begin(folder, identity), files or [], half=half or None, rename=names)
    typer.echo(f"{folder}: {counted(len(bundle.entries), 'task')} for {bundle.backbone.name}")


@bundle_app.command()
def add(folder: BundleFolder, files: TaskFiles, half: Half = False, rename: Rename = None) -> None:
    """Add task files, with the parents they extend if those are beside them."""
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.collect import add_files

    before = Bundle.open(folder)
    after = add_files(before, files, half=half or None, rename=parse_rename(rename))
    added = [entry.name for entry in after.entries[len(before.entries) :]]
    typer.echo(f"{folder}: added {', '.join(added) or 'nothing; it holds these tasks already'}")


@bundle_app.command()
def remove(folder: BundleFolder, names: Annotated[list[str], typer.Argument(help="Tasks to take out.")]) -> None:
    """Take tasks out; refused while others extend them."""
    from vit_memory.files.bundle import Bundle

    Bundle.open(folder).remove(names)
    typer.echo(f"{folder}: removed {', '.join(names)}")


@bundle_app.command("rename")
def rename_task(
    folder: BundleFolder,
    old: Annotated[str, typer.Argument(help="The task to rename.")],
    new: Annotated[str, typer.Argument(help="Its new name.")],
) -> None:
    """Rename a task, in the tasks that extend it too."""
    from vit_memory.files.bundle import Bundle

    before = Bundle.open(folder)
    after = before.rename(old, new)
    typer.echo(f"{folder}: task {old!r} is now called {new!r}")
    known = {entry.sha256 for entry in before.entries}
    rewritten = [entry.name for entry in after.entries if entry.sha256 not in known and entry.name != new]
    if rewritten:
        typer.echo(f"rewritten, since they extend it: {', '.join(rewritten)}")


@bundle_app.command("list")
def list_tasks(folder: BundleFolder, as_json: AsJson = False) -> None:
    """List a bundle's tasks."""
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.card import counted, facts
    from vit_memory.files.manifest import TASKS

    bundle = Bundle.open(folder)
    told = [facts(folder / TASKS / entry.file, bundle.task(entry.name)) for entry in bundle.entries]
    if as_json:
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    typer.echo(
        f"{folder}: {counted(len(told), 'task')} for {bundle.backbone.name} ({bundle.backbone.fingerprint[:12]}…)"
    )
    for task in told:
        parents = ", ".join(parent["name"] for parent in task["parents"]) or "-"
        typer.echo(
            f"  {task['name']:24} {task['regime']:7} {task['memory_size']:3} cells  {len(task['labels']):5} labels  "
            f"{task['bytes'] / 1000:8.1f} kB  extends {parents}"
        )


@bundle_app.command()
def check(
    folder: BundleFolder,
    backbone: Annotated[str | None, typer.Option(help="Also load this backbone and attach every task.")] = None,
) -> None:
    """Read every file of a bundle and make sure that all of it goes together."""
    from vit_memory.backbone import load_backbone
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.card import counted

    bundle = Bundle.open(folder)
    graph = bundle.check()
    if backbone is not None:
        bundle.model(load_backbone(backbone))
    typer.echo(f"{folder}: {counted(len(graph), 'task')}, all files whole, all parents present, one backbone")


def import_reproduction(
    file: Annotated[Path, typer.Argument(help="A models/*.pt of the 2023 reproduction.", exists=True)],
    backbone: Annotated[str, typer.Option(help="The backbone it was trained on: an id or folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the task files.")],
    labels: Annotated[Path | None, typer.Option(help="A text file with one label a line.", exists=True)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the task; by default from the file's.")] = None,
) -> None:
    """Turn a model file of the 2023 reproduction (transformers-learnable-memory) into task files."""
    from vit_memory.backbone import load_backbone
    from vit_memory.files import interop
    from vit_memory.files.taskfile import save_task

    known = labels.read_text(encoding="utf-8").splitlines() if labels else None
    tasks = interop.import_reproduction(file, load_backbone(backbone), labels=known, name=name)
    for task in tasks:
        path = out / f"{task.name}.safetensors"
        save_task(task, path)
        typer.echo(
            f"{path}: {len(task.labels)} labels, {task.cells} cells, extends {', '.join(task.parents) or 'nothing'}"
        )


def push(
    folder: BundleFolder,
    repo: Annotated[str, typer.Argument(help="user/name on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Put a bundle on the Hugging Face hub, with a model card written from it."""
    from vit_memory.files import sharing
    from vit_memory.files.bundle import Bundle

    typer.echo(sharing.push(Bundle.open(folder), repo, private=private))


def pull(
    repo: Annotated[str, typer.Argument(help="user/name on the hub.")],
    out: Annotated[Path | None, typer.Option(help="Folder to copy it to; by default the repository's name.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
) -> None:
    """Fetch a bundle from the Hugging Face hub and check it."""
    from vit_memory.files import sharing
    from vit_memory.files.card import counted

    bundle = sharing.pull(repo, out=out or Path(repo.split("/")[-1]), revision=revision)
    typer.echo(f"{bundle.folder}: {counted(len(bundle.entries), 'task')} for {bundle.backbone.name}")
