"""The Open Inference Protocol v2 over HTTP, as clients of Triton and KServe speak it: every task is a model.

    POST /v2/models/pets/infer  {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["<base64>"]}]}

A model's version is the digest of its task. Errors are {"error": "…"}, as the protocol wants them, with the status that
the same error has under /v1 (`problems.py`). Bytes and tensors are in `inference_tensors.py`.
"""

import asyncio
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as version_of
from typing import Any

import torch
from fastapi import APIRouter, Request
from starlette.responses import Response
from torch import Tensor

from vit_memory.serving.inference_models import (
    ERRORS,
    INFER_BODY,
    INFERRED,
    OPTIONS_BODY,
    config_of,
    metadata_of,
    output_tensor,
    pixel_size,
    requested_outputs,
)
from vit_memory.serving.inference_tensors import InferRequest, InputLimits, encode_answer, parse_request
from vit_memory.serving.limits import Body, BodyBudget, unless_gone
from vit_memory.serving.problems import ProblemError
from vit_memory.serving.security import ADMIN, PREDICT
from vit_memory.serving.state import ServerState
from vit_memory.serving.task_set import TaskSet
from vit_memory.task import Task

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "model_repository"]
LENGTH_HEADER = "Inference-Header-Content-Length"
_LARGE_BODY = 2**20  # parsed in a thread: base64 of 64 MB takes a tenth of a second
_LARGE_ANSWER = 10_000  # numbers; encoded in a thread, too
_SMALL_BODY = 2**20  # at most, of load and unload
_LARGEST_RATIO = 1032  # of zlib: a body of so many zeros becomes one byte


def router(state: ServerState) -> APIRouter:
    """The routes below /v2 of a server."""
    routes = APIRouter(tags=["Open Inference Protocol v2"], responses=ERRORS)
    _add_server_routes(routes, state)
    _add_model_routes(routes, state)
    _add_repository_routes(routes, state)
    return routes


def _add_server_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.get("/v2/health/live")
    async def server_live() -> dict[str, bool]:
        """Whether the process answers at all."""
        return {"live": True}

    @routes.get("/v2/health/ready")
    async def server_ready() -> dict[str, bool]:
        """Whether requests are taken."""
        if state.stopping:
            raise ProblemError(503, "the server is stopping.")
        if state.engine.fault is not None:
            raise ProblemError(503, state.engine.fault)
        return {"ready": True}

    @routes.get("/v2", dependencies=[PREDICT])
    async def server_metadata() -> dict[str, Any]:
        """Name, version and extensions of the server."""
        return {"name": "vit-memory", "version": version_of("vit-memory"), "extensions": EXTENSIONS}


def _add_model_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.get("/v2/models/{name}", dependencies=[PREDICT])
    @routes.get("/v2/models/{name}/versions/{version}", dependencies=[PREDICT])
    async def model_metadata(name: str, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a task."""
        task_set = state.engine.task_set
        task = _find(state, task_set, name, version)
        return metadata_of(task, task_set)

    @routes.get("/v2/models/{name}/ready", dependencies=[PREDICT])
    @routes.get("/v2/models/{name}/versions/{version}/ready", dependencies=[PREDICT])
    async def model_ready(name: str, version: str | None = None) -> dict[str, Any]:
        """Whether a task is served."""
        _find(state, state.engine.task_set, name, version)
        return {"name": name, "ready": True}

    @routes.get("/v2/models/{name}/config", dependencies=[PREDICT])
    @routes.get("/v2/models/{name}/versions/{version}/config", dependencies=[PREDICT])
    async def model_config(name: str, version: str | None = None) -> dict[str, Any]:
        """What Triton calls the configuration: inputs and outputs in its words, and the labels."""
        task_set = state.engine.task_set
        return config_of(_find(state, task_set, name, version), task_set)

    @routes.post("/v2/models/{name}/infer", dependencies=[PREDICT], responses=INFERRED, openapi_extra=INFER_BODY)
    @routes.post(
        "/v2/models/{name}/versions/{version}/infer",
        dependencies=[PREDICT],
        responses=INFERRED,
        openapi_extra=INFER_BODY,
    )
    async def infer(name: str, request: Request, version: str | None = None) -> Response:
        """The answer of one task for one or several images."""
        _find(state, state.engine.task_set, name, version)
        if state.engine.stats.waiting >= state.engine.options.max_queue:
            raise ProblemError(503, "the queue is full. Try again.")  # before its body takes memory
        limits = state.settings.limits
        with Body(request, state.bodies, limits.max_body_bytes, limits.body_timeout_s) as body:
            content = await body.read()
            task_set = state.engine.task_set  # one version for all images
            task = _find(state, task_set, name, version)
            accepted = InputLimits(limits.max_images, pixel_size(task, task_set))
            encoding, length = request.headers.get("content-encoding", ""), request.headers.get(LENGTH_HEADER)

            def parse() -> InferRequest:
                return parse_request(_decompress(content, encoding, limits.max_body_bytes), length, accepted)

            with _reserved(state.bodies, min(limits.max_body_bytes, _LARGEST_RATIO * len(content)) if encoding else 0):
                small = len(content) < _LARGE_BODY and not encoding
                wanted = parse() if small else await asyncio.to_thread(parse)
                outputs = requested_outputs(wanted, task)
                rows = await unless_gone(request, _predict(state, task, task_set, wanted))
        answer = {"model_name": name, "model_version": task_set.digests[name]}
        if wanted.id is not None:
            answer["id"] = wanted.id

        def encode() -> tuple[bytes, int | None]:
            return encode_answer(answer, [output_tensor(task, rows, output) for output in outputs])

        encoded, header_length = encode() if rows.numel() < _LARGE_ANSWER else await asyncio.to_thread(encode)
        if header_length is None:
            return Response(encoded, media_type="application/json")
        return Response(encoded, headers={LENGTH_HEADER: str(header_length)}, media_type="application/octet-stream")


def _add_repository_routes(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/v2/repository/index", dependencies=[PREDICT], openapi_extra=OPTIONS_BODY)
    async def repository_index(request: Request) -> list[dict[str, str]]:
        """All tasks, and whether they are served; with {"ready": true} in the body, those that are."""
        options = await _options(state, request)
        entries = [
            {"name": name, "version": state.store.digest(name) or "", "state": "READY", "reason": ""}
            if name not in state.store.unloaded
            else {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}
            for name in state.store.held
        ]
        return [entry for entry in entries if entry["state"] == "READY" or options.get("ready") is not True]

    @routes.post("/v2/repository/models/{name}/load", dependencies=[ADMIN], openapi_extra=OPTIONS_BODY)
    async def load(name: str, request: Request) -> dict[str, str]:
        """Serve a task again that was unloaded, and the tasks that it extends."""
        _check_unloading(state)
        options = await _options(state, request)
        if options.get("parameters"):
            raise ProblemError(400, "load takes no parameters; upload a task file with PUT /v1/tasks/{name}.")
        await state.store.load(name)
        return {"name": name}

    @routes.post("/v2/repository/models/{name}/unload", dependencies=[ADMIN], openapi_extra=OPTIONS_BODY)
    async def unload(name: str, request: Request) -> dict[str, str]:
        """Serve a task no longer, and keep its file: until it is loaded again, or the server starts again."""
        _check_unloading(state)
        parameters = (await _options(state, request)).get("parameters")
        dependents = parameters.get("unload_dependents") if isinstance(parameters, dict) else None
        held = state.store.held
        held[name]  # UnknownTask names the others
        if dependents is True:
            extending = [other for other in held if name in held.ancestors(other)]
            for other in sorted(extending, key=lambda other: -len(held.ancestors(other))):  # the last ones first
                await state.store.unload(other)
        await state.store.unload(name)
        return {"name": name}


def _check_unloading(state: ServerState) -> None:
    if state.unloading_refused is not None:
        raise ProblemError(403, state.unloading_refused)


def _find(state: ServerState, task_set: TaskSet, name: str, version: str | None) -> Task:
    if name not in task_set.digests and name in state.store.unloaded:
        raise ProblemError(404, f"task {name!r} is unloaded; POST /v2/repository/models/{name}/load serves it again.")
    task = task_set.tasks[name]  # UnknownTask names the others
    if version is not None and version != task_set.digests[name]:
        raise ProblemError(404, f"task {name!r} has version {task_set.digests[name]}, not {version[:100]!r}.")
    return task


async def _predict(state: ServerState, task: Task, task_set: TaskSet, request: InferRequest) -> Tensor:
    """The outputs (n, C) of a task for all images. The first error is raised, and the other images are given up."""
    timeout_s = request.timeout_s
    if timeout_s is not None:
        timeout_s = min(timeout_s, state.settings.limits.max_timeout_s)
    answers = [
        asyncio.ensure_future(
            state.engine.predict(image, [task.name], timeout_s=timeout_s, name=f"image {i}", task_set=task_set)
        )
        for i, image in enumerate(request.images)
    ]
    try:
        return torch.stack([answer.outputs[task.name] for answer in await asyncio.gather(*answers)])
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)  # their errors are seen, if only to be dropped


@contextmanager
def _reserved(budget: BodyBudget, size: int) -> Iterator[None]:
    """Count bytes that a body may become, so that many small ones cannot fill the memory."""
    budget.take(size)
    try:
        yield
    finally:
        budget.give_back(size)


def _decompress(content: bytes | bytearray, encoding: str, limit: int) -> bytes | bytearray:
    """The body as it was before the client compressed it; no more than `limit` bytes of it."""
    if encoding in ("", "identity"):
        return content
    formats = {"gzip": 31, "deflate": 15}  # zlib's numbers
    if encoding not in formats:
        raise ProblemError(415, f"Content-Encoding {encoding[:40]!r}; expected gzip, deflate or none.")
    stream = zlib.decompressobj(formats[encoding])
    try:
        plain = stream.decompress(content, limit + 1)
    except zlib.error as error:
        raise ProblemError(400, f"the body is not {encoding}: {error}.") from None
    if len(plain) > limit:
        raise ProblemError(413, f"the body has more than {limit} bytes when decompressed.")
    if not stream.eof or stream.unused_data:
        raise ProblemError(400, f"the body is cut off, or has more after its {encoding} data.")
    return plain


async def _options(state: ServerState, request: Request) -> dict[str, Any]:
    """The JSON object in a small body; empty if there is none."""
    with Body(request, state.bodies, _SMALL_BODY, state.settings.limits.body_timeout_s) as body:
        content = await body.read()
    try:
        options = json.loads(content or b"{}")
    except (ValueError, RecursionError) as error:
        raise ProblemError(400, f"the body is not JSON: {error}.") from None
    if not isinstance(options, dict):
        raise ProblemError(400, "the body is not a JSON object.")
    return options
