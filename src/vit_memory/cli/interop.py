"""vit-memory import, export: models of the 2023 reproduction, and LoRA adapters of peft."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ExportFormat = Literal["peft"]


def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder with a LoRA adapter of peft, or a models/*.pt of the 2023 reproduction.",
            exists=True,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the task and branch files.")],
    backbone: Annotated[
        str | None,
        typer.Option(
            help="The backbone it was trained on: a Hugging Face id or folder.  [default: as an adapter names it]"
        ),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="A text file with one label per line.", exists=True)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the task.  [default: from the name of SOURCE]")] = None,
    branch_only: Annotated[bool, typer.Option("--branch-only", help="Leave the classifier of an adapter out.")] = False,
) -> None:
    """Import a LoRA adapter of peft, or a model of the 2023 reproduction.

    An adapter becomes a branch, which computes what the LoRA model computes, and its classifier a task on it: both can
    be attached beside other tasks, and the original output stays. The reproduction is transformers-learnable-memory.
    """
    label_names = _read_labels(labels) if labels else None
    if source.is_dir():
        _import_adapter(source, out, backbone, label_names, name, branch_only)
    else:
        if branch_only:
            raise typer.BadParameter("--branch-only is for adapters of peft, which are folders.")
        if backbone is None:
            raise typer.BadParameter("give the backbone that the model was trained on: --backbone.")
        _import_reproduction(source, out, backbone, label_names, name)


def _read_labels(path: Path) -> list[str]:
    from vit_memory.errors import FileError

    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read as UTF-8 text: {error}.") from None


def _refuse_existing(*paths: Path) -> None:
    from vit_memory.errors import FileError

    for path in paths:
        if path.exists():
            raise FileError(f"{path}: exists already; nothing was written. Use another --out or --name.")


def _import_adapter(
    folder: Path, out: Path, backbone: str | None, labels: list[str] | None, name: str | None, branch_only: bool
) -> None:
    from vit_memory.backbone import load_backbone
    from vit_memory.files import peft_adapter
    from vit_memory.files.branchfile import branch_file, save_branch
    from vit_memory.files.taskfile import save_task

    base = peft_adapter.base_model_of(folder)
    if backbone is None and base is None:
        raise typer.BadParameter(f"{folder} does not name its base model; give it: --backbone.")
    loaded = load_backbone(backbone or str(base))
    imported = peft_adapter.import_adapter(folder, loaded, name=name, labels=labels, branch_only=branch_only)
    branch, task = imported.branch, imported.task
    path = branch_file(out, branch.name)
    _refuse_existing(path, *([] if task is None else [out / f"{task.name}.safetensors"]))
    save_branch(branch, path)
    typer.echo(f"{path}: {branch.method}, {branch.parameters} parameters")
    if task is not None:
        path = out / f"{task.name}.safetensors"
        save_task(task, path)
        typer.echo(f"{path}: {len(task.labels)} labels, a head on branch {branch.name}")
    if backbone is not None and base is not None and base != backbone:
        typer.echo(f"note: the adapter names {base} as its base model; weights were not compared", err=True)


def _import_reproduction(file: Path, out: Path, backbone: str, labels: list[str] | None, name: str | None) -> None:
    from vit_memory.backbone import load_backbone
    from vit_memory.files import interop
    from vit_memory.files.taskfile import save_task

    tasks = interop.import_reproduction(file, load_backbone(backbone), labels=labels, name=name)
    _refuse_existing(*(out / f"{task.name}.safetensors" for task in tasks))
    for task in tasks:
        path = out / f"{task.name}.safetensors"
        save_task(task, path)
        typer.echo(
            f"{path}: {len(task.labels)} labels, {task.cells} cells, extends {', '.join(task.parents) or 'nothing'}"
        )


def export(
    file: Annotated[Path, typer.Argument(metavar="BRANCH", help="A branch file (.safetensors).", exists=True)],
    to: Annotated[ExportFormat, typer.Option(help="peft: a LoRA adapter.")],
    out: Annotated[Path, typer.Option(help="A new or empty folder.")],
    backbone: Annotated[
        str | None, typer.Option(help="The backbone.  [default: the one that the branch names]")
    ] = None,
    task: Annotated[
        Path | None, typer.Option(help="A head task on the branch, written as the adapter's classifier.", exists=True)
    ] = None,
) -> None:
    """Write a branch as a LoRA adapter that peft loads onto the backbone's own model."""
    from vit_memory.backbone import load_backbone
    from vit_memory.files.branchfile import load_branch
    from vit_memory.files.peft_export import export_adapter
    from vit_memory.files.taskfile import load_task

    branch = load_branch(file)
    loaded = load_backbone(backbone or branch.backbone.name)
    export_adapter(branch, loaded, out, None if task is None else load_task(task))
    model = f"{type(loaded.model).__name__} of {loaded.name}"
    classes = "" if task is None else f", with a classifier of {len(load_task(task).labels)} classes"
    typer.echo(
        f"{out}: LoRA adapter for {model}{classes}. Load it with peft.PeftModel.from_pretrained(model, {str(out)!r})"
    )
