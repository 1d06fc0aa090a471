"""Training videos composed from the clip bank: events with random gaps, without some of the empty
steps.

Chooses the clips of a video, their times, and the empty steps to keep. There are two kinds: "mixed"
has a few events, some of which overlap; "many" has one to four events to ask about, often at the
beginning, and distracting events that share no shape, colour or place with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from samples.training.bank import Bank
from samples.training.clips import DENSE, EMPTY, OVERLAPPING, SIMULTANEOUS, SINGLE
from samples.training.curriculum import Stage
from samples.worlds.pictures import SHAPES

Array = NDArray[np.int64]


class Seen(NamedTuple):
    """An event of a composed video; times in steps (= seconds)."""

    shape: int
    colour: int
    place: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Video:
    """Bank rows `[K]`, times `[K]`, lit `[K, 9]` (cells with an object), onset `[K]` (steps where
    one begins).
    """

    rows: Array
    times: Array
    lit: NDArray[np.bool_]
    onset: NDArray[np.bool_]
    events: list[Seen]


def _gaps(rng: np.random.Generator, room: int, lengths: list[int], to_the_end: bool) -> list[int]:
    """Return the starts of pieces of these lengths that follow each other in `room` steps with
    random gaps.
    """
    free = room - sum(lengths)
    cuts = np.sort(rng.integers(0, free + 1, len(lengths)))
    if to_the_end:
        cuts[-1:] = free
    starts = []
    used = 0
    for cut, length in zip(cuts, lengths, strict=True):
        starts.append(int(cut) + used)
        used += length
    return starts


class Composer:
    """Draw videos from a bank."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.by_kind = {
            k: bank.of_kind(k) for k in (SINGLE, OVERLAPPING, SIMULTANEOUS, EMPTY, DENSE)
        }
        self.looks = bank.events[bank.event_of[self.by_kind[SINGLE]], :3]
        self.by_shape = [np.flatnonzero(self.looks[:, 0] == shape) for shape in range(len(SHAPES))]
        dense = self.by_kind[DENSE]
        sizes = bank.event_of[dense + 1] - bank.event_of[dense]
        self.dense = {int(n): dense[sizes == n] for n in np.unique(sizes)}
        empty = self.by_kind[EMPTY]
        self.blank = np.concatenate(
            [np.arange(bank.first[c], bank.first[c] + bank.length[c]) for c in empty]
        )

    def events_of(self, clip: int) -> Array:
        """Return the events of a clip, as rows of `Bank.events`."""
        return self.bank.events[self.bank.event_of[clip] : self.bank.event_of[clip + 1]]

    def compose(self, rng: np.random.Generator, stage: Stage, span: int, kept: int) -> Video:
        """Compose a video of `span` steps, of which `kept` are shown."""
        if span == 1:
            return self._dense(rng, stage)
        most = max(2, kept // 2)
        if kept >= 16 and rng.random() < stage.many:
            n = int(rng.integers(3, min(stage.most, kept // 2) + 1))
            clips, n_first = self._many(rng, n)
        else:
            low, high = stage.events
            high = min(high, 2 if span < 4 else most)
            clips = self._mixed(rng, stage, int(rng.integers(min(low, high), high + 1)), kept)
            n_first = 0
        return self._lay(rng, stage, clips, n_first, span, kept)

    def _dense(self, rng: np.random.Generator, stage: Stage) -> Video:
        n = int(rng.integers(stage.dense_objects[0], stage.dense_objects[1] + 1))
        choice = self.dense.get(n, self.by_kind[SINGLE])
        clip = int(choice[rng.integers(len(choice))])
        row = self.bank.first[clip]
        events = [Seen(int(s), int(c), int(p), 0.0, 1.0) for s, c, p, _, _ in self.events_of(clip)]
        rows = np.array([row], np.int64)
        return Video(rows, np.zeros(1, np.int64), self.bank.lit[rows], np.ones(1, np.bool_), events)

    def _mixed(self, rng: np.random.Generator, stage: Stage, n: int, room: int) -> list[int]:
        clips: list[int] = []
        used: tuple[set[int], set[int], set[int]] = (set(), set(), set())
        count = 0
        while count < n:
            kind = SINGLE
            if n - count >= 2 and room >= 8 and rng.random() < stage.pairs:
                kind = SIMULTANEOUS if rng.random() < 0.15 else OVERLAPPING
            choice = self.by_kind[kind]
            for attempt in range(6):
                clip = int(choice[rng.integers(len(choice))])
                looks = self.events_of(clip)[:, :3].tolist()
                if attempt and rng.random() < stage.repeat:
                    break
                if all(look[a] not in used[a] for look in looks for a in range(3)):
                    break
            clips.append(clip)
            count += len(looks)
            for look in looks:
                for a in range(3):
                    used[a].add(look[a])
        return [clips[i] for i in rng.permutation(len(clips))]

    def _many(self, rng: np.random.Generator, n: int) -> tuple[list[int], int]:
        """Draw n single clips; return them, and how many of the first are asked about and share
        nothing with others.
        """
        asked = int(rng.integers(1, min(4, n - 1) + 1))
        alone = np.ones(len(self.looks), np.bool_)
        clips: list[int] = []
        shapes: set[int] = set()
        for _ in range(asked):
            clip = int(rng.choice(np.flatnonzero(alone)))
            clips.append(clip)
            shapes.add(int(self.looks[clip, 0]))
            # Later clips share no shape, colour or place with this one.
            alone &= (self.looks != self.looks[clip]).all(1)
        never = int(rng.choice([shape for shape in range(8) if shape not in shapes]))
        others = np.flatnonzero(alone & (self.looks[:, 0] != never))
        n_asked = len(clips)
        clips += rng.choice(others, n - n_asked).tolist()
        if rng.random() < 0.35:
            clips = [clips[i] for i in rng.permutation(n)]
            n_asked = 0
        return [int(self.by_kind[SINGLE][k]) for k in clips], n_asked

    def _lay(
        self,
        rng: np.random.Generator,
        stage: Stage,
        clips: list[int],
        n_first: int,
        span: int,
        kept: int,
    ) -> Video:
        bank = self.bank
        lengths = [int(bank.length[c]) for c in clips]
        room = kept - (0 if kept < 4 else 1)
        # Shorten single clips, then leave clips out, until they fit into the kept steps.
        while sum(lengths) > room:
            i = max(
                (i for i, c in enumerate(clips) if bank.kind[c] == SINGLE),
                key=lambda i: lengths[i],
                default=-1,
            )
            if i >= 0 and lengths[i] > 1:
                lengths[i] -= 1
            else:
                clips = clips[:-1]
                lengths = lengths[:-1]
        to_the_end = bool(rng.random() < stage.now)
        if 0 < n_first < len(clips):
            # The evidence lies in the first part of the video, everything else behind it.
            needed = sum(lengths[:n_first])
            spare = span - sum(lengths)
            border = needed + int(spare * rng.uniform(0.02, 0.4))
            starts = _gaps(rng, border, lengths[:n_first], False)
            starts += [border + s for s in _gaps(rng, span - border, lengths[n_first:], to_the_end)]
        else:
            starts = _gaps(rng, span, lengths, to_the_end)
        rows = np.full(span, -1, np.int64)
        lit = np.zeros((span, 9), np.bool_)
        onset = np.zeros(span, np.bool_)
        events = []
        for clip, length, start in zip(clips, lengths, starts, strict=True):
            source = bank.first[clip] + np.arange(length)
            rows[start : start + length] = source
            lit[start : start + length] = bank.lit[source]
            for s, c, p, begin, end in self.events_of(clip).tolist():
                begin = start + min(begin, length - 1)
                end = start + min(end, length)
                onset[begin] = True
                events.append(Seen(s, c, p, float(begin), float(end)))
        empty = np.flatnonzero(rows < 0)
        blank = int(rng.integers(len(self.blank) - span))
        rows[empty] = self.blank[blank : blank + len(empty)]
        times = np.arange(span)
        if kept < span:
            n_empty = kept - (span - len(empty))
            last = empty[empty >= span - 2][:n_empty]
            others = rng.permutation(np.setdiff1d(empty, last))[: n_empty - len(last)]
            held = np.ones(span, np.bool_)
            held[empty] = False
            held[last] = held[others] = True
            times = np.flatnonzero(held)
        return Video(rows[times], times, lit[times], onset[times], events)
