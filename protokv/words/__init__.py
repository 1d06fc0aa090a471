"""Words of a source: its subtitles, from file or track to step, and the transcript that a state
keeps.
"""

from __future__ import annotations

from protokv.words.cues import Cue, Subtitles

__all__ = ["Cue", "Subtitles"]
