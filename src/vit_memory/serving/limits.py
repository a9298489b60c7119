"""Request bodies within limits: their size is counted while they arrive, and nothing beyond a limit is kept.

The length that a client announces is checked first, but never trusted: chunked bodies announce none. All bodies of a
process share a budget, so that many large requests at once cannot fill the memory; who finds none left is told to try
again. A client that sends too slowly is given up.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from anyio import fail_after
from starlette.requests import ClientDisconnect, Request

from vit_memory.serving.problems import ProblemError

Result = TypeVar("Result")


class BodyBudget:
    """Bytes of request bodies that a process holds, up to a limit. Used on the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Count more bytes; 503 if there is no room."""
        if self.used + size > self.limit:
            raise ProblemError(503, f"this server holds {self.used} bytes of requests, as many as it may. Try again.")
        self.used += size

    def give_back(self, size: int) -> None:
        """The bytes of a request that has ended."""
        self.used -= size


class Body:
    """The body of one request. Use it as a context: its bytes are given back to the budget at the end."""

    def __init__(self, request: Request, budget: BodyBudget, max_bytes: int, timeout_s: float) -> None:
        self._request, self._budget = request, budget
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self.size = 0

    def __enter__(self) -> "Body":
        announced = self._request.headers.get("content-length", "")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_bytes):
            raise self._too_large(f"{announced} bytes")
        return self

    def __exit__(self, *exception: object) -> None:
        self._budget.give_back(self.size)
        self.size = 0

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body in the chunks it arrives in."""
        until = time.monotonic() + self._timeout_s
        more = True
        while more:
            try:
                with fail_after(until - time.monotonic()):
                    message = await self._request.receive()
            except TimeoutError:
                raise ProblemError(
                    408, f"the body did not arrive within {self._timeout_s:g} s.", headers={"Connection": "close"}
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            if self.size + len(chunk) > self._max_bytes:
                raise self._too_large(f"more than {self._max_bytes} bytes")
            self._budget.take(len(chunk))
            self.size += len(chunk)
            if chunk:
                yield chunk

    async def read(self) -> bytearray:
        """The whole body."""
        content = bytearray()
        async for chunk in self.stream():
            content += chunk
        return content

    def _too_large(self, size: str) -> ProblemError:
        return ProblemError(413, f"the body has {size}; at most {self._max_bytes} are read.", limit=self._max_bytes)


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has gone. Only after its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, or ClientDisconnect: a client that has gone takes no place in a batch."""
    job = asyncio.create_task(work)
    gone = asyncio.create_task(wait_for_disconnect(request))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise ClientDisconnect
    finally:
        job.cancel()
        gone.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)
