"""One batch of the curriculum of order: sparse videos, questions about them, masks, and the labels
of the links.

All videos of a batch share the masking, as in `batches`. They have about equally many tokens, so
little is padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samples.training.batches import (
    IGNORED,
    LONGEST_SHIFT,
    Asked,
    draw_question,
    drift,
    encode_question,
    share_of,
    write_question,
)
from samples.training.compose import Composer, Seen
from samples.training.links import Labels, LinkLabels, label_question, label_video
from samples.training.model import TOKENS
from samples.training.order_curriculum import EASY, OrderStage, Scene
from samples.training.recurring import make_recurring_video
from samples.training.repeated import CLEAR_TWICE, keep_clear, make_repeated_video
from samples.training.sparse import SparseVideo, make_sparse_video
from samples.training.time_links import label_beginnings, label_followed, label_over_time
from samples.training.visual_tokens import N_PREFIX, VisualTokens
from samples.worlds.phrases import TIME_TYPES
from samples.worlds.pictures import SHAPES
from samples.worlds.questions import Fact, find_facts

MOST_VIDEOS: Final = 96
MOST_PLACES: Final = 5
"""Most places of a shape that questions about time follow; distracting shapes have more."""
_UNCLEAR: Final = frozenset(
    {"last", "count", "middle_first", "middle_last", "middle_before", "middle_after"}
)
_PARTS: Final = frozenset({"third", "tenth"})
_USUAL_QUESTION: Final = 15


@dataclass(frozen=True, slots=True)
class OrderBatch:
    """Videos, ids and labels `[B, Q, R]` of questions, the type of each question, and the labels of
    each link.
    """

    tokens: VisualTokens
    questions: Tensor
    labels: Tensor
    types: list[str]
    links: dict[str, Labels]


def find_mass(video: SparseVideo) -> float:
    """Return the bias of a shown unlit token: the log of the number of unlit tokens that it stands
    for.
    """
    lit = int(video.lit.sum())
    shown = len(video.lit) - lit
    return max(0.0, math.log((TOKENS * video.span - lit) / shown)) if shown else 0.0


def draw_videos(
    rng: np.random.Generator, composer: Composer, stage: OrderStage, scene: Scene
) -> list[SparseVideo]:
    """Draw videos of `scene` until the batch is full."""
    least, most = scene.others
    others = int(rng.integers(least, most + 1))
    scene = replace(scene, others=(max(least, others - 2), others))
    videos: list[SparseVideo] = []
    n = 0
    while n < stage.tokens and len(videos) < MOST_VIDEOS:
        if stage.recurring and rng.random() < stage.recurring:
            videos.append(make_recurring_video(rng, composer, scene, stage.now, stage.crossing))
        elif stage.repeated and rng.random() < stage.repeated / (1 - stage.recurring):
            videos.append(make_repeated_video(rng, composer, scene, stage.now))
        else:
            videos.append(make_sparse_video(rng, composer, scene, stage.now))
        n += len(videos[-1].times) + stage.questions * _USUAL_QUESTION
    return videos


def ask(
    rng: np.random.Generator, video: SparseVideo, shift: int, weights: Mapping[str, float], n: int
) -> list[Asked]:
    """Draw n questions about a video that follows `shift` steps that are not shown."""
    # A crossing shape and the events during it have no single order.
    types = [kind for kind in weights if not (video.slow and kind in _UNCLEAR)]
    if video.repeats:
        types = [kind for kind in types if kind in CLEAR_TWICE]
    share = share_of(types, weights)
    moved = [e._replace(start_s=e.start_s + shift, end_s=e.end_s + shift) for e in video.events]

    @cache
    def find(kind: str) -> list[Fact]:
        if kind in TIME_TYPES:
            facts = find_facts(kind, video.events, video.span)
            return [fact for fact in facts if _can_be_followed(video.events, fact)]
        # Parts of the stream include the steps that are not shown.
        return (
            find_facts(kind, moved, video.span + shift)
            if kind in _PARTS
            else keep_clear(find_facts(kind, video.events, video.span), video)
        )

    return [draw_question(rng, types, share, find, video.events) for _ in range(n)]


def _can_be_followed(events: Sequence[Seen], fact: Fact) -> bool:
    """Return True if a shape has few events, all at different places, in different colours or (a
    crossing) in one.
    """
    own = [event for event in events if event.shape == events[fact.evidence[0]].shape]
    colours = {event.colour for event in own}
    places = {event.place for event in own}
    return len(own) == len(places) <= MOST_PLACES and len(colours) in (1, len(own))


def stack(
    composer: Composer,
    videos: list[SparseVideo],
    shift: NDArray[np.int64],
    mass: NDArray[np.float64],
) -> tuple[VisualTokens, NDArray[np.bool_]]:
    """Stack the videos, padded at the end, and mark the lit tokens `[B, N]`; `mass` `[B]` is the
    bias of unlit ones.
    """
    B = len(videos)
    N = max(len(video.times) for video in videos)
    rows, times, cells = (np.zeros((B, N), np.int64) for _ in range(3))
    lit = np.zeros((B, N), np.bool_)
    present = np.zeros((B, N), np.bool_)
    for b, video in enumerate(videos):
        n = len(video.times)
        rows[b, :n], cells[b, :n], lit[b, :n], present[b, :n] = (
            video.rows,
            video.cells,
            video.lit,
            True,
        )
        times[b, :n], times[b, n:] = video.times + shift[b], video.times[-1] + shift[b]
    tokens = VisualTokens(
        composer.bank.features_at(rows, cells),
        torch.from_numpy(times),
        torch.from_numpy(cells),
        torch.from_numpy(shift + [video.span for video in videos]),
        present=torch.from_numpy(present),
        bias=torch.from_numpy((mass[:, None] * (present & ~lit)).astype(np.float32)),
    )
    return tokens, lit


def _hide(
    rng: np.random.Generator, videos: list[SparseVideo], lit: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Mark the tokens `[B, N]` that the questions see: evidence (sometimes thinned), the last two
    steps, others.
    """
    seen = rng.random(lit.shape) >= rng.uniform(0.1, 0.95)
    thin = rng.random() < 0.35
    for b, video in enumerate(videos):
        n = len(video.times)
        evidence = video.lit
        if thin:
            kept = rng.random(video.span) < 0.5
            kept[[int(event.start_s) for event in video.events]] = True
            evidence = evidence & kept[video.times]
        seen[b, :n] = evidence | (seen[b, :n] & ~video.lit) | (video.times >= video.span - 2)
    return seen


def hide_some(
    rng: np.random.Generator,
    stage: OrderStage,
    videos: list[SparseVideo],
    tokens: VisualTokens,
    lit: NDArray[np.bool_],
) -> VisualTokens:
    """Hide part of the past from visual tokens (`window`, `far`) or from the questions (`seen`), or
    nothing.
    """
    way = rng.random()
    if way < stage.window + stage.far:
        far = None
        if way < stage.far:
            far = torch.from_numpy(
                (rng.random(lit.shape) < rng.uniform(0.05, 0.9))
                | (lit & (rng.random(lit.shape) < 0.85))
            )
        tokens = replace(tokens, window=int(rng.integers(2, stage.longest_window + 1)), far=far)
    if rng.random() < stage.drop:
        tokens = replace(tokens, seen=torch.from_numpy(_hide(rng, videos, lit)))
    return tokens


def draw_shown(
    rng: np.random.Generator, stage: OrderStage, videos: list[SparseVideo]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw how many steps before each video are not shown, and what its unlit tokens stand for,
    `[B]` each.
    """
    B = len(videos)
    shift = rng.integers(0, LONGEST_SHIFT, B) * (rng.random(B) < stage.shift)
    scale = np.where(rng.random(B) < stage.full_mass, 1.0, rng.random(B) * (rng.random(B) < 0.75))
    return shift, scale * [find_mass(video) for video in videos]


def write_questions(asked: list[list[Asked]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ids and labels `[B, Q, R]` of the questions of each video with their answers."""
    R = max(len(encode_question(text, fact.answer)[0]) for some in asked for _, fact, text in some)
    ids = np.zeros((len(asked), len(asked[0]), R), np.int64)
    labels = np.full(ids.shape, IGNORED, np.int64)
    for b, some in enumerate(asked):
        for q, (_, fact, text) in enumerate(some):
            write_question(ids[b, q], labels[b, q], text, fact.answer)
    return ids, labels


def make_order_batch(
    rng: np.random.Generator, composer: Composer, stage: OrderStage, progress: float
) -> OrderBatch:
    """Make the next batch at the fraction `progress` of a stage."""
    scene = EASY if rng.random() < stage.easy * (1 - progress) else stage.scene
    videos = draw_videos(rng, composer, stage, scene)
    shift, mass = draw_shown(rng, stage, videos)
    tokens, lit = stack(composer, videos, shift, mass)

    weights = drift(stage.weights, stage.weights_end, progress)
    asked = [
        ask(rng, video, int(s), weights, stage.questions)
        for video, s in zip(videos, shift, strict=True)
    ]
    ids, labels = write_questions(asked)
    R = ids.shape[2]
    links = LinkLabels()
    nv = N_PREFIX + lit.shape[1]
    for b, video in enumerate(videos):
        label_video(links, b, video, int(shift[b]), N_PREFIX)
        label_beginnings(links, b, video, N_PREFIX)
        for q, (kind, fact, text) in enumerate(asked[b]):
            words, start, _ = encode_question(text, fact.answer)
            label_followed(links, b, words, nv + q * R)
            if "shape" in fact.slots and kind != "whether":
                if kind in TIME_TYPES:
                    shape = SHAPES.index(fact.slots["shape"])
                    label_over_time(
                        links, b, video, int(shift[b]), words[:start], shape, nv + q * R
                    )
                else:
                    label_question(links, b, video, int(shift[b]), words[:start], fact, nv + q * R)

    tokens = hide_some(rng, stage, videos, tokens, lit)
    types = [kind for some in asked for kind, _, _ in some]
    known = links.tensors(tokens.window is not None, tokens.far is not None)
    return OrderBatch(tokens, torch.from_numpy(ids), torch.from_numpy(labels), types, known)
