"""One replica of a server on Ray Serve: the application of `create_app`, whose tasks follow user_config.

A replica starts with the backbone alone and gets its tasks by user_config, also while it runs:

    {"bundle": "/shared/zoo"}                    the tasks of a folder; replicas follow it, so changes over HTTP
                                                 through one of them reach all
    {"tasks": ["/shared/pets.safetensors", …]}   exactly these; changes over HTTP are refused

docs/design/serving.md says why. Ray shows user_config and arguments to whoever reaches its dashboard, so they hold the
places of tokens and never a token. Nothing here imports Ray.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from vit_memory.backbone import load_backbone
from vit_memory.errors import ServingError, VitMemoryError
from vit_memory.evaluation.models import collect_composable
from vit_memory.graph import TaskGraph
from vit_memory.model import MemoryViT
from vit_memory.parallel import limit_threads
from vit_memory.serving.app import create_app
from vit_memory.serving.bundle_folder import BundleFolder
from vit_memory.serving.interpreter import tune_for_serving
from vit_memory.serving.logs import configure_logs
from vit_memory.serving.settings import LogFormat, Settings
from vit_memory.serving.state import ServerState
from vit_memory.serving.token_places import TokenPlace

_CHANGED_ELSEWHERE = (
    "this server runs on Ray, and the tasks of its replicas are listed in user_config: change them there and run "
    "serve deploy. With a bundle in user_config, which all replicas follow, they could be changed here."
)
_NO_UNLOADING = "this server runs on Ray: unloading would reach one replica only. DELETE /v1/tasks/NAME reaches all."
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """What a replica is built from. Ray stores it, so `settings` have no tokens; the places of tokens are here."""

    backbone: str
    device: str = "cpu"
    settings: Settings = field(default_factory=Settings)
    token: TokenPlace | None = None
    admin_token: TokenPlace | None = None
    log_format: LogFormat = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.settings.token is not None or self.settings.admin_token is not None:
            raise ServingError("Ray stores and shows the settings of replicas: give the places of tokens, not tokens.")


def build_app(plan: ReplicaPlan) -> FastAPI:
    """The application of a replica: the backbone, and no tasks yet. ServingError if a token is not in its place."""
    configure_logs(plan.log_format, plan.log_level)
    limit_threads(plan.settings.engine.threads)
    token, admin_token = (None if place is None else place.read() for place in (plan.token, plan.admin_token))
    settings = replace(plan.settings, token=token, admin_token=admin_token)
    app = create_app(MemoryViT(load_backbone(plan.backbone, device=plan.device), []), settings)
    state: ServerState = app.state.server
    state.unloading_refused = _NO_UNLOADING
    return app


class Replica:
    """One replica. Serve makes it, gives it the application, and calls `reconfigure`."""

    app: FastAPI
    _configured = False

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve the tasks of user_config, all or none; called at the start and at every change.

        At the start, an error ends the replica, and Serve reports it. Later Serve would end the replica too, and start
        another one that fails as well, one replica after the other. So a replica that has tasks keeps them, says why
        in its log and in /v1/status, and goes on.
        """
        state: ServerState = self.app.state.server
        try:
            for path in named_paths(user_config):
                state.hide(path)
            source = await asyncio.to_thread(open_tasks, user_config)
            task_set = await state.store.hold(source)
        except Exception as error:
            if not self._configured:
                raise
            known = isinstance(error, VitMemoryError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            problem = f"user_config cannot be served, and the tasks before it stay: {reason}"
            log.error("%s", problem, exc_info=not known)
            state.problem = state.public(problem)
            return
        if not self._configured:
            tune_for_serving()
        self._configured = True
        state.changes_refused = None if isinstance(source, BundleFolder) else _CHANGED_ELSEWHERE
        state.problem = None
        log.info("configured", extra={"fields": {"tasks": len(task_set.tasks), "version": task_set.version}})


def open_tasks(user_config: Mapping[str, Any]) -> BundleFolder | TaskGraph:
    """What user_config names: the folder of a bundle, or tasks with all that they need. May wait for the disk."""
    paths = named_paths(user_config)
    if "bundle" in user_config:
        return BundleFolder(paths[0])
    collected = collect_composable(paths)
    return TaskGraph(collected.tasks, collected.branches)


def named_paths(user_config: object) -> list[Path]:
    """The folder or the files that user_config names; ServingError if it is not of either form."""
    match user_config:
        case {"bundle": str(folder), **others} if not others:
            texts = [folder]
        case {"tasks": [_, *_] as files, **others} if not others and all(isinstance(file, str) for file in files):
            texts = files
        case _:
            given = ", ".join(map(str, user_config)) if isinstance(user_config, Mapping) else type(user_config).__name__
            raise ServingError(
                f'user_config: expected {{"bundle": FOLDER}} or {{"tasks": [FILE, …]}}, found {given or "nothing"}.'
            )
    return [absolute(text) for text in texts]


def absolute(text: str) -> Path:
    """A path that means the same in every process."""
    path = Path(text)
    if not path.is_absolute():
        raise ServingError(f"{text}: not an absolute path, and replicas run in folders of their own.")
    return path
