"""What a task or a bundle says of itself: a card for the terminal, and a model card for the hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit_memory.files.bundle import Bundle
from vit_memory.files.taskfile import describe
from vit_memory.task import Task


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
    """A task file for people to read."""
    told = facts(path, task)
    shown = list(task.labels[:8]) + ([f"… {len(task.labels)} in all"] if len(task.labels) > 8 else [])
    memory = f"{task.cells} cells in each of {task.backbone.depth} blocks{' (raw)' if task.raw_memory else ''}"
    lines = {
        "answers": f"{task.kind}: {', '.join(shown)}",
        **_kind_facts(task),
        "regime": task.regime + (f", {memory}" if task.cells else ""),
        "learned": f"{task.parameters:_} parameters, {told['bytes'] / 1000:_.1f} kB on disk".replace("_", " "),
        "extends": ", ".join(task.parents) or "nothing",
        "backbone": f"{task.backbone.name} ({task.backbone.family}, width {task.backbone.width}, "
        f"{task.backbone.depth} blocks, fingerprint {task.backbone.fingerprint[:12]}…)",
        "metrics": _short(task.record.metrics),
        "recipe": _short(task.record.recipe),
        "created": f"{task.record.created or 'unknown'}, vit-memory {task.record.library_version or 'unknown'}",
        "digest": f"{told['digest'][:12]}…" + (f", float16 of {told['half_of'][:12]}…" if told["half_of"] else ""),
    }
    return "\n".join([f"{task.name}  ({path})", *(f"  {key:10}{value}" for key, value in lines.items())])


def _kind_facts(task: Task) -> dict[str, str]:
    """Thresholds of a multi-label task, the units of a regression task."""
    if task.thresholds is not None:
        low, high = min(task.thresholds), max(task.thresholds)
        return {"present": f"from a probability of {low:.2f} to {high:.2f}, by label"}
    if task.target_scale is not None:
        known = zip(task.labels, task.target_scale.mean, task.target_scale.std, strict=True)
        return {"values": ", ".join(f"{name}: mean {mean:.4g}, std {std:.4g}" for name, mean, std in known)}
    return {}


def counted(number: int, what: str) -> str:
    """A number of things, in words that fit."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _short(values: Any) -> str:
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in values.items()) or "none recorded"


def model_card(bundle: Bundle, tasks: Sequence[Task], repo: str) -> str:
    """README.md of a bundle on the hub."""
    front = ["---", "library_name: vit-memory", "tags: [vit-memory, image-classification]"]
    if bundle.backbone.name.count("/") == 1 and not bundle.backbone.name.startswith((".", "/")):
        front.append(f"base_model: {json.dumps(bundle.backbone.name)}")
    rows = [
        f"| {task.name} | {task.kind} | {len(task.labels)}: {_cell(', '.join(task.labels[:6]))}"
        f"{' …' if len(task.labels) > 6 else ''} | {task.regime}, {task.cells} cells "
        f"| {', '.join(task.parents) or '-'} | {_cell(_short(task.record.metrics))} |"
        for task in tasks
    ]
    return "\n".join(
        [
            *front,
            "---",
            "",
            f"# {repo.rsplit('/', maxsplit=1)[-1]}",
            "",
            f"{counted(len(tasks), 'task')} for one frozen {_cell(bundle.backbone.name)} (fingerprint "
            f"`{bundle.backbone.fingerprint[:12]}…`): the original output stays identical to the bit, and all tasks "
            f"answer in one pass.",
            "",
            "| task | kind | labels | learned | extends | metrics |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "```python",
            "from vit_memory import Bundle",
            "",
            f"bundle = Bundle.from_pretrained({json.dumps(repo)})",
            "model = bundle.model()  # the backbone, with every task attached",
            "outputs = model(images)  # (B, 3, height, width), prepared as model.backbone.preprocessing says",
            f"outputs[{json.dumps(tasks[0].name if tasks else 'task')}]  # logits",
            "```",
            "",
        ]
    )


def _cell(text: str) -> str:
    """Text of strangers inside a table: no new column, line or markup."""
    return text.replace("|", "/").replace("\n", " ").replace("<", "‹").replace(">", "›")
