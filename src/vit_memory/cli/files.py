"""vit-memory inspect, bundle, import, push, pull: task files and bundles."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vit_memory.cli.tasks import Rename, parse_rename

bundle_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Make and change bundles: folders with the tasks of one backbone."
)

BundleFolder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.")]
TaskFiles = Annotated[list[Path], typer.Argument(metavar="FILE", help="Task files (.safetensors).", exists=True)]
Half = Annotated[bool, typer.Option("--half", help="Write the tasks as float16.  [default: as in their files]")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def inspect(files: TaskFiles, as_json: AsJson = False) -> None:
    """Show labels, backbone, size, parents, metrics of task files."""
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
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Task files to add.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="bundled, a Hugging Face id or folder, or timm:<name>.  [default: that of the first task]"),
    ] = None,
    half: Half = False,
    rename: Rename = None,
) -> None:
    """Create a bundle in a new or empty folder."""
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
    """Add task files to a bundle, and the parents that they extend.

    Parents that are not given are read from the folder of the task file.
    """
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.collect import add_files

    before = Bundle.open(folder)
    after = add_files(before, files, half=half or None, rename=parse_rename(rename))
    added = [entry.name for entry in after.entries[len(before.entries) :]]
    typer.echo(f"{folder}: added {', '.join(added) or 'nothing; it holds these tasks already'}")


@bundle_app.command()
def remove(
    folder: BundleFolder,
    names: Annotated[list[str], typer.Argument(metavar="TASK", help="Names of the tasks to remove.")],
) -> None:
    """Remove tasks from a bundle; refused while others extend them."""
    from vit_memory.files.bundle import Bundle

    Bundle.open(folder).remove(names)
    typer.echo(f"{folder}: removed {', '.join(names)}")


@bundle_app.command("rename")
def rename_task(
    folder: BundleFolder,
    old: Annotated[str, typer.Argument(metavar="OLD", help="The task to rename.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
) -> None:
    """Rename a task of a bundle, also in the tasks that extend it."""
    from vit_memory.files.bundle import Bundle

    before = Bundle.open(folder)
    after = before.rename(old, new)
    typer.echo(f"{folder}: task {old!r} is now called {new!r}")
    known = {entry.sha256 for entry in before.entries}
    rewritten = [entry.name for entry in after.entries if entry.sha256 not in known and entry.name != new]
    if rewritten:
        typer.echo(f"rewritten, because they extend it: {', '.join(rewritten)}")


@bundle_app.command("list")
def list_tasks(folder: BundleFolder, as_json: AsJson = False) -> None:
    """List the tasks of a bundle."""
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.card import counted, facts

    bundle = Bundle.open(folder)
    methods = {entry.name: bundle.task(entry.name).method for entry in bundle.entries}
    tasks = [facts(bundle.path(entry), bundle.task(entry.name)) for entry in bundle.entries]
    if as_json:
        typer.echo(json.dumps(tasks, indent=2, ensure_ascii=False))
        return
    typer.echo(
        f"{folder}: {counted(len(tasks), 'task')} for {bundle.backbone.name} ({bundle.backbone.fingerprint[:12]}…)"
    )
    for task in tasks:
        parents = ", ".join(parent["name"] for parent in task["parents"]) or "-"
        typer.echo(
            f"  {task['name']:24} {methods[task['name']]:18}  {len(task['labels']):5} labels  "
            f"{task['bytes'] / 1000:8.1f} kB  extends {parents}"
        )


@bundle_app.command()
def check(
    folder: BundleFolder,
    backbone: Annotated[str | None, typer.Option(help="Also load this backbone and attach every task.")] = None,
) -> None:
    """Check that the files of a bundle are intact and fit together."""
    from vit_memory.backbone import load_backbone
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.card import counted

    bundle = Bundle.open(folder)
    graph = bundle.check()
    if backbone is not None:
        bundle.model(load_backbone(backbone))
    typer.echo(f"{folder}: {counted(len(graph), 'task')}, all files intact, all parents present, one backbone")


def import_reproduction(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A models/*.pt of the 2023 reproduction.", exists=True)],
    backbone: Annotated[str, typer.Option(help="The backbone it was trained on: a Hugging Face id or folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the task files.")],
    labels: Annotated[Path | None, typer.Option(help="A text file with one label per line.", exists=True)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the task.  [default: from the name of FILE]")] = None,
) -> None:
    """Import a model of the 2023 reproduction as task files.

    The reproduction is transformers-learnable-memory; its files are models/*.pt.
    """
    from vit_memory.backbone import load_backbone
    from vit_memory.files import interop
    from vit_memory.files.taskfile import save_task

    label_names = labels.read_text(encoding="utf-8").splitlines() if labels else None
    tasks = interop.import_reproduction(file, load_backbone(backbone), labels=label_names, name=name)
    for task in tasks:
        path = out / f"{task.name}.safetensors"
        save_task(task, path)
        typer.echo(
            f"{path}: {len(task.labels)} labels, {task.cells} cells, extends {', '.join(task.parents) or 'nothing'}"
        )


def push(
    folder: BundleFolder,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="user/name on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload a bundle to the Hugging Face hub, with a model card."""
    from vit_memory.files import sharing
    from vit_memory.files.bundle import Bundle

    typer.echo(sharing.push(Bundle.open(folder), repo, private=private))


def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="user/name on the hub.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write it to.  [default: the name in REPO]")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
) -> None:
    """Download a bundle from the Hugging Face hub and check it."""
    from vit_memory.files import sharing
    from vit_memory.files.card import counted

    bundle = sharing.pull(repo, out=out or Path(repo.split("/")[-1]), revision=revision)
    typer.echo(f"{bundle.folder}: {counted(len(bundle.entries), 'task')} for {bundle.backbone.name}")
