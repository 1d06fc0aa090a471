"""The links of the chain from events to an answer about one shape over time, in a network of eight
layers.

A token learns if its event begins now, so that every event counts as one token. The shape word then
gathers the events of its shape: their number, colours, places, and the time of the last one. Has
the table and the labels; `links` has those of order, and the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from samples.training.links import BOUNDS, LINKS, SHAPE_OF, Link, LinkLabels, mark_look
from samples.training.sparse import SparseVideo
from samples.training.time_surgery import GATHER_LAYER, LEAD, ONSET_LAYER, TIME_INSERTED
from samples.training.vocabulary import token_ids
from samples.worlds.pictures import PLACES, SHAPES
from samples.worlds.questions import MOST_COUNTED

_GAIN: Final = 8.0

FOLLOWED: Final = frozenset(token_ids("time")[word] for word in ("where", "times"))
"""The words that stand LEAD positions before the shape word of every question about a shape over
time.
"""

TIME_LINKS: Final = {
    **{
        name: link._replace(layer=link.layer + len(TIME_INSERTED) * (link.layer > 1))
        for name, link in LINKS.items()
    },
    "onset": Link(ONSET_LAYER + 1, len(SHAPES), _GAIN),
    "code": Link(ONSET_LAYER + 1, len(SHAPES), 4.0),
    "marks": Link(ONSET_LAYER + 1, LINKS["look"].size, 4.0),
    "follows": Link(ONSET_LAYER + 1, 1, _GAIN),
    "looks": Link(GATHER_LAYER + 1, LINKS["look"].size),
    "until": Link(GATHER_LAYER + 1, len(BOUNDS)),
    "times": Link(GATHER_LAYER + 1, MOST_COUNTED - 1, _GAIN),
    "opening": Link(6, len(PLACES), _GAIN),
    "closing": Link(6, len(PLACES), _GAIN),
}
"""The tokens and the target of each link, beside `links.LINKS`:

| link | tokens | target |
|---|---|---|
| onset | lit visual | the shape of the event, if it begins now |
| code | visual | the same as numbers: 1 for the shape of an event that begins, else 0 |
| marks | visual | its colour and its place, as numbers too |
| follows | shape words | 1 if the question, read so far, may be about the shape over time |
| looks | the shape word of a question about it over time | the colours and the places of all its
events |
| until | the same | the time at which its last event began |
| times | the same | if it appeared at least twice, three times, four times |
| opening, closing | the same | its first place, and its last place |
"""


def label_beginnings(labels: LinkLabels, number: int, video: SparseVideo, offset: int) -> None:
    """Label the tokens of video `number`, which begin at `offset`, and mark lit tokens and the
    latest events.

    No link reads the two marks: the first prepares a new layer, and the second teaches attention.
    """
    begins, latest = (np.zeros((len(video.times), len(SHAPES)), np.bool_) for _ in range(2))
    marks = np.zeros((len(video.times), TIME_LINKS["marks"].size), np.bool_)
    for event in video.showings:
        own = video.lit & (video.cells == event.place)
        first = own & (video.times == int(event.start_s))
        begins[first, event.shape] = True
        for i in np.flatnonzero(first):
            mark_look(marks[i], event)
        latest[:, event.shape] = (
            own & (video.times >= int(event.start_s)) & (video.times < event.end_s)
        )
    lit = np.flatnonzero(video.lit)
    labels.add("onset", number, offset + lit, begins[lit])
    labels.add("marks", number, offset + lit, marks[lit])
    labels.add("latest", number, offset + lit, latest[lit])
    labels.add("lit", number, offset + lit, np.ones((len(lit), 1), np.bool_))


def label_followed(labels: LinkLabels, number: int, words: Sequence[int], offset: int) -> None:
    """Label the shape words of a question that may be about the shape over time; `offset` as
    above.
    """
    at = [i for i, word in enumerate(words) if word in SHAPE_OF]
    if at:
        told = [[i >= LEAD and words[i - LEAD] in FOLLOWED] for i in at]
        labels.add("follows", number, [offset + i for i in at], np.array(told))


def label_over_time(
    labels: LinkLabels,
    number: int,
    video: SparseVideo,
    shift: int,
    words: Sequence[int],
    shape: int,
    offset: int,
) -> None:
    """Label the shape word of a question about a shape over time; arguments as in
    `links.label_question`.
    """
    positions = [offset + i for i, word in enumerate(words) if SHAPE_OF.get(word) == shape]
    own = [event for event in video.events if event.shape == shape]
    looks = np.zeros(TIME_LINKS["looks"].size, np.bool_)
    for event in own:
        mark_look(looks, event)
    labels.add("looks", number, positions, looks[None])
    labels.add("until", number, positions, np.array([[own[-1].start_s + shift]]) > BOUNDS)
    if shape not in video.slow:
        labels.add("times", number, positions, len(own) > np.arange(1, MOST_COUNTED)[None])
    for name, event in (("opening", own[0]), ("closing", own[-1])):
        labels.add(name, number, positions, np.arange(len(PLACES))[None] == event.place)
