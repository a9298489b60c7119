"""vit-memory inspect, bundle, push, pull: task files, branch files and bundles."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.cli.tasks import Rename, parse_rename

if TYPE_CHECKING:
    from vit_memory.files.bundle import Bundle

bundle_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Make and change bundles: folders with the tasks of one backbone."
)

BundleFolder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.")]
TaskFiles = Annotated[
    list[Path], typer.Argument(metavar="FILE", help="Task or branch files (.safetensors).", exists=True)
]
Half = Annotated[bool, typer.Option("--half", help="Write the files as float16.  [default: as they are]")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def inspect(files: TaskFiles, as_json: AsJson = False) -> None:
    """Show labels, backbone, size, parents, metrics of task and branch files."""
    from vit_memory.files.branchfile import is_branch_file, load_branch
    from vit_memory.files.card import branch_card, branch_facts, card, facts
    from vit_memory.files.taskfile import load_task

    shown = [
        (branch_facts if as_json else branch_card)(path, load_branch(path))
        if is_branch_file(path)
        else (facts if as_json else card)(path, load_task(path))
        for path in files
    ]
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False) if as_json else "\n\n".join(map(str, shown)))


@bundle_app.command()
def create(
    folder: BundleFolder,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Task and branch files to add.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="bundled, a Hugging Face id or folder, or timm:<name>.  [default: that of the first task]"),
    ] = None,
    half: Half = False,
    rename: Rename = None,
) -> None:
    """Create a bundle in a new or empty folder."""
    from vit_memory.backbone import load_backbone
    from vit_memory.files.branchfile import is_branch_file, load_branch
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.collect import add_files
    from vit_memory.files.taskfile import load_task

    if not files and backbone is None:
        raise typer.BadParameter("give task files, or --backbone for an empty bundle.")
    if backbone:
        identity = load_backbone(backbone).identity
    else:
        first = (files or [])[0]
        identity = (load_branch(first) if is_branch_file(first) else load_task(first)).backbone
    names = parse_rename(rename)
    bundle = add_files(Bundle.begin(folder, identity), files or [], half=half or None, rename=names)
    typer.echo(f"{folder}: {_contents(bundle)} for {bundle.backbone.name}")


def _contents(bundle: "Bundle") -> str:
    """How many tasks and branches it holds."""
    from vit_memory.files.card import counted

    branches = f", {counted(len(bundle.branch_entries), 'branch')}" if bundle.branch_entries else ""
    return f"{counted(len(bundle.entries), 'task')}{branches}"


@bundle_app.command()
def add(folder: BundleFolder, files: TaskFiles, half: Half = False, rename: Rename = None) -> None:
    """Add task and branch files to a bundle, with the parents that tasks extend and the branches they stand on.

    Parents and branches that are not given are read from the folder of the task file.
    """
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.bundle_lock import changing
    from vit_memory.files.collect import add_files

    with changing(folder):
        before = Bundle.open(folder)
        after = add_files(before, files, half=half or None, rename=parse_rename(rename))
    added = [entry.name for entry in after.entries[len(before.entries) :]]
    added += [f"branch {entry.name}" for entry in after.branch_entries[len(before.branch_entries) :]]
    typer.echo(f"{folder}: added {', '.join(added) or 'nothing; it holds these files already'}")


@bundle_app.command()
def remove(
    folder: BundleFolder,
    names: Annotated[list[str] | None, typer.Argument(metavar="TASK", help="Names of the tasks to remove.")] = None,
    branch: Annotated[list[str] | None, typer.Option(help="A branch to remove; may be repeated.")] = None,
) -> None:
    """Remove tasks and branches from a bundle; refused while other tasks extend them or stand on them."""
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.bundle_lock import changing

    if not names and not branch:
        raise typer.BadParameter("give names of tasks, or --branch NAME.")
    with changing(folder):
        Bundle.open(folder).remove(names or [], branch or [])
    removed = [*(names or []), *(f"branch {name}" for name in branch or [])]
    typer.echo(f"{folder}: removed {', '.join(removed)}")


@bundle_app.command("rename")
def rename_task(
    folder: BundleFolder,
    old: Annotated[str, typer.Argument(metavar="OLD", help="The task to rename.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    branch: Annotated[bool, typer.Option("--branch", help="OLD and NEW are names of a branch.")] = False,
) -> None:
    """Rename a task of a bundle, also in the tasks that extend it; or, with --branch, a branch."""
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.bundle_lock import changing

    with changing(folder):
        before = Bundle.open(folder)
        after = before.rename_branch(old, new) if branch else before.rename(old, new)
    typer.echo(f"{folder}: {'branch' if branch else 'task'} {old!r} is now called {new!r}")
    if branch:
        return
    known = {entry.sha256 for entry in before.entries}
    rewritten = [entry.name for entry in after.entries if entry.sha256 not in known and entry.name != new]
    if rewritten:
        typer.echo(f"rewritten, because they extend it: {', '.join(rewritten)}")


@bundle_app.command("list")
def list_tasks(folder: BundleFolder, as_json: AsJson = False) -> None:
    """List the tasks and branches of a bundle; --json lists tasks, then branches."""
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.card import branch_facts, facts

    bundle = Bundle.open(folder)
    tasks = [(entry, bundle.task(entry.name)) for entry in bundle.entries]
    branches = [(entry, bundle.branch(entry.name)) for entry in bundle.branch_entries]
    if as_json:
        shown = [facts(bundle.path(entry), task) for entry, task in tasks]
        shown += [branch_facts(bundle.path(entry), branch) for entry, branch in branches]
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    typer.echo(f"{folder}: {_contents(bundle)} for {bundle.backbone.name} ({bundle.backbone.fingerprint[:12]}…)")
    for branch_entry, branch in branches:
        kilobytes = bundle.path(branch_entry).stat().st_size / 1000
        typer.echo(f"  branch {branch.name:17} {branch.method:32}  {kilobytes:8.1f} kB")
    for entry, task in tasks:
        on = f"  on branch {entry.branch}" if entry.branch is not None else ""
        typer.echo(
            f"  {task.name:24} {task.method:18}  {len(task.labels):5} labels  "
            f"{bundle.path(entry).stat().st_size / 1000:8.1f} kB  extends {', '.join(task.parents) or '-'}{on}"
        )


@bundle_app.command()
def check(
    folder: BundleFolder,
    backbone: Annotated[str | None, typer.Option(help="Also load this backbone and attach every task.")] = None,
) -> None:
    """Check that the files of a bundle are intact and fit together."""
    from vit_memory.backbone import load_backbone
    from vit_memory.files.bundle import Bundle

    bundle = Bundle.open(folder)
    bundle.check()
    if backbone is not None:
        bundle.model(load_backbone(backbone))
    typer.echo(f"{folder}: {_contents(bundle)}, all files intact, all parents present, one backbone")


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

    bundle = sharing.pull(repo, out=out or Path(repo.split("/")[-1]), revision=revision)
    typer.echo(f"{bundle.folder}: {_contents(bundle)} for {bundle.backbone.name}")
