"""Connections that cannot be held by a client that never finishes what it sends, or never reads its answer.

uvicorn leaves that to a proxy: with its faster parser, headers may be of any size and take any time, and the first byte
after an answer ends its keep-alive timeout. Bodies that a route reads have their own limits, in `limits.py`.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0  # for a head to arrive, and after an answer for the rest of a body that nobody reads


class GuardedConnection(HttpToolsProtocol):
    """One connection of uvicorn, with limits on the size of a request's head and on the time until a route has it.

    A timer runs whenever no route is at work: from the connection or the last answer to the end of the next headers,
    and anew from the first byte of a head. uvicorn's shorter timeout of a connection without any byte counts as well.
    """

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._in_head, self._heads, self._head_bytes = True, 0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: int | None = None  # bytes of an answer that the client had not read when it was last looked at
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_timer()
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

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a head, but not of empty lines before it."""
        self._restart_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._heads += 1
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._in_head = True
        if self.cycle.response_complete:  # the rest of a body that was answered already: uvicorn starts no timeout
            self._restart_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn when an answer is written."""
        super().on_response_complete()
        self._unsent = None
        self._restart_timer()

    def _restart_timer(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._restart_timer()  # a route is at work on a request, and this is the head of one that was sent after it
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self._unsent is None or unsent < self._unsent):  # the client reads, slowly
            self._unsent = unsent
            self._restart_timer()
        elif unsent:  # closing would wait for a client that does not read, and keep the answer in memory
            self.transport.abort()
        else:
            self.transport.close()
