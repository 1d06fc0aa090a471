"""From lines with markup to the texts of each step: `clean_lines` makes them plain, `Subtitles` give them to steps.

Plain is what was said, each row once. Notes on sounds go: `[music]`, and `(door slams)` on a row of its own. A speaker
that WebVTT names stays, as `Mara: `. Rows go that the caption before still showed, as in captions that roll up.

A line belongs to the step that holds its middle. So a step's texts follow from the lines and the step's interval alone,
and a run in parts gives the same texts as a whole one. Times are seconds of the source.
"""

from __future__ import annotations

import html
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from protokv.video.source import SubtitleLine

# Characters; a minute of speech has about 1,000.
_MOST_OF_STEP = 2000

# A caption that follows the one before within this many seconds may repeat its rows.
_AT_ONCE_S = 0.1

# All patterns take a time that grows with the text alone, whatever the text.
_TIME = re.compile(r"<(?:\d{1,4}:)?\d\d:\d\d\.\d{3}>")  # of a word, in WebVTT
_VOICE = re.compile(r"<v(?:\.[^\s<>]*)?\s([^<>]+)>")
_TAG = re.compile(r"</?(?:[abicusv]|font|lang|ruby|rt|span|br|p)(?:[.\s/][^<>]*)?>", re.IGNORECASE)
_NOTE = re.compile(r"(?<!\S)\[[^\[\]\d]*\]:?(?!\w)")
_NOTE_ON_ROWS = re.compile(r"^[- \t]*\([^()]*\)[ \t]*$", re.MULTILINE)
_BEGINNING = re.compile(r"^\s*(?:>{2,}|[-\u2013\u2014](?=\s|[^\W\d]))\s*")

# Notes of music and control characters become spaces; what is not seen and turns the direction of writing goes.
_UNSEEN = dict.fromkeys([0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF])
_SIGNS = {**_UNSEEN, **dict.fromkeys([*range(32), *range(0x7F, 0xA0), *map(ord, "♪♫♬")], " ")}


def clean_lines(lines: Iterable[SubtitleLine]) -> Iterator[SubtitleLine]:
    """Give, in the order of time, as plain text what each line of a track says that the line before it did not."""
    last, until_s = list[str](), -1.0
    for line in sorted(lines):
        rows = map(_clean_row, _NOTE_ON_ROWS.sub("", line.text.replace("\r", "")).split("\n"))
        new = [row for row in rows if row]
        before = last if line.start_s - until_s <= _AT_ONCE_S else []
        repeated = next(n for n in range(min(len(before), len(new)), -1, -1) if before[len(before) - n :] == new[:n])
        last, until_s = new, max(until_s, line.end_s)
        if len(new) > repeated:
            yield line._replace(text=" ".join(new[repeated:]))


def _clean_row(text: str) -> str:
    named = _VOICE.sub(lambda found: f"{found[1].strip()}: ", _BEGINNING.sub("", _TIME.sub("", text)))
    shown = html.unescape(_TAG.sub("", named)).translate(_SIGNS)
    return " ".join(_NOTE.sub("", shown).split())


class Subtitles:
    """The subtitles of a source; with an empty record and no lines: none.

    Args:
        lines: plain ones, in any order.
        record: which subtitles these are, as a state keeps it: plain JSON. Equal records are of equal subtitles.
        lost: one sentence on what was cut off or could not be read; None: nothing until now.
    """

    def __init__(
        self, lines: Iterable[SubtitleLine] = (), record: Mapping[str, Any] | None = None, lost: str | None = None
    ) -> None:
        self.record: Mapping[str, Any] = record or {}
        self.lost = lost
        self._lines = sorted((line for line in lines if math.isfinite(_find_middle(line))), key=_find_middle)

    @property
    def has_lines(self) -> bool:
        """Whether there is a line, so that a memory needs room for words."""
        return bool(self.record) and bool(self._lines)

    def between(self, start_s: float, end_s: float) -> list[str]:
        """Return the texts of the step from `start_s` up to `end_s`, in order.

        The step that begins at 0 also takes what comes before it.
        """
        first, end = (bisect_left(self._lines, _round_time(at), key=_find_middle) for at in (start_s, end_s))
        texts, left = list[str](), _MOST_OF_STEP
        for line in sorted(self._lines[0 if start_s <= 0 else first : end], key=lambda line: line[:2]):
            text = line.text
            if len(text) > left:
                what = f"a step has more than {_MOST_OF_STEP:,} characters at {start_s:.0f} s; the rest is left out"
                self.lost = self.lost or what
                # Cut before a word where there is one.
                head, _, _ = text[: left + 1].rpartition(" ")
                text = (head or text[:left]).rstrip()
            texts += [text] if text else []
            left -= len(text)
        return texts


def _find_middle(line: SubtitleLine) -> float:
    return _round_time((line.start_s + line.end_s) / 2)


def _round_time(time_s: float) -> float:
    """Return a time to the microsecond: two ways to count to it give one number."""
    return round(time_s, 6)
