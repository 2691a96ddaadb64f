"""What uvicorn reads from a socket, with no room for two readings of one request.

h11 accepts what the standard allows a server to accept: bare line feeds, folded headers, a length
beside a chunked body, equal lengths twice. A proxy in front may read those differently, and then one
request hides another ("request smuggling"). No client needs any of it. And uvicorn waits for headers,
and for the rest of a body that the answer did not need, as long as the client likes.
"""

import asyncio
import re
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_FOLDED_LINE = re.compile(rb"\r\n[ \t]")
_FRAMING_HEADER = re.compile(rb"\r\n(content-length|transfer-encoding)[ \t]*:", re.IGNORECASE)


def fault_in_head(received: bytes, max_bytes: int) -> str | None:
    """What is ambiguous in the bytes from a request line on, complete or not; None for nothing."""
    head, end, _ = received.partition(b"\r\n\r\n")
    if len(head) > max_bytes:
        return "its headers are too large"
    if _BARE_LINE_FEED.search(head):
        return "a line ends without a carriage return"
    if _FOLDED_LINE.search(head):
        return "a header is folded"
    if end and len(_FRAMING_HEADER.findall(head)) > 1:
        return "the length of the body is given twice"
    return None


class Connection(H11Protocol):
    """One client's connection: refuses ambiguous requests, and closes when the client stalls."""

    receive_seconds: float = 30.0
    """How long the client may take for a request's headers."""
    head_bytes: int = 16 * 2**10
    """Largest request line with headers. h11 has a limit too, but only for those that come in parts."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            fault = fault_in_head(bytes(self.conn.trailing_data[0]), self.head_bytes)
            if fault is not None:
                self._unwatch()
                self.logger.warning("Invalid HTTP request received: %s.", fault)
                self.send_400_response(f"Invalid HTTP request received: {fault}.")
                return
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Time the client, while it is the client's turn."""
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.DONE):
            self._unwatch()
        elif self._stalled is None:
            self._stalled = self.loop.call_later(self.receive_seconds, self.transport.close)

    def _unwatch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def connections(receive_seconds: float, head_bytes: int) -> type[Connection]:
    """The class for ``uvicorn.Config.http``, with these limits."""
    limits = {"receive_seconds": receive_seconds, "head_bytes": head_bytes}
    return type("LimitedConnection", (Connection,), limits)
