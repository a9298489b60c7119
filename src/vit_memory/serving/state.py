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
    backbone_name: str = field(init=False)  # for clients: of one loaded from a folder, the folder's name alone
    _paths: list[str] = field(init=False)  # that no message may show

    def __post_init__(self) -> None:
        name = self.engine.task_set.model.backbone.name
        is_local = name.startswith((".", "~")) or Path(name).is_absolute() or Path(name).exists()
        self.backbone_name = (Path(name).name or "backbone") if is_local else name
        folder = self.settings.bundle_folder
        paths = [name] if is_local else []
        paths += [] if folder is None else [str(folder), str(folder.absolute()), str(folder.resolve())]
        self._paths = sorted({path for path in paths if Path(path).name not in ("", path)}, key=len, reverse=True)

    def public(self, message: str) -> str:
        """A message without paths of this machine."""
        for path in self._paths:
            message = message.replace(path, Path(path).name)
        return message


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
