"""The limits of a server: what it takes, how much of it at once, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass


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
