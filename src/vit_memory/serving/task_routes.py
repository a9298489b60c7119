"""/v1/tasks and /v1/branches: what is served, and changes of it while the server runs; /v1/status and /v1/events.

A digest names the content of a task. `If-Match: "digest"` makes a change only if the task is still the one that the
client has seen, `If-None-Match: *` only if there is none; otherwise 409, so that two people never overwrite each other
unawares.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from vit_memory.branch import Branch
from vit_memory.errors import VitMemoryError
from vit_memory.files.branchfile import branch_bytes, branch_from_bytes
from vit_memory.files.taskfile import task_bytes, task_from_bytes
from vit_memory.graph import TaskGraph
from vit_memory.serving.descriptions import branch_json, status_json, task_json, tasks_json
from vit_memory.serving.limits import Body
from vit_memory.serving.openapi import EVENTS, FILE, FILE_BODY, ONE, STATUS, TASKS, responses
from vit_memory.serving.problems import ProblemError, json_bytes
from vit_memory.serving.security import ADMIN, PREDICT
from vit_memory.serving.state import ServerState
from vit_memory.serving.task_store import Check
from vit_memory.task import Task, check_name

_ETAGS = re.compile(r'\s*(?:W/)?"([^"]*)"\s*(?:,|$)')
_LOOK_EVERY_S, _KEEP_ALIVE_EVERY = 0.2, 75  # looks between comments that keep proxies from closing a stream
Item = Task | Branch
log = logging.getLogger(__name__)


def router(state: ServerState) -> APIRouter:
    """Routes to read and change what is served."""
    routes = APIRouter(prefix="/v1", dependencies=[PREDICT])

    @routes.get("/tasks", summary="All tasks", tags=["tasks"], responses=responses({200: TASKS}, 401, 403))
    async def list_tasks() -> Response:
        return _json(tasks_json(state, state.engine.task_set))

    @routes.get("/status", summary="Counts", tags=["server"], responses=responses({200: STATUS}, 401, 403))
    async def status() -> Response:
        return _json(status_json(state))

    @routes.get(
        "/events", summary="Changes of the tasks", tags=["server"], responses=responses({200: EVENTS}, 401, 403, 503)
    )
    async def events() -> Response:
        """A stream of server-sent events: `event: tasks` with the version, now and whenever it changes."""
        if state.listeners >= state.settings.limits.max_listeners:
            raise ProblemError(503, f"{state.listeners} clients listen already, as many as may.")
        not_kept = {"Cache-Control": "no-store"}
        return StreamingResponse(_versions(state), media_type="text/event-stream", headers=not_kept)

    _add_item_routes(routes, state, "task")
    _add_item_routes(routes, state, "branch")
    return routes


def _add_item_routes(routes: APIRouter, state: ServerState, kind: Literal["task", "branch"]) -> None:
    """The same routes for tasks and for branches."""
    store, limits = state.store, state.settings.limits
    is_branch = kind == "branch"
    path, tags = f"/{'branches' if is_branch else 'tasks'}/{{name}}", [f"{kind}{'es' if is_branch else 's'}"]
    read: Callable[[bytearray, str], Item] = branch_from_bytes if is_branch else task_from_bytes

    def find(name: str) -> Item:
        return store.branch(name) if is_branch else store.held[name]

    def digest_of(item: Item) -> str:
        """Of this very item: while a version is replaced, the engine has the new one before the store has it."""
        if isinstance(item, Branch):
            return store.held.branch_digests[item.name]
        task_set = state.engine.task_set
        return task_set.digests[item.name] if task_set.tasks.get(item.name) is item else item.digest

    @routes.get(path, summary=f"One {kind}", tags=[*tags], responses=responses({200: ONE[kind]}, 401, 403, 404))
    async def get(name: str) -> Response:
        item = find(name)
        digest = digest_of(item)
        return _json(_described(item, digest, store.held), headers=_etag(digest))

    @routes.get(
        f"{path}/file", summary=f"The file of a {kind}", tags=[*tags], responses=responses({200: FILE}, 401, 403, 404)
    )
    async def get_file(name: str) -> Response:
        item = find(name)
        etag = _etag(digest_of(item))  # before the content is awaited: the name may be another's afterwards
        content = await asyncio.to_thread(lambda: branch_bytes(item) if isinstance(item, Branch) else task_bytes(item))
        file = f"{name}{'.branch' if is_branch else ''}.safetensors"
        disposition = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(file, safe='')}"}
        return Response(content, headers={**etag, **disposition}, media_type="application/octet-stream")

    @routes.put(
        path,
        summary=f"Add or replace a {kind}",
        tags=[*tags],
        dependencies=[ADMIN],
        responses=responses({200: ONE[kind], 201: ONE[kind]}, 400, 401, 403, 408, 409, 413, 503),
        openapi_extra={"requestBody": FILE_BODY, "parameters": _GUARDS},
    )
    async def put(name: str, request: Request) -> Response:
        check_name(name, kind)
        guard = _guard(request, kind, name)
        with Body(request, state.bodies, limits.max_file_bytes, limits.body_timeout_s) as body:
            item = await asyncio.to_thread(_read_checked, read, await body.read(), f"{name}.safetensors")
            if item.name != name:
                raise ProblemError(
                    400, f"the file holds a {kind} called {item.name!r}, not {name!r}: use its own name."
                )
            created = False

            def check(digest: str | None) -> None:
                nonlocal created
                guard(digest)
                created = digest is None

            try:  # within the body, whose bytes the tensors of the item are: changes wait for one another
                task_set = await store.put(item, check)
            except (ProblemError, VitMemoryError):
                raise
            except Exception as error:  # every byte was checked, but not what each number does to the model
                log.warning("a %s that was uploaded cannot be served", kind, exc_info=True)
                raise ProblemError(400, f"this {kind} cannot be served ({type(error).__name__}).") from error
        place = (
            {"Location": f"{request.scope.get('root_path', '')}/v1/{tags[0]}/{quote(name, safe='')}"} if created else {}
        )
        status = 201 if created else 200
        graph = task_set.tasks
        digest = graph.branch_digests[name] if is_branch else task_set.digests[name]
        record = {**_described(item, digest, graph), "version": task_set.version}
        return _json(record, status, {**_etag(digest), **place})

    @routes.delete(
        path,
        summary=f"Remove a {kind}",
        tags=[*tags],
        dependencies=[ADMIN],
        status_code=204,
        responses=responses({}, 400, 401, 403, 404, 409, 503),
        openapi_extra={"parameters": _GUARDS[:1]},
    )
    async def delete(name: str, request: Request) -> Response:
        guard = _guard(request, kind, name)

        def check(digest: str | None) -> None:
            find(name)  # 404 comes before 409
            guard(digest)

        await store.remove(name, branch=is_branch, check=check)
        return Response(status_code=204)


def _described(item: Item, digest: str, graph: TaskGraph) -> dict[str, Any]:
    if isinstance(item, Branch):
        return branch_json(item, digest)
    return task_json(item, digest, graph.find_branch(item))


def _etag(digest: str) -> dict[str, str]:
    return {"ETag": f'"{digest}"'}


def _read_checked(read: Callable[[bytearray, str], Item], content: bytearray, name: str) -> Item:
    """The task or branch in a file, if it can be written as a file again: a record may hold what JSON cannot."""
    try:
        item = read(content, name)
        if isinstance(item, Branch):
            branch_bytes(item)
        else:
            task_bytes(item)
            json_bytes(task_json(item, "", None))
    except (ValueError, RecursionError) as error:
        raise ProblemError(400, f"{name}: its description cannot be written as JSON: {error}.") from None
    return item


_GUARDS = [
    {
        "name": "If-Match",
        "in": "header",
        "description": "Only if what is there has this digest.",
        "schema": {"type": "string"},
    },
    {
        "name": "If-None-Match",
        "in": "header",
        "description": "`*`: only if there is none of that name.",
        "schema": {"type": "string"},
    },
]


def _guard(request: Request, kind: str, name: str) -> Check:
    """What the headers of a request say about the digest that must be there."""
    match, none_match = (_etags(request, header) for header in ("if-match", "if-none-match"))

    def check(digest: str | None) -> None:
        there = f"there is no {kind} {name!r}" if digest is None else f"{kind} {name!r} has the digest {digest}"
        if match is not None and (digest is None or (digest not in match and "*" not in match)):
            raise ProblemError(409, f"{there}, which If-Match does not name: look at it again.", digest=digest)
        if none_match is not None and digest is not None and (digest in none_match or "*" in none_match):
            raise ProblemError(409, f"{there}, and If-None-Match allows none.", digest=digest)

    return check


def _etags(request: Request, header: str) -> set[str] | None:
    """The digests that a header names, `*` for any; None without the header."""
    value = request.headers.get(header)
    if value is None or value.strip() == "*":
        return None if value is None else {"*"}
    tags: set[str] = set()
    position = 0
    while position < len(value):
        tag = _ETAGS.match(value, position)
        if tag is None:
            raise ProblemError(400, f'the header {header} is not a list of digests in quotes: "DIGEST", or *.')
        tags.add(tag[1])
        position = tag.end()
    return tags


async def _versions(state: ServerState) -> AsyncIterator[bytes]:
    """Looks instead of being told: a change may come from anywhere, and a stream must notice that the server stops."""
    state.listeners += 1
    limit = state.settings.limits.stream_s
    end = math.inf if limit is None else time.monotonic() + limit
    try:
        version, looks = None, 0
        while not state.stopping and time.monotonic() < end:
            task_set = state.engine.task_set
            if task_set.version != version:
                version = task_set.version
                data = json_bytes({"version": version, "tasks": list(task_set.tasks)})
                yield b"event: tasks\nid: " + version.encode() + b"\ndata: " + data + b"\n\n"
            elif looks % _KEEP_ALIVE_EVERY == 0:
                yield b": still there\n\n"
            looks += 1
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        state.listeners -= 1


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")
