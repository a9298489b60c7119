"""One frozen vision transformer that learns any number of new image tasks, untouched.

The public names, nothing else. They are imported on first use, so that `vit-memory --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_memory.adapter import Adapter, LowRank
    from vit_memory.backbone import Backbone, BackboneIdentity, load_backbone
    from vit_memory.branch import Branch, new_branch
    from vit_memory.data.sources import Dataset, open_data
    from vit_memory.errors import (
        BackboneError,
        BackboneMismatch,
        BadImage,
        DamagedFile,
        DataError,
        DeadlinePassed,
        EngineClosed,
        FileError,
        GraphError,
        ImageError,
        NewerFormat,
        QueueFull,
        RequestFailed,
        ServingError,
        TaskError,
        TrainingError,
        TrainingStopped,
        UnknownTask,
        UnsafeFile,
        UnsupportedFamily,
        VitMemoryError,
    )
    from vit_memory.explanation import Explanation
    from vit_memory.files.branchfile import load_branch, save_branch
    from vit_memory.files.bundle import Bundle
    from vit_memory.files.taskfile import load_task, save_task
    from vit_memory.graph import TaskGraph
    from vit_memory.model import MemoryViT
    from vit_memory.outputs import Original, Outputs
    from vit_memory.preprocessing import Preprocessing
    from vit_memory.read_out import ReadOut
    from vit_memory.serving.client import AsyncClient, Client
    from vit_memory.serving.engine import Engine
    from vit_memory.serving.options import EngineOptions
    from vit_memory.task import BranchRef, Task, TaskRecord, new_task
    from vit_memory.training.cache import Cache
    from vit_memory.training.callbacks import Callbacks, Progress
    from vit_memory.training.fit import fit
    from vit_memory.training.options import TrainingOptions
    from vit_memory.training.recipe import RateFactors, Recipe
    from vit_memory.training.results import FitResult
    from vit_memory.trunk import Trunk

__all__ = [
    "Adapter",
    "AsyncClient",
    "Backbone",
    "BackboneError",
    "BackboneIdentity",
    "BackboneMismatch",
    "BadImage",
    "Branch",
    "BranchRef",
    "Bundle",
    "Cache",
    "Callbacks",
    "Client",
    "DamagedFile",
    "DataError",
    "Dataset",
    "DeadlinePassed",
    "Engine",
    "EngineClosed",
    "EngineOptions",
    "Explanation",
    "FileError",
    "FitResult",
    "GraphError",
    "ImageError",
    "LowRank",
    "MemoryViT",
    "NewerFormat",
    "Original",
    "Outputs",
    "Preprocessing",
    "Progress",
    "QueueFull",
    "RateFactors",
    "ReadOut",
    "Recipe",
    "RequestFailed",
    "ServingError",
    "Task",
    "TaskError",
    "TaskGraph",
    "TaskRecord",
    "TrainingError",
    "TrainingOptions",
    "TrainingStopped",
    "Trunk",
    "UnknownTask",
    "UnsafeFile",
    "UnsupportedFamily",
    "VitMemoryError",
    "fit",
    "load_backbone",
    "load_branch",
    "load_task",
    "new_branch",
    "new_task",
    "open_data",
    "save_branch",
    "save_task",
]

_HOMES = {
    "backbone": ("Backbone", "BackboneIdentity", "load_backbone"),
    "data.sources": ("Dataset", "open_data"),
    "explanation": ("Explanation",),
    "files.branchfile": ("load_branch", "save_branch"),
    "files.bundle": ("Bundle",),
    "files.taskfile": ("load_task", "save_task"),
    "graph": ("TaskGraph",),
    "adapter": ("Adapter", "LowRank"),
    "branch": ("Branch", "new_branch"),
    "read_out": ("ReadOut",),
    "model": ("MemoryViT",),
    "outputs": ("Original", "Outputs"),
    "preprocessing": ("Preprocessing",),
    "serving.client": ("AsyncClient", "Client"),
    "serving.engine": ("Engine",),
    "serving.options": ("EngineOptions",),
    "task": ("BranchRef", "Task", "TaskRecord", "new_task"),
    "training.cache": ("Cache",),
    "training.callbacks": ("Callbacks", "Progress"),
    "training.fit": ("fit",),
    "training.options": ("TrainingOptions",),
    "training.recipe": ("RateFactors", "Recipe"),
    "training.results": ("FitResult",),
    "trunk": ("Trunk",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME_OF.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
