"""A connection of uvicorn that is bounded in time, and in number before it costs anything.

uvicorn waits for ever for the rest of a request, and counts silent connections among those that
`limit_concurrency` allows. Here a request must be there whole, with its body, in `request_s`
seconds, and a reply must be taken in as many. At the limit, a new connection takes the place of the
oldest one without a request.
"""

from __future__ import annotations

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """A connection of uvicorn with limits."""

    request_s = 30.0  # seconds for a whole request, and for the reply to be taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; let the oldest connection without one go if there are too
        many.
        """
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.request_s, transport.abort)
        others = [cast("BoundedConnection", one) for one in self.connections if one is not self]
        idle = [one for one in others if one.cycle is None or one.cycle.response_complete]
        if idle and len(self.connections) >= (self.limit_concurrency or 1):
            oldest = min(idle, key=lambda one: one._timer.when())
            self.connections.discard(oldest)
            oldest.transport.abort()

    def handle_events(self) -> None:
        """Handle what came. A request that is whole is not waited for any longer."""
        super().handle_events()
        self._stop_waiting()
        # A proxy may read the other of the two. https://www.rfc-editor.org/rfc/rfc9112#section-6.1
        if self.cycle and {b"content-length", b"transfer-encoding"} <= dict(self.headers).keys():
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._restart()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait for the client to take what was sent."""
        super().pause_writing()
        self._restart()

    def resume_writing(self) -> None:
        """Wait no longer for the client."""
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing."""
        super().connection_lost(exc)
        self._timer.cancel()

    def _stop_waiting(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) and not self.flow.write_paused:
            self._timer.cancel()

    def _restart(self) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(self.request_s, self.transport.abort)
