"""Descriptions of tasks for people: a card for the terminal, and the model card of a bundle on the hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_memory.backbone import BackboneIdentity
from vit_memory.branch import Branch
from vit_memory.files.branchfile import describe_branch
from vit_memory.files.taskfile import describe
from vit_memory.read_out import FINAL
from vit_memory.task import Task

SHOWN_LABELS = 8
_PYTHON = """
```python
from vit_memory import Bundle

bundle = Bundle.from_pretrained({repo})
model = bundle.model()  # the backbone, with every task attached
outputs = model(images)  # (B, 3, height, width), preprocessed as in model.backbone.preprocessing
outputs[{task}]  # (B, C): logits, or the values of a regression task
```
"""


def facts(path: Path, task: Task) -> dict[str, Any]:
    """What a task file holds, as JSON values."""
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        **describe(task),
        "parameters": task.parameters,
        "digest": task.digest,
    }


def card(path: Path, task: Task) -> str:
    """What a task file holds, as lines for the terminal."""
    memory = f"{task.cells} cells in each of {task.backbone.depth} blocks{' (raw)' if task.raw_memory else ''}"
    lines = {
        "kind": task.kind,
        "labels": _label_list(task.labels),
        **_kind_facts(task),
        "regime": ", ".join([task.regime, *([memory] if task.cells else []), *_reader_facts(task)]),
        "size": _size(task.parameters, path),
        "extends": ", ".join(task.parents) or "nothing",
        **({} if task.branch is None else {"branch": f"{task.branch.name} ({task.branch.digest[:12]}…)"}),
        **_common_facts(task),
    }
    return _lines(f"{task.name}  ({path})", lines)


def branch_facts(path: Path, branch: Branch) -> dict[str, Any]:
    """What a branch file holds, as JSON values."""
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        **describe_branch(branch),
        "blocks": branch.blocks,
        "parameters": branch.parameters,
        "digest": branch.digest,
    }


def branch_card(path: Path, branch: Branch) -> str:
    """What a branch file holds, as lines for the terminal."""
    share = branch.blocks / branch.backbone.depth
    lines = {
        "branch": f"{branch.method}, from block {branch.start} on; costs {share:.2f} of a plain pass, once for all its "
        f"tasks",
        "size": _size(branch.parameters, path),
        **_common_facts(branch),
    }
    return _lines(f"{branch.name}  ({path})", lines)


def _common_facts(item: Task | Branch) -> dict[str, str]:
    record, backbone, half_of = item.record, item.backbone, item.record.half_of
    return {
        "backbone": f"{backbone.name} ({backbone.family}, width {backbone.width}, {backbone.depth} blocks, "
        f"fingerprint {backbone.fingerprint[:12]}…)",
        "metrics": _pairs(record.metrics),
        "recipe": _pairs(record.recipe),
        "created": f"{record.created or 'unknown'}, vit-memory {record.library_version or 'unknown'}",
        "digest": f"{item.digest[:12]}…" + (f", float16 of {half_of[:12]}…" if half_of else ""),
    }


def _size(parameters: int, path: Path) -> str:
    return f"{parameters:_} parameters, {path.stat().st_size / 1000:_.1f} kB on disk".replace("_", " ")


def _lines(title: str, lines: Mapping[str, str]) -> str:
    return "\n".join([title, *(f"  {key:12}{value}" for key, value in lines.items())])


def model_card(repo: str, backbone: BackboneIdentity, tasks: Sequence[Task], branches: Sequence[Branch] = ()) -> str:
    """README.md of a bundle on the hub."""
    front = ["---", "library_name: vit-memory", "tags: [vit-memory, image-classification]"]
    if backbone.name.count("/") == 1 and not backbone.name.startswith((".", "/")):
        front.append(f"base_model: {json.dumps(backbone.name)}")
    summary = (
        f"{counted(len(tasks), 'task')} for one frozen {_cell(backbone.name)} (fingerprint "
        f"`{backbone.fingerprint[:12]}…`). The output of the backbone stays identical to the bit, and one pass answers "
        f"all tasks."
    )
    table = ["| task | kind | labels | regime | extends | metrics |", "|---|---|---|---|---|---|", *map(_row, tasks)]
    if branches:
        table += ["", "| branch | consists of | costs, of a plain pass |", "|---|---|---|"]
        table += [f"| {b.name} | {b.method} | {b.blocks / b.backbone.depth:.2f} |" for b in branches]
    python = _PYTHON.format(repo=json.dumps(repo), task=json.dumps(tasks[0].name if tasks else "task"))
    return "\n".join([*front, "---", "", f"# {repo.rsplit('/', maxsplit=1)[-1]}", "", summary, "", *table, python])


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 task`, `2 tasks`, `2 branches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _label_list(labels: Sequence[str]) -> str:
    more = [f"… {len(labels)} in all"] if len(labels) > SHOWN_LABELS else []
    return ", ".join([*labels[:SHOWN_LABELS], *more])


def _reader_facts(task: Task) -> list[str]:
    """What a learned reader consists of, in words."""
    if task.reader is None:
        return []
    gains = ["gains in every block"] if task.reader.gains is not None else []
    low_rank = [f"rank {update.rank} on {projection}" for projection, update in task.reader.low_rank.items()]
    return [*gains, *low_rank, *([f"read-out {task.read_out}"] if task.read_out != FINAL else [])]


def _kind_facts(task: Task) -> dict[str, str]:
    """Thresholds of a multi-label task, mean and standard deviation of the values of a regression task."""
    if task.thresholds is not None:
        low, high = min(task.thresholds), max(task.thresholds)
        return {"thresholds": f"probability {low:.2f} to {high:.2f}, by label"}
    if task.target_scale is not None:
        scales = zip(task.labels, task.target_scale.mean, task.target_scale.std, strict=True)
        return {"values": ", ".join(f"{name}: mean {mean:.4g}, std {std:.4g}" for name, mean, std in scales)}
    return {}


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in values.items()) or "none recorded"


def _row(task: Task) -> str:
    labels = f"{len(task.labels)}: {_cell(', '.join(task.labels[:6]))}{' …' if len(task.labels) > 6 else ''}"
    return (
        f"| {task.name} | {task.kind} | {labels} | {_regime_and_method(task)} "
        f"| {', '.join(task.parents) or '-'} | {_cell(_pairs(task.record.metrics))} |"
    )


def _regime_and_method(task: Task) -> str:
    text = task.regime if task.method == task.regime else f"{task.regime}, {task.method}"
    return text if task.branch is None else f"{text}, on branch {task.branch.name}"


def _cell(text: str) -> str:
    """Text from a file, safe inside a table: no new column, line or markup."""
    return text.replace("|", "/").replace("\n", " ").replace("<", "‹").replace(">", "›")
