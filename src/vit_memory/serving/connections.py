"""Connections that cannot be kept busy by a client that never finishes its request line and headers.

uvicorn leaves both to a proxy: with its faster parser, headers may be of any size and take any time. Bodies have their
own limits, in `limits.py`.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0  # from the connection to the end of the first headers; later, uvicorn's keep-alive timeout counts


class GuardedConnection(HttpToolsProtocol):
    """One connection of uvicorn, with a limit on the size of a request's head and on the time of the first one."""

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._in_head, self._heads, self._head_bytes = True, 0, 0
        self._give_up = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._give_up.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More bytes: refused if they are all of one head, and that is too large."""
        was_in_head, heads = self._in_head, self._heads
        super().data_received(data)
        if was_in_head and self._in_head and heads == self._heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too large.")
        else:
            self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._heads += 1
        self._give_up.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._in_head = True
        super().on_message_complete()
