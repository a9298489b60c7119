"""Run a server: bind the address, open what is served, answer until SIGTERM or Ctrl-C, in one process or several.

The address is bound before anything is loaded, so that a port in use is told at once, and listened on afterwards, so
that nobody is kept waiting by a server that is not ready. At SIGTERM no connection is accepted any more, what was asked
is answered, and the exit code is 0.
"""

import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI

from vit_memory.errors import ServingError, VitMemoryError
from vit_memory.evaluation.models import open_composable
from vit_memory.files.bundle import Bundle
from vit_memory.files.collect import collect
from vit_memory.files.manifest import MANIFEST
from vit_memory.parallel import limit_threads
from vit_memory.serving.app import create_app
from vit_memory.serving.connections import GuardedConnection
from vit_memory.serving.interpreter import tune_for_serving
from vit_memory.serving.logs import configure_logs
from vit_memory.serving.metrics import share_between_workers
from vit_memory.serving.security import LOOPBACK, check_cors, is_loopback
from vit_memory.serving.settings import LogFormat, Settings
from vit_memory.serving.workers import end_on_signals, run_workers

GRACE_S = 15  # beyond the longest time that a request may take by default
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to serve, where, and how."""

    sources: tuple[Path, ...]  # one bundle folder, or task and branch files
    settings: Settings = field(default_factory=Settings)
    bundle_folder: Path | None = None  # where changes of task files are kept
    backbone: str | None = None
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    insecure: bool = False
    log_format: LogFormat = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        settings = self.settings
        if not is_loopback(self.host) and settings.token is None and not self.insecure:
            raise ServingError(
                f"{self.host} can be reached from other machines, and without a token everybody there could use this "
                f"server. Set one (VIT_MEMORY_TOKEN, --token-file), listen on 127.0.0.1, or give --insecure."
            )
        check_cors(settings)
        folders = [source for source in self.sources if source.is_dir()]
        if folders and len(self.sources) > 1:
            raise ServingError(f"{folders[0]} is a folder: serve one bundle, or any number of task files.")
        if folders and self.bundle_folder is not None:
            raise ServingError("a bundle keeps its own changes: --bundle-dir is for task files.")
        for source in self.sources:
            if not source.exists():
                raise ServingError(f"{source}: no such bundle or task file.")

    @property
    def folder(self) -> Path | None:
        """The folder that keeps changes; None: they are kept in memory."""
        return self.sources[0] if self.sources[0].is_dir() else self.bundle_folder

    @property
    def open_to_browsers(self) -> bool:
        """Whether a page that a browser on this machine shows could use the server, since nothing is secret."""
        return self.settings.token is None and not self.insecure

    @property
    def hosts(self) -> tuple[str, ...]:
        """The Host headers that are accepted; all if there are none."""
        return (*LOOPBACK, self.host) if self.open_to_browsers else ()


def run(plan: ServePlan) -> None:
    """Serve until a signal ends it; returns when all that was asked is answered."""
    configure_logs(plan.log_format, plan.log_level)
    end_on_signals()
    listener = bind(plan.host, plan.port)
    log_address(plan.host, listener.getsockname()[1])
    run_folder = Path(tempfile.mkdtemp(prefix="vit-memory-serve-")) if plan.workers > 1 else None
    try:
        plan = _prepared(plan, run_folder)
        if plan.workers == 1:
            serve_app(build_app(plan), plan, listener)
        else:
            assert run_folder is not None
            share_between_workers(run_folder / "metrics")
            run_workers(_work, plan, listener, plan.workers)
    finally:
        listener.close()
        if run_folder is not None:
            shutil.rmtree(run_folder, ignore_errors=True)


def build_app(plan: ServePlan) -> FastAPI:
    """The application of a plan."""
    if plan.workers > 1:  # each has its share of the cores
        limit_threads(plan.settings.engine.threads or max(1, torch.get_num_threads() // plan.workers))
    if plan.folder is not None:
        return create_app(plan.folder, plan.settings, backbone=plan.backbone, device=plan.device)
    return create_app(open_composable(plan.sources, plan.backbone, plan.device)[0], plan.settings)


def serve_app(app: FastAPI, plan: ServePlan, listener: socket.socket) -> None:
    """Answer requests on a bound socket until a signal comes."""
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        http=GuardedConnection,
        timeout_graceful_shutdown=int(plan.settings.engine.timeout_s) + GRACE_S,
    )
    on_ready = app.state.server.on_ready

    def ready() -> None:
        tune_for_serving()
        on_ready()

    app.state.server.on_ready = ready
    uvicorn.Server(config).run(sockets=[listener])


def _work(plan: ServePlan, listener: socket.socket, ready: Callable[[], None]) -> None:
    """What a worker process does."""
    configure_logs(plan.log_format, plan.log_level)
    try:
        app = build_app(plan)
    except VitMemoryError as error:
        log.error("%s", error)
        raise SystemExit(1) from None
    app.state.server.on_ready = ready
    serve_app(app, plan, listener)


def _prepared(plan: ServePlan, run_folder: Path | None) -> ServePlan:
    """The plan with what only this process decides: folders that workers share, hosts, and lines in the log."""
    plan = replace(plan, settings=replace(plan.settings, allowed_hosts=plan.hosts, run_folder=run_folder))
    if plan.folder is None:
        if not plan.settings.read_only:
            log.info("changes of tasks are kept until the server stops; give --bundle-dir DIR to keep them")
        if run_folder is not None:  # what workers share
            plan = replace(plan, bundle_folder=run_folder / "bundle")
    if plan.bundle_folder is not None:
        create_bundle(plan.bundle_folder, plan.sources)
    if plan.insecure and plan.settings.token is None:
        log.warning("no token: everybody who reaches this server may use it")
    return plan


def create_bundle(folder: Path, sources: Sequence[Path]) -> None:
    """A bundle of task files, unless an earlier start made it: what was changed since then is not undone."""
    if (folder / MANIFEST).exists():
        log.info("%s is a bundle already: its tasks are served, the files given are not read", folder)
        return
    collected = collect(sources)
    Bundle.create(folder, collected.tasks[0].backbone, collected.tasks, collected.branches)


def bind(host: str, port: int) -> socket.socket:
    """A socket on an address; ServingError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise ServingError(f"cannot listen on {host}, port {port}: {error.strerror or error}.") from error
    return listener


def log_address(host: str, port: int) -> None:
    """Say in the log where the server is."""
    shown = f"[{host.strip('[]')}]" if ":" in host else host
    log.info("listening", extra={"fields": {"url": f"http://{shown}:{port}"}})
