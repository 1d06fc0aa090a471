"""Cuts a stream of packets into segments that can be decoded on their own.

A cut is made only at a key frame after which nothing refers back: every packet before it is shown before it,
every packet after it is shown after it. A segment holds at most `limit` packets; where the stream gives no
cut in time, or has packets without times, what was collected is handed back as unfit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# Opening a decoder for fewer frames than this costs more than decoding them.
LEAST = 32


@dataclass(frozen=True)
class Segment:
    """Packets from a key frame on, in decoding order. `fit` is False where they are more than the limit allows,
    or not known to stand on their own; nothing is cut after such a segment: it is the beginning of the rest."""

    packets: list[Any]
    fit: bool = True


def segments(packets: Iterable[Any], limit: int) -> Iterator[Segment]:
    """Cut; an unfit segment is the last one given, and `packets` still holds what follows it."""
    held: list[Any] = []
    cut: int | None = None  # a key frame in `held` whose next packet has not been seen
    floor: int | None = None  # the latest time shown so far in segments that were given
    wanted = min(LEAST, max(1, limit // 2))
    for packet in packets:
        if not held and not packet.is_keyframe and floor is None:
            # Before the first key frame nothing stands on its own.
            yield Segment([packet], fit=False)
            return
        held.append(packet)
        if packet.pts is None or (floor is not None and packet.pts <= floor):
            yield Segment(held, fit=False)
            return
        if cut is not None:
            key = held[cut].pts
            latest = max(p.pts for p in held[:cut])
            if packet.pts > key and latest < key:
                yield Segment(held[:cut])
                held, floor = held[cut:], latest
            cut = None
        if len(held) > limit + 1:
            yield Segment(held, fit=False)
            return
        if packet.is_keyframe and len(held) > wanted:
            cut = len(held) - 1
    if held:
        yield Segment(held, fit=len(held) <= limit)
