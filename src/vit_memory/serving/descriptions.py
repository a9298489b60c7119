"""Tasks, branches, the backbone and the state of a server as JSON values."""

import math
import os
from dataclasses import asdict
from typing import Any

import torch

from vit_memory.branch import Branch
from vit_memory.data.transforms import view_size
from vit_memory.serving.state import ServerState
from vit_memory.serving.task_set import TaskSet
from vit_memory.task import Task


def task_json(task: Task, digest: str, branch: Branch | None) -> dict[str, Any]:
    """What clients may know of a task."""
    preprocessing = task.record.preprocessing
    return {
        "name": task.name,
        "kind": task.kind,
        "regime": task.regime,
        "method": task.method,
        "labels": list(task.labels),
        "parents": list(task.parents),
        "branch": None if branch is None else branch.name,
        "digest": digest,
        "parameters": task.parameters,
        "cells": task.cells,
        "size_bytes": _stored_bytes(task),
        "metrics": _without_infinities(dict(task.record.metrics)),
        "preprocessing": None if preprocessing is None else asdict(preprocessing),
    }


def branch_json(branch: Branch, digest: str) -> dict[str, Any]:
    """What clients may know of a branch."""
    return {
        "name": branch.name,
        "digest": digest,
        "blocks": branch.blocks,
        "start": branch.start,
        "parameters": branch.parameters,
        "size_bytes": _stored_bytes(branch),
    }


def tasks_json(state: ServerState, task_set: TaskSet) -> dict[str, Any]:
    """All that is served, and what this server takes."""
    settings, graph = state.settings, task_set.tasks
    return {
        "version": task_set.version,
        "backbone": backbone_json(state, task_set),
        "tasks": [task_json(graph[name], task_set.digests[name], graph.branch_of(name)) for name in graph],
        "branches": [branch_json(branch, graph.branch_digests[name]) for name, branch in graph.branches.items()],
        "unloaded": sorted(state.store.unloaded),
        "read_only": (
            settings.read_only
            or state.changes_refused is not None
            or (settings.token is not None and settings.admin_token is None)
        ),
        "persistent": state.store.persistent,
        "limits": {
            "max_body_bytes": settings.limits.max_body_bytes,
            "max_file_bytes": settings.limits.max_file_bytes,
            "max_images": settings.limits.max_images,
            "max_explained": settings.limits.max_explained,
            "max_timeout_s": settings.limits.max_timeout_s,
            "max_pixels": state.engine.options.max_pixels,
            "max_queue": state.engine.options.max_queue,
            "max_batch": state.engine.options.max_batch,
            "timeout_s": state.engine.options.timeout_s,
        },
    }


def backbone_json(state: ServerState, task_set: TaskSet) -> dict[str, Any]:
    """The backbone that all tasks share."""
    backbone = task_set.model.backbone
    preprocessing = backbone.preprocessing
    known = preprocessing is not None and (preprocessing.crop or isinstance(preprocessing.resize, tuple))
    size = view_size(preprocessing) if preprocessing is not None and known else backbone.roles.image_size
    return {
        "name": state.backbone_name,
        "fingerprint": backbone.fingerprint,
        "width": backbone.width,
        "depth": backbone.depth,
        "heads": backbone.heads,
        "parameters": sum(parameter.numel() for parameter in backbone.model.parameters()),
        "image_size": list(size),
    }


def status_json(state: ServerState) -> dict[str, Any]:
    """What the engine has done since the start, and what it has to do."""
    stats = asdict(state.engine.stats)
    own = {"pid": os.getpid(), "requests": state.requests, "bodies_bytes": state.bodies.used}
    return {**stats, **own, "listeners": state.listeners, "problem": state.problem}


def _stored_bytes(item: Task | Branch) -> int:
    """The size of its parameters in its file."""
    tensors = item.tensors().values()
    return sum(tensor.numel() for tensor in tensors) * (2 if all(t.dtype == torch.float16 for t in tensors) else 4)


def _without_infinities(value: Any) -> Any:
    """JSON values of a file, which may write a number that is too large for any."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    return [_without_infinities(item) for item in value] if isinstance(value, list) else value
