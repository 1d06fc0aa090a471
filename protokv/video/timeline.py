"""Which time stamps of a file are credible: one flipped byte must not turn ten seconds into hours of repeated frames.

A frame that appears much later than the file can mean is damage: it is left out and counted. Knows no decoder.
Times are seconds of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

# A gap up to this, and a last frame that stays so long, need nothing else that speaks for them.
HOLE_S = 2.0

# No two frames of a file are further apart than this, whatever it declares.
LONGEST_GAP_S = 3600.0

# The same where the file declares no end that could be held against it.
LONGEST_GAP_WITHOUT_END_S = 600.0

# How far an honest file may run beyond the end that it declares.
BEYOND_END_S, BEYOND_END_PART = 10.0, 0.1


@dataclass(frozen=True)
class Timeline:
    """What may be believed: `end_s` is the declared end, None where none is declared apart from the frames' times."""

    end_s: float | None = None

    @property
    def limit_s(self) -> float:
        """No frame can be shown later than this."""
        return float("inf") if self.end_s is None else self.end_s * (1 + BEYOND_END_PART) + BEYOND_END_S

    def leaps(self, before_s: float, time_s: float) -> bool:
        """Whether a frame at `time_s` cannot follow one at `before_s` (0 for the first)."""
        longest_s = LONGEST_GAP_WITHOUT_END_S if self.end_s is None else LONGEST_GAP_S
        return time_s > self.limit_s or time_s - before_s > longest_s

    def duration_s(self, time_s: float, stated_s: float | None) -> float | None:
        """How long the frame at `time_s` stays; None where it does not say, or says what cannot be."""
        if stated_s is None or stated_s <= 0:
            return None
        declared = self.end_s is not None and time_s + stated_s <= self.end_s + HOLE_S
        return stated_s if stated_s <= HOLE_S or declared else None
