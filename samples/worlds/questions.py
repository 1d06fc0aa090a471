"""Questions about a procedural stream whose answers and evidence times are known.

A question is asked at `ask_s`, after [0, ask_s) was seen, and only if the events so far allow one
answer. `evidence_s` is when the decisive evidence was last visible (never later than ask_s). The
model card (`README.md` beside this file) has the table of types.

Events are ordered by the second in which they begin; order is asked only of events that begin in
different seconds. A part of the stream is asked only of events that are at least a tenth of a part
away from the other parts. A shape that crosses the picture is a chain of events without gaps, so it
is not asked how often it appeared. An owner is asked for only of shapes that appeared once, so that
each of these questions has an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from protokv.errors import ConfigError, suggest_name
from samples.worlds.events import Event
from samples.worlds.phrases import SPEECH_TYPES, TEMPLATES
from samples.worlds.pictures import COLOUR_NAMES, NUMBERS, PARTS, PLACES, SHAPES, TENTHS
from samples.worlds.speech import NAMES, Caption

MOST_COUNTED: Final = 4
APART_S: Final = 2
"""Two events of one shape count as two if they are this many seconds apart."""
_MIDDLE: Final = {
    "middle_first": "which_first",
    "middle_last": "which_last",
    "middle_before": "before",
    "middle_after": "after",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One unambiguous thing to ask.

    Attributes:
        answer: the only right answer.
        evidence: indices of the events that decide it.
        evidence_s: when the last of these was last visible.
        slots: the words that fill a template.
    """

    answer: str
    evidence: tuple[int, ...]
    evidence_s: float
    slots: dict[str, str] = field(default_factory=dict)


def find_facts(
    kind: str, events: Sequence[Event], ask_s: float, said: Sequence[Caption] = ()
) -> list[Fact]:
    """Return every fact of type `kind` to ask at `ask_s` about `events` and what was `said`, all of
    it before ask_s.

    Events may be any objects with the attributes `shape`, `colour`, `place`, `start_s` and `end_s`.
    """

    def until(*indices: int) -> float:
        return float(min(max(events[i].end_s for i in indices), ask_s))

    def about(answer: str, *indices: int, **slots: str) -> Fact:
        return Fact(answer, indices, until(*indices) if indices else ask_s, slots)

    shapes = Counter(e.shape for e in events)
    indexed = list(enumerate(events))
    if kind == "colour":
        return [
            about(COLOUR_NAMES[e.colour], i, shape=SHAPES[e.shape])
            for i, e in indexed
            if shapes[e.shape] == 1
        ]
    if kind == "shape":
        colours = Counter(e.colour for e in events)
        return [
            about(SHAPES[e.shape], i, colour=COLOUR_NAMES[e.colour])
            for i, e in indexed
            if colours[e.colour] == 1
        ]
    if kind == "where":
        return [
            about(PLACES[e.place], i, shape=SHAPES[e.shape])
            for i, e in indexed
            if shapes[e.shape] == 1
        ]
    if kind == "at":
        places = Counter(e.place for e in events)
        return [
            about(SHAPES[e.shape], i, place=PLACES[e.place])
            for i, e in indexed
            if places[e.place] == 1
        ]
    if kind == "whether":
        latest = {e.shape: i for i, e in sorted(indexed, key=lambda pair: pair[1].end_s)}
        return [
            about("yes", latest[s], shape=name) if s in latest else about("no", shape=name)
            for s, name in enumerate(SHAPES)
        ]
    if kind in ("first", "last"):
        seconds = [int(e.start_s) for e in events]
        if len(events) < 2:
            return []
        decisive = min(seconds) if kind == "first" else max(seconds)
        if seconds.count(decisive) > 1:
            return []
        i = seconds.index(decisive)
        return [about(SHAPES[events[i].shape], i)]
    if kind in _MIDDLE:
        seconds = [int(e.start_s) for e in events]
        ends = {min(seconds), max(seconds)} if seconds else set()
        return [
            f
            for f in find_facts(_MIDDLE[kind], events, ask_s)
            if not ends & {seconds[i] for i in f.evidence}
        ]
    if kind in ("third", "tenth"):
        names = PARTS if kind == "third" else TENTHS
        return [
            about(names[part], i, shape=SHAPES[e.shape])
            for i, e in indexed
            if shapes[e.shape] == 1 and (part := _find_part(e, ask_s, len(names))) is not None
        ]
    if kind in ("which_first", "which_last", "before", "after"):
        single = [(i, e) for i, e in indexed if shapes[e.shape] == 1]
        found = []
        for i, one in single:
            for j, two in single:
                if i == j or int(one.start_s) == int(two.start_s):
                    continue
                first, last = (one, two) if one.start_s < two.start_s else (two, one)
                if kind in ("before", "after"):
                    answer = "yes" if one is (first if kind == "before" else last) else "no"
                else:
                    answer = SHAPES[(first if kind == "which_first" else last).shape]
                found.append(about(answer, i, j, shape=SHAPES[one.shape], other=SHAPES[two.shape]))
        return found
    if kind == "count":
        # Two stars are one shape or two objects: ask only if both readings give the same number.
        if not 1 <= len(events) == len(shapes) <= MOST_COUNTED:
            return []
        return [about(NUMBERS[len(events)], *range(len(events)))]
    now = [i for i, e in indexed if e.end_s >= ask_s]
    if kind == "now":
        if len(now) > 1:
            return []
        return [Fact(SHAPES[events[now[0]].shape] if now else "nothing", tuple(now), ask_s)]
    if kind == "anything_now":
        return [Fact("yes" if now else "no", tuple(now), ask_s)]
    if kind in ("times", "where_first", "where_last"):
        return [
            about(answer, *decisive, shape=SHAPES[shape])
            for shape in sorted(shapes)
            for answer, decisive in _follow(kind, [(i, e) for i, e in indexed if e.shape == shape])
        ]
    if kind in SPEECH_TYPES:
        return [
            Fact(answer, (i,), until_s, slots)
            for i, e in indexed
            if shapes[e.shape] == 1
            for answer, until_s, slots in _find_owned(kind, e, until(i), said)
        ]
    raise ConfigError(f"there is no type of question {kind!r}", hint=suggest_name(kind, TEMPLATES))


def _follow(kind: str, own: Sequence[tuple[int, Event]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the answer about one shape over time, with the indices of the events that decide it,
    if there is one.
    """
    own = sorted(own, key=lambda pair: pair[1].start_s)
    if kind == "times":
        apart = all(later.start_s - one.end_s >= APART_S for (_, one), (_, later) in pairwise(own))
        if not apart or len(own) > MOST_COUNTED:
            return []
        return [(NUMBERS[len(own)], tuple(i for i, _ in own))]
    seconds = [int(event.start_s) for _, event in own]
    i, event = own[0] if kind == "where_first" else own[-1]
    if seconds.count(int(event.start_s)) > 1 or len({e.place for _, e in own}) == 1:
        return []
    return [(PLACES[event.place], (i,))]


def _find_owned(
    kind: str, event: Event, seen_s: float, said: Sequence[Caption]
) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Yield answer, time and slots of the fact about the owner of an event, if one owner alone was
    named for it.
    """
    told = {(c.shape, c.name): c.second + 1.0 for c in reversed(said) if c.shape is not None}
    own = [(shape, name) for shape, name in told if shape == event.shape]
    if len(own) != 1 or [name for _, name in told].count(own[0][1]) != 1:
        return
    told_s = told[own[0]]
    shape = SHAPES[event.shape]
    name = NAMES[own[0][1] or 0]
    if kind == "owner":
        yield name, told_s, {"shape": shape}
    elif kind == "owned":
        yield shape, told_s, {"name": name}
    else:
        answer = COLOUR_NAMES[event.colour] if kind == "colour_of" else PLACES[event.place]
        yield answer, max(told_s, seen_s), {"name": name}


def _find_part(event: Event, ask_s: float, parts: int) -> int | None:
    """Return which of equal parts of [0, ask_s) an event lies in; None if it is too close to
    another part.
    """
    length_s = ask_s / parts
    first = max(event.start_s - length_s / 10, 0.0)
    last = min(event.end_s, ask_s) + length_s / 10
    part = min(int(event.start_s / length_s), parts - 1)
    inside = part * length_s <= first and (last <= (part + 1) * length_s or part == parts - 1)
    return part if inside else None


def pick(rng: np.random.Generator, found: Sequence[Fact]) -> Fact:
    """Pick one fact at random; the answers yes and no are equally likely."""
    if found[0].answer in ("yes", "no"):
        answers = sorted({f.answer for f in found})
        answer = answers[int(rng.integers(len(answers)))]
        found = [f for f in found if f.answer == answer]
    return found[int(rng.integers(len(found)))]


def pick_different(rng: np.random.Generator, found: Sequence[Fact], most: int) -> Iterator[Fact]:
    """Yield up to `most` different facts at random; the caller may draw from `rng` between two of
    them.
    """
    left = list(found)
    for _ in range(min(most, len(left))):
        fact = pick(rng, left)
        left = [other for other in left if other is not fact]
        yield fact


def phrase(rng: np.random.Generator, kind: str, fact: Fact, phrasing: int | None = None) -> str:
    """Phrase a fact as a question with template number `phrasing`; None: a random one, half of the
    time the first.
    """
    templates = TEMPLATES[kind]
    if phrasing is None:
        phrasing = 0 if rng.random() < 0.5 else int(rng.integers(len(templates)))
    return templates[phrasing].format(**fact.slots)
