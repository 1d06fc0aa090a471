"""The links of the chain from events to an answer about order, each with its own loss.

A loss on the answer alone leaves accuracy at chance: a comparison needs two times, and these need
the events. So some tokens are supervised in the middle of the network. A link names tokens, the
layer behind which they are read, and the bits that a linear reading of their normalised state must
predict. A time is encoded by the thresholds that it exceeds. Makes the labels and the losses; the
readings are not part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from samples.training.compose import Seen
from samples.training.forward import normalise
from samples.training.sparse import SparseVideo
from samples.training.vocabulary import token_ids
from samples.worlds.pictures import COLOUR_NAMES, PLACES, SHAPES
from samples.worlds.questions import Fact

BOUNDS: Final = np.concatenate([np.arange(1, 17) * 2.5, np.arange(5, 65) * 10.0]).astype(np.float32)
"""Thresholds of time in steps: 2.5 apart up to 40, 10 apart up to 640."""

LONGEST: Final = 6
"""More steps than an event lasts, unless it crosses the picture."""

PARTS: Final = (np.arange(1, 30) / 30).astype(np.float32)
"""Thresholds of a share of the stream, with thirds and tenths among them."""


class Link(NamedTuple):
    """The layer behind which a link is read (from 1), its number of bits, and the gain of its
    reading.

    The larger the gain, the fewer steps a new reading needs to grow to its size.
    """

    layer: int
    size: int
    gain: float = 1.0


LINKS: Final = {
    "clock": Link(1, len(BOUNDS)),
    "end": Link(1, len(BOUNDS)),
    "bag": Link(3, len(SHAPES)),
    "look": Link(4, len(COLOUR_NAMES) + len(PLACES)),
    "when": Link(4, len(BOUNDS)),
    "bag_asked": Link(4, len(SHAPES)),
    "later": Link(5, 1),
    "other": Link(5, len(BOUNDS)),
    "part": Link(5, len(PARTS)),
}
"""The tokens and the target of each link:

| link | tokens | target |
|---|---|---|
| clock | visual | their time |
| end | the only shape word of a question | the end of the video, when the question is asked |
| bag | lit visual | the shapes that began in an earlier second than their own event |
| look | shape words | the colour and the place of their event, so that they attend to it |
| when | shape words | the time at which their event began |
| bag_asked | shape words | the target of `bag` of their event |
| later | the second shape word | 1 if its event is the later one |
| other | the second shape word | the time of the event of the first shape word |
| part | the only shape word of a question | the part of the stream in which its event began |
"""

_AGE: Final = frozenset({"bag", "bag_asked", "opening"})
_PAIR: Final = frozenset({"later", "other"})
SHAPE_OF: Final = {token_ids()[shape]: i for i, shape in enumerate(SHAPES)}


class Labels(NamedTuple):
    """The tokens of a link, as videos `[n]`, positions `[n]` among all tokens of a video, and bits
    `[n, size]`.
    """

    videos: Tensor
    positions: Tensor
    bits: Tensor


class LinkLabels:
    """The labels of one batch, as they are collected."""

    def __init__(self) -> None:
        self._found: dict[
            str, tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], list[NDArray[np.bool_]]]
        ] = {}

    def add(
        self,
        name: str,
        video: int,
        positions: Sequence[int] | NDArray[np.int64],
        bits: NDArray[np.bool_],
    ) -> None:
        """Label tokens of one video; bits `[n, size]`."""
        videos, places, told = self._found.setdefault(name, ([], [], []))
        videos.append(np.full(len(positions), video))
        places.append(np.asarray(positions))
        told.append(bits)

    def tensors(self, window: bool, far: bool) -> dict[str, Labels]:
        """Return the labels, without those that the tokens cannot know.

        A visual token that sees only a window does not know what was before it. With `far` tokens
        it knows some of it.
        """
        unknown = (_AGE if window else frozenset()) | (_PAIR if window and not far else frozenset())
        return {
            name: Labels(
                torch.from_numpy(np.concatenate(videos)),
                torch.from_numpy(np.concatenate(places)),
                torch.from_numpy(np.concatenate(told).astype(np.float32)),
            )
            for name, (videos, places, told) in self._found.items()
            if name not in unknown
        }


def find_first_seconds(events: Sequence[Seen]) -> NDArray[np.int64]:
    """Return the first second in which each shape began, `[8]`; a second that never comes if it
    never did.
    """
    first = np.full(len(SHAPES), np.iinfo(np.int64).max)
    for event in events:
        first[event.shape] = min(first[event.shape], int(event.start_s))
    return first


def find_beginnings(video: SparseVideo) -> NDArray[np.int64]:
    """Return the second in which the event of each token began, `[N]`; an unlit token has its own
    second.
    """
    began = video.times.copy()
    free = video.lit.copy()
    for event in video.showings:
        second = int(event.start_s)
        own = (
            free
            & (video.cells == event.place)
            & (second <= video.times)
            & (video.times < event.end_s)
        )
        began[own] = second
        free &= ~own
    return began


def find_earlier_shapes(video: SparseVideo, began: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return `[N, 8]`, true for shapes that began before the second `began` `[N]` of a token's
    event.
    """
    return find_first_seconds(video.events) < began[:, None]


def label_video(
    labels: LinkLabels, number: int, video: SparseVideo, shift: int, offset: int
) -> None:
    """Label the tokens of video `number`, which begin at `offset`; its positions are shifted by
    `shift`.
    """
    places = offset + np.arange(len(video.times))
    labels.add("clock", number, places, (video.times + shift)[:, None] > BOUNDS)
    # A shape that stays in one cell for long does not show when it came there.
    began = find_beginnings(video)
    told = video.lit & (video.times - began < LONGEST)
    labels.add("bag", number, places[told], find_earlier_shapes(video, began)[told])


def mark_look(row: NDArray[np.bool_], event: Seen) -> None:
    """Mark the colour and the place of an event among the bits `[17]` of `look`."""
    row[event.colour] = row[len(COLOUR_NAMES) + event.place] = True


def label_question(
    labels: LinkLabels,
    number: int,
    video: SparseVideo,
    shift: int,
    words: Sequence[int],
    fact: Fact,
    offset: int,
) -> None:
    """Label the shape words of a question with the token ids `words`, which begin at `offset` in
    video `number`.
    """
    decisive: dict[int, Seen] = {video.events[i].shape: video.events[i] for i in fact.evidence}
    asked = [
        (offset + i, decisive[SHAPE_OF[w]])
        for i, w in enumerate(words)
        if SHAPE_OF.get(w) in decisive
    ]
    if not asked:
        return
    positions = [position for position, _ in asked]
    starts = np.array([event.start_s for _, event in asked])
    looks = np.zeros((len(asked), LINKS["look"].size), np.bool_)
    for row, (_, event) in zip(looks, asked, strict=True):
        mark_look(row, event)
    labels.add("look", number, positions, looks)
    labels.add("when", number, positions, (starts + shift)[:, None] > BOUNDS)
    labels.add(
        "bag_asked",
        number,
        positions,
        find_first_seconds(video.events) < starts.astype(np.int64)[:, None],
    )
    if len(asked) == 1:
        end = video.span + shift
        labels.add("end", number, positions, np.array([[end]]) > BOUNDS)
        labels.add("part", number, positions, (starts + shift)[:, None] / end > PARTS)
    if len(asked) == 2:
        labels.add("later", number, positions[1:], np.array([[starts[1] > starts[0]]]))
        labels.add("other", number, positions[1:], (starts[:1] + shift)[:, None] > BOUNDS)


def make_readings(hidden: int, links: Mapping[str, Link]) -> torch.nn.ModuleDict:
    """Return a linear layer for each link."""
    return torch.nn.ModuleDict(
        {name: torch.nn.Linear(hidden, link.size) for name, link in links.items()}
    )


def read_link(link: Link, reading: torch.nn.Module, state: Tensor) -> Tensor:
    """Return the linear reading `[..., size]` of a state `[..., hidden]`, which is normalised
    first.
    """
    told: Tensor = link.gain * reading(normalise(state)).float()
    return told


def measure_links(
    links: Mapping[str, Link],
    readings: torch.nn.ModuleDict,
    tapped: Mapping[int, Tensor],
    labels: Mapping[str, Labels],
    names: Sequence[str],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, for each link in `names` with labels, its loss and `[n, size]`, true where a bit is
    right.
    """
    found = {}
    for name in names:
        if name in labels:
            videos, positions, bits = labels[name]
            told = read_link(
                links[name], readings[name], tapped[links[name].layer][videos, positions]
            )
            found[name] = (
                F.binary_cross_entropy_with_logits(told, bits),
                (told.detach() > 0) == (bits > 0),
            )
    return found
