"""Errors as clients see them: RFC 9457 problems, `application/problem+json`, with the right status.

    {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "no task 'pet'. …", "instance": "<id>"}

Routes raise a `ProblemError`, or let an error of the library pass: `problem_of` knows the status of each. A client
never sees a traceback. Below /v2, errors have the form of the Open Inference Protocol: {"error": "…"}.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from vit_memory.errors import (
    BackboneMismatch,
    DataError,
    DeadlinePassed,
    EngineClosed,
    FileError,
    GraphError,
    ImageError,
    QueueFull,
    ServingError,
    TaskError,
    UnknownTask,
    VitMemoryError,
)

MEDIA_TYPE = "application/problem+json"
# From special to general: the first that fits decides.
_STATUS: tuple[tuple[type[VitMemoryError], int], ...] = (
    (UnknownTask, 404),
    (GraphError, 409),
    (BackboneMismatch, 409),
    (DataError, 422),
    (ImageError, 422),
    (FileError, 400),
    (TaskError, 400),
    (QueueFull, 503),
    (EngineClosed, 503),
    (DeadlinePassed, 504),
    (ServingError, 503),  # the pass over its batch failed
)
RETRY_AFTER_S = 1
_PROTOCOL = "/v2"


class ProblemError(Exception):
    """A request that is refused: its status, the reason, and more fields and headers of the answer."""

    def __init__(self, status: int, detail: str, *, headers: Mapping[str, str] | None = None, **fields: Any) -> None:
        super().__init__(detail)
        self.status, self.detail, self.fields = status, detail, fields
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    def record(self, request_id: str) -> dict[str, Any]:
        """As JSON values."""
        return {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "instance": request_id,
            **self.fields,
        }

    def response(self, path: str, request_id: str) -> Response:
        """As the answer to a request for this path."""
        if path == _PROTOCOL or path.startswith(f"{_PROTOCOL}/"):
            return Response(json_bytes({"error": self.detail}), self.status, self.headers, "application/json")
        return Response(json_bytes(self.record(request_id)), self.status, self.headers, MEDIA_TYPE)


def problem_of(error: Exception) -> ProblemError | None:
    """The problem that an error of the library is for a client; None for an error that is a bug."""
    if isinstance(error, ProblemError):
        return error
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return ProblemError(status, str(error))
    return None


def json_bytes(value: Any) -> bytes:
    """Compact JSON. Half a surrogate pair in a client's text, which UTF-8 cannot hold, becomes a question mark."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
