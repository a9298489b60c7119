"""What every request and answer has: an id, security headers, a line in the log, and never a traceback.

A plain ASGI layer around the application, so that bodies and disconnects pass through it untouched.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vit_memory.serving.logs import log_request
from vit_memory.serving.metrics import Metrics
from vit_memory.serving.problems import ProblemError
from vit_memory.serving.security import SECURITY_HEADERS, check_host
from vit_memory.serving.state import ServerState

_GIVEN_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_HEALTH = "/v2/health/"
CLIENT_GONE = 499  # nginx's status for the log; nobody receives it
log = logging.getLogger(__name__)


class Envelope:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, state: ServerState, metrics: Metrics) -> None:
        self._app, self._state, self._metrics = app, state, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        refused = self._refused(exchange)
        self._state.requests += 1
        try:
            if refused is not None:
                await refused.response(scope["path"], exchange.id)(scope, receive, exchange.send)
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            exchange.status = CLIENT_GONE
        except asyncio.CancelledError:  # the server stops and waits no longer
            if exchange.status:
                raise
            problem = ProblemError(503, "the server is stopping.")
            await problem.response(scope["path"], exchange.id)(scope, receive, exchange.send)
        except Exception:
            log.exception("a request failed; this is a bug", extra={"fields": {"request_id": exchange.id}})
            if exchange.status:
                raise  # the answer had begun: the connection is all that can be closed
            problem = ProblemError(500, "the server failed; its log has the reason under this request id.")
            await problem.response(scope["path"], exchange.id)(scope, receive, exchange.send)
        finally:
            self._state.requests -= 1
            self._tell(exchange)

    def _refused(self, exchange: "_Exchange") -> ProblemError | None:
        settings = self._state.settings
        full = self._state.requests >= settings.limits.max_requests
        if full and not exchange.scope["path"].startswith(_HEALTH):  # a busy server is not a dead one
            return ProblemError(503, f"{self._state.requests} requests are being answered, as many as may. Try again.")
        return check_host(exchange.header(b"host"), settings)

    def _tell(self, exchange: "_Exchange") -> None:
        seconds = time.perf_counter() - exchange.started
        scope = exchange.scope
        client = scope.get("client")
        route = getattr(scope.get("route"), "path", None) or "unknown"
        log_request(
            {
                "request_id": exchange.id,
                "method": scope["method"],
                "route": route,
                "status": exchange.status,
                "ms": round(1000 * seconds, 2),
                "bytes_in": exchange.bytes_in,
                "bytes_out": exchange.bytes_out,
                "client": client[0] if client else "unknown",
                **scope["state"].get("log", {}),  # what a route adds
            }
        )
        self._metrics.request(scope["method"], route, exchange.status, seconds)


class _Exchange:
    """One request and its answer, counted."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.started = time.perf_counter()
        given = self.header(b"x-request-id")
        self.id = given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(8)
        self.status = self.bytes_in = self.bytes_out = 0
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = self.id

    def header(self, name: bytes) -> str:
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return ""

    async def receive(self) -> Message:
        message = await self._receive()
        self.bytes_in += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name for name, _ in message["headers"]}
            added = [header for header in _HEADERS if header[0] not in own]
            message = {
                **message,
                "headers": [*message["headers"], *added, (b"x-request-id", self.id.encode())],
            }
        else:
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)
