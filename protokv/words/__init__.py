"""Words of a source: what was said in a step, from subtitles."""

from __future__ import annotations

from protokv.words.cues import Coming, Cue, Track, Words, speak

__all__ = ["Coming", "Cue", "Track", "Words", "speak"]
