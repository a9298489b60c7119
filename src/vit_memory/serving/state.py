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
    changes_refused: str | None = None  # why tasks cannot be changed over HTTP, where they are changed another way
    unloading_refused: str | None = None  # why tasks cannot be loaded and unloaded
    problem: str | None = None  # why what this server was told to serve last is not served; for /v1/status
    backbone_name: str = field(init=False)  # for clients: of one loaded from a folder, the folder's name alone
    _paths: list[str] = field(init=False)  # that no message may show

    def __post_init__(self) -> None:
        name = self.engine.task_set.model.backbone.name
        is_local = name.startswith((".", "~")) or Path(name).is_absolute() or Path(name).exists()
        self.backbone_name = (Path(name).name or "backbone") if is_local else name
        self._paths = []
        if is_local:
            self._hide(name)
        if self.settings.bundle_folder is not None:
            self.hide(self.settings.bundle_folder)

    def hide(self, path: Path) -> None:
        """Show no more than the name of this file or folder in messages."""
        self._hide(str(path), str(path.absolute()), str(path.resolve()))

    def _hide(self, *paths: str) -> None:
        hidden = {*self._paths, *(path for path in paths if Path(path).name not in ("", path))}
        self._paths = sorted(hidden, key=len, reverse=True)

    def public(self, message: str) -> str:
        """A message without paths of this machine."""
        for path in self._paths:
            message = message.replace(path, Path(path).name)
        return message


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
