"""What the routes of one server process share: the engine, the tasks behind it, the settings."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from vit_memory.serving.engine import Engine
from vit_memory.serving.limits import BodyBudget
from vit_memory.serving.settings import Settings
from vit_memory.serving.task_store import TaskStore


@dataclass(slots=True, eq=False)
class ServerState:
    """One per process. Routers get it when they are made; other code finds it with `state_of(request)`."""

    engine: Engine
    settings: Settings
    store: TaskStore  # every change of tasks goes through it
    bodies: BodyBudget
    started: float = field(default_factory=time.time)
    stopping: bool = False  # SIGTERM came: streams that never end by themselves end now
    listeners: int = 0  # open streams of events
    requests: int = 0  # being answered
    on_ready: Callable[[], None] = lambda: None

    @property
    def backbone_name(self) -> str:
        """The name of the backbone for clients: of one loaded from a folder, the folder's name alone."""
        name = self.engine.task_set.model.backbone.name
        return Path(name).name if _is_local(name) else name

    def public(self, message: str) -> str:
        """A message without paths of this machine."""
        name = self.engine.task_set.model.backbone.name
        local = [name] if _is_local(name) else []
        if self.settings.bundle_folder is not None:
            local += [str(self.settings.bundle_folder), str(self.settings.bundle_folder.absolute())]
        for path in sorted(local, key=len, reverse=True):
            message = message.replace(path, Path(path).name)
        return message


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state


def _is_local(name: str) -> bool:
    """Whether a backbone's name is a path; `google/vit-base-patch16-224` is the name of a model."""
    return name.startswith((".", "~")) or Path(name).is_absolute() or Path(name).exists()
