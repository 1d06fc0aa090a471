"""The limits of a server; connections, how many there are and how long each is waited for. Knows nothing about states.

uvicorn parses HTTP with h11, which bounds what comes before a body. It waits for ever, though: for the rest of a
request, and for a client that does not read. Here every wait ends. Where there are too many connections, the one that
is waited for longest makes room for a new one, so clients that send nothing cannot keep others out.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = logging.getLogger(__name__)

# How often a connection is looked at, in seconds.
_INTERVAL_S = 1.0
# How much is read before it is another connection's turn, in bytes.
_TURN = 1 << 12
# What is waited for.
_HEAD, _BODY, _READER = "a request", "the body of a request", "a client to read its answer"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server. What comes before a body has at most 16 KiB, which uvicorn says to h11.

    Attributes:
        body_bytes: the most of a request.
        waiting: the most questions that are being answered or wait.
        answer_s: the longest time for an answer, waiting included.
        connections: the most at once; for another one, the one that is waited for longest is closed.
        head_s: the longest time until a request is there, without its body.
        body_s: the longest time for its body.
        read_s: the longest time without a client reading on.
        parsing_s: the longest time on the processor to parse what a client has sent of one request.
    """

    body_bytes: int = 1 << 20
    waiting: int = 16
    answer_s: float = 120.0
    connections: int = 128
    head_s: float = 10.0
    body_s: float = 30.0
    read_s: float = 60.0
    parsing_s: float = 0.25


class Connection(H11Protocol):
    """A connection of uvicorn whose waits end; `limits` are set on a subclass."""

    limits = Limits()

    def connection_made(self, transport: Any) -> None:
        """Take a connection, and give up another if there are too many."""
        super().connection_made(transport)
        transport.max_size = _TURN
        self._waiting: tuple[str | None, object] = (None, None)
        self._since_s = self._parsing_s = 0.0
        self._look()
        if len(self.connections) > self.limits.connections:
            # Where the server owes every other client an answer, this is the new one.
            others = (one for one in self.connections if isinstance(one, Connection))
            max(others, key=Connection.waited_s).give_up("there were too many")

    def data_received(self, data: bytes) -> None:
        """Parse what came. Give up a client that does not wait for its turn, or whose request is slow to parse."""
        began_s = time.thread_time()
        super().data_received(data)
        self._note()
        self._parsing_s += time.thread_time() - began_s
        if self._waiting[0] is None and self.conn.trailing_data[0]:
            self.give_up("a request came before the answer to the last one")
        elif self._parsing_s > self.limits.parsing_s:
            self.give_up(f"a request took more than {self.limits.parsing_s:g} s to parse")

    def resume_writing(self) -> None:
        """Go on writing: the client has read."""
        super().resume_writing()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._timer.cancel()
        super().connection_lost(exc)

    def waited_s(self) -> float:
        """Return for how long the client is waited for; 0 if the client waits for the server."""
        self._note()
        return 0.0 if self._waiting[0] is None else time.monotonic() - self._since_s

    def give_up(self, reason: str) -> None:
        """End the connection at once; `reason` goes to the log."""
        _log.warning("a connection was closed: %s", reason)
        self.transport.abort()
        # asyncio tells `connection_lost` later, and others come before.
        self.connections.discard(self)

    def _look(self) -> None:
        """End the connection if the client is waited for too long; else look again later."""
        waited_s, what = self.waited_s(), self._waiting[0]
        if what is not None and waited_s > (most_s := self._most_s(what)):
            self.give_up(f"waited {most_s:g} s for {what}")
        self._timer = self.loop.call_later(_INTERVAL_S, self._look)

    def _note(self) -> None:
        """Note what is waited for, and since when."""
        cycle, what = self.cycle, None
        if self.transport.is_closing() or self.flow.write_paused:
            what = _READER
        elif cycle is None or cycle.response_complete:
            what = _HEAD
        elif cycle.more_body:
            what = _BODY
        if (what, cycle) != self._waiting:
            self._waiting, self._since_s, self._parsing_s = (what, cycle), time.monotonic(), 0.0

    def _most_s(self, what: str) -> float:
        return {_HEAD: self.limits.head_s, _BODY: self.limits.body_s, _READER: self.limits.read_s}[what]


def most_connections(limits: Limits) -> int:
    """Return how many connections the files that this process may open leave room for."""
    try:
        import resource
    except ImportError:  # not on Windows
        return limits.connections
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The rest is for those that are not given up yet, for states, videos and the model.
    return limits.connections if files < 0 else max(1, min(limits.connections, files // 4))


def configure(app: Starlette, limits: Limits, host: str, port: int) -> uvicorn.Config:
    """Return how uvicorn serves an application within limits. It logs to `logging` alone."""
    limits = replace(limits, connections=most_connections(limits))
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # So many are accepted at once, several times before the first is looked at.
        backlog=max(8, limits.connections // 4),
        timeout_graceful_shutdown=5,
    )
