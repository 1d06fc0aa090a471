"""`LiveOptions`: how a source is read that does not wait, or may be lost. Knows no sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from protokv.errors import ConfigError
from protokv.video.connection import PIPE

STALL_S = 20.0


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How a source is read that does not wait, or may be lost.

    Attributes:
        stall_s: without a frame for so long it is lost, and a growing file has ended; None: `STALL_S`, but a pipe is
            waited for.
        give_up_s: how long to try again; None: for ever where the source is live.
        on_pressure: what happens when the model is slower: `drop` the oldest frames, or let the source `wait`; None:
            a pipe waits, everything else drops.
        for_s: end after so much of the stream.
        until: end at this real time, in seconds since 1970.
        follow: a file is read on while it grows.
        input: options for FFmpeg.
        retry_s: the first and the longest pause before the next attempt.
    """

    stall_s: float | None = None
    give_up_s: float | None = None
    on_pressure: Literal["drop", "wait"] | None = None
    for_s: float | None = None
    until: float | None = None
    follow: bool = False
    input: Mapping[str, str] = field(default_factory=dict)
    retry_s: tuple[float, float] = (1.0, 30.0)

    def __post_init__(self) -> None:
        for name in ("stall_s", "for_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"{name} is {value:g}", hint="use a time above 0")
        if self.on_pressure not in (None, "drop", "wait"):
            raise ConfigError(f"there is no way {self.on_pressure!r} to meet pressure", hint="use drop or wait")

    def lost_after_s(self, kind: str) -> float:
        """Without a frame for so long a source of this kind is lost."""
        if self.stall_s is not None:
            return self.stall_s
        return inf if kind == PIPE else STALL_S
