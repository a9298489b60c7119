"""The application: one engine, and every route, rule and limit around it.

app = create_app("my-bundle/")  # an ASGI application, for uvicorn or any other server
"""

import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from vit_memory.backbone import Backbone, load_backbone
from vit_memory.errors import UnknownTask, VitMemoryError
from vit_memory.files.bundle import Bundle
from vit_memory.model import MemoryViT
from vit_memory.serving import docs_page, inference_protocol, page_routes, predict_routes, task_routes
from vit_memory.serving.bundle_folder import BundleFolder
from vit_memory.serving.engine import Engine
from vit_memory.serving.envelope import Envelope
from vit_memory.serving.limits import BodyBudget
from vit_memory.serving.metrics import Metrics
from vit_memory.serving.openapi import describe
from vit_memory.serving.predict_body import invalid
from vit_memory.serving.problems import ProblemError, problem_of
from vit_memory.serving.security import PREDICT, check_cors
from vit_memory.serving.settings import Settings
from vit_memory.serving.state import ServerState, state_of
from vit_memory.serving.task_store import TaskStore

_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")  # of any route
_NAMED_TASKS = 100  # at most, in the answer to an unknown name
_DEFAULTS = Settings()
log = logging.getLogger(__name__)


def create_app(
    source: Engine | MemoryViT | Bundle | Path | str,
    settings: Settings = _DEFAULTS,
    *,
    backbone: Backbone | str | None = None,
    device: str = "cpu",
) -> FastAPI:
    """An application that serves a bundle's folder, a model, or an engine that was not started yet.

    Changes of a folder's tasks are kept in it, those of a model in memory. `backbone` and `device` are for a folder: by
    default the backbone that its manifest names, on the CPU. The application runs once.
    """
    check_cors(settings)
    metrics = Metrics()
    folder: BundleFolder | None = None
    if isinstance(source, (Bundle, Path, str)):
        path = source.folder if isinstance(source, Bundle) else Path(source)
        folder = BundleFolder(path)
        settings = replace(settings, bundle_folder=path)
        held = folder.read()
        if not isinstance(backbone, Backbone):
            backbone = load_backbone(backbone or folder.backbone, device=device)
        source = MemoryViT(backbone, held.values(), held.branches.values())
    engine = source if isinstance(source, Engine) else Engine(source, settings.engine, observe=metrics)
    store = TaskStore(engine, folder, settings.run_folder)
    state = ServerState(engine, settings, store, BodyBudget(settings.limits.max_bodies_bytes))
    app = FastAPI(
        title="vit-memory",
        version=version("vit-memory"),
        description="One image, one pass of the backbone, the answers of all tasks.",
        docs_url=None,  # FastAPI's own page loads its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # to an address that the client's Host header makes up
        lifespan=_lifespan(state, metrics),
    )
    app.state.server = state
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    _add_routes(app, state, metrics)
    _add_handlers(app)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "If-Match", "If-None-Match", "X-Request-Id"],
            expose_headers=["ETag", "Location", "Retry-After", "X-Request-Id"],
        )
    app.add_middleware(Envelope, state=state, metrics=metrics)  # the last one is the outermost
    return app


def _lifespan(state: ServerState, metrics: Metrics) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        async with state.engine as engine:
            metrics.watch(engine.task_set, lambda: engine.stats)
            async with state.store.watching():
                with _noticing_signals(state):
                    state.on_ready()
                    facts = {"backbone": state.backbone_name, "tasks": len(engine.task_set.tasks)}
                    log.info("ready", extra={"fields": {**facts, "version": engine.task_set.version}})
                    yield
        log.info("stopped")

    return run


@contextmanager
def _noticing_signals(state: ServerState) -> Iterator[None]:
    """Mark the state as stopping when the server is told to stop, before the server's own handler does its work.

    The server tells the application only after the last answer, and streams of events would never be that.
    """
    handlers: dict[int, Any] = {}

    def notice(number: int, frame: FrameType | None) -> None:
        state.stopping = True
        handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            handlers[number] = signal.getsignal(number)
            if callable(handlers[number]):
                signal.signal(number, notice)
    try:
        yield
    finally:
        state.stopping = True
        for kept, handler in handlers.items():
            if callable(handler):
                signal.signal(kept, handler)


def _add_routes(app: FastAPI, state: ServerState, metrics: Metrics) -> None:
    app.include_router(predict_routes.router(state))
    app.include_router(task_routes.router(state))
    app.include_router(inference_protocol.router(state))
    app.include_router(docs_page.router(app))
    app.include_router(page_routes.router())

    @app.get("/metrics", dependencies=[PREDICT], include_in_schema=False)
    def show_metrics(request: Request) -> Response:  # not async: it may read files of other workers
        content, media_type = metrics.render(request.headers.get("accept"))
        return Response(content, headers={"Content-Type": media_type})


def _add_handlers(app: FastAPI) -> None:
    """Every error becomes a problem."""

    def respond(request: Request, problem: ProblemError) -> Response:
        problem.detail = state_of(request).public(problem.detail)
        return problem.response(request.scope["path"], request.state.request_id)

    @app.exception_handler(ProblemError)
    async def on_problem(request: Request, error: ProblemError) -> Response:
        return respond(request, error)

    @app.exception_handler(VitMemoryError)
    async def on_library_error(request: Request, error: VitMemoryError) -> Response:
        problem = problem_of(error)
        if problem is None:
            raise error
        if isinstance(error, UnknownTask):
            problem.fields["tasks"] = list(state_of(request).engine.task_set.tasks)[:_NAMED_TASKS]
        return respond(request, problem)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return respond(request, invalid("the request", error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        detail, headers = str(error.detail), dict(error.headers or {})
        if error.status_code == 404 and detail == "Not Found":
            detail = "no such route; /docs lists them."
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_allowed_methods(request))
            detail = f"not with {request.method[:20]!r}; this route takes {headers['Allow']}."
        return respond(request, ProblemError(error.status_code, detail, headers=headers))


def _allowed_methods(request: Request) -> list[str]:
    """The methods of all routes that have the path of a request; the router itself names those of the first one."""
    address = {key: request.scope[key] for key in ("type", "path", "root_path", "headers") if key in request.scope}
    routes = request.app.router.routes
    return [
        method
        for method in _METHODS
        if any(route.matches({**address, "method": method})[0] is Match.FULL for route in routes)
    ]
