"""The words of a source without subtitles, recognised while it is watched."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from protokv.errors import SourceError, shown
from protokv.video.source import Sound, Source
from protokv.words.cues import Coming, Cue
from protokv.words.plain import Plain

if TYPE_CHECKING:
    from protokv.words.speech import Recogniser

# Sound of a stream that is this much older than the step to be watched is left out, in seconds.
LATE_S = 60.0


def hear(source: Source, recogniser: Recogniser) -> Coming:
    """Return the words that are said in a file. Sound is read up to the end of the step that is watched.

    A run that goes on hears what it would have heard: pieces of sound follow from the sound alone, and each is
    recognised by itself.
    """
    pieces: Iterator[Sound] | None = None
    heard_s = -inf

    def take(start_s: float, end_s: float) -> Iterator[Cue]:
        nonlocal pieces, heard_s
        if pieces is None:
            pieces = source.sound(recogniser.rate, recogniser.longest_s, start_s)
        while heard_s < end_s:
            try:
                piece = next(pieces, None)
            except SourceError as error:
                words.lost, piece = words.lost or error.message, None
            if piece is None:
                heard_s = inf
                return
            heard_s = piece.end_s
            yield from cues_of(piece, recogniser, words)

    words = Coming(take, recogniser.record)
    return words


def cues_of(piece: Sound, recogniser: Recogniser, words: Coming) -> Iterator[Cue]:
    """Give what is said in a piece. If that fails, `words.lost` says so."""
    try:
        lines = list(recogniser(piece))
    except Exception as error:  # whatever a model's code raises
        why = shown(f"{type(error).__name__}: {error}".splitlines()[0], 200)
        words.lost = words.lost or f"what is said at {piece.start_s:.0f} s was not recognised: {why}"
        return
    for line in lines:
        # Each by itself: what is said twice is no caption that rolls up.
        cue = Plain()(line)
        # Models write full stops where they hear noise.
        if cue is not None and any(map(str.isalnum, cue.text)):
            yield cue
