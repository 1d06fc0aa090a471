"""Batches of videos in which something is said: captions between the visual tokens of sparse
videos, and questions.

A caption stands behind the visual tokens of its step, between the control tokens that close and
open a video, at the positions that `protokv.stream.session` gives it. What follows is a video of
its own, whose time begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from samples.training.batches import Asked, draw_question, drift, share_of
from samples.training.compose import Composer
from samples.training.order_batches import (
    OrderBatch,
    draw_shown,
    draw_videos,
    hide_some,
    stack,
    write_questions,
)
from samples.training.order_curriculum import EASY, OrderStage
from samples.training.sparse import SparseVideo
from samples.training.visual_tokens import COLUMNS, N_PREFIX
from samples.training.vocabulary import encode
from samples.worlds.pictures import SHAPES
from samples.worlds.questions import find_facts
from samples.worlds.speech import NAMES, Caption, say_owner, say_something

MOST_OTHERS: Final = 9
"""Most captions of a video that are not asked about."""


@dataclass(frozen=True, slots=True)
class SpokenVideo:
    """A video with words among its tokens: `ids` `[N]` (-1: visual), `positions` `[3, N]`, and that
    of a question.
    """

    video: SparseVideo
    said: list[Caption]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    asked_at: int


@lru_cache(maxsize=1024)
def encode_caption(text: str) -> NDArray[np.int64]:
    """Return the token ids of what was said in a step."""
    return np.array(encode(f"<|vision_end|> {text} <|vision_start|>", "words"), np.int64)


def draw_captions(rng: np.random.Generator, video: SparseVideo) -> list[Caption]:
    """Say the owners of most events, near them or anywhere, sometimes twice, and other things; in
    order of time.
    """
    names = rng.permutation(len(NAMES)).tolist()
    shown = list(dict.fromkeys(event.shape for event in video.events))
    asked = [shape for shape in shown if sum(event.shape == shape for event in video.events) == 1][
        :4
    ]
    free = rng.permutation(video.span).tolist()
    said: list[Caption] = []

    def take(near: float | None) -> int:
        if near is None:
            return int(free.pop())
        second = min(free[-40:], key=lambda one: abs(one - near))
        free.remove(second)
        return int(second)

    for shape, name in zip(asked, names, strict=False):
        (event,) = (event for event in video.events if event.shape == shape)
        for _ in range(int(rng.choice([0, 1, 1, 1, 1, 1, 2]))):
            if free:
                near = event.start_s + rng.uniform(-12, 12) if rng.random() < 0.6 else None
                said.append(say_owner(rng, take(near), shape, name))
    others = [shape for shape in range(len(SHAPES)) if shape not in asked]
    n = min(len(free), int(rng.integers(0, MOST_OTHERS + 1)))
    said += say_something(rng, free[:n], others, names[len(asked) :])
    return sorted(said, key=lambda caption: caption.second)


def speak(video: SparseVideo, said: list[Caption], shift: int) -> SpokenVideo:
    """Put captions, in order of time, into a video that follows `shift` steps that are not
    shown.
    """
    origin = N_PREFIX
    since = -shift
    n = len(video.times)
    places = np.zeros((3, n), np.int64)
    parts: list[NDArray[np.int64]] = []
    for second, words in [*((c.second, encode_caption(c.text)) for c in said), (video.span, None)]:
        own = (video.times >= since) & (video.times <= second)
        grid = video.cells // COLUMNS, video.cells % COLUMNS
        places[:, own] = origin + np.stack([video.times - since, *grid])[:, own]
        passed = second - since + (words is not None)
        behind = origin + max(passed, COLUMNS) if passed else origin
        if words is not None:
            parts.append(behind + np.arange(len(words)))
            origin = behind + len(words)
            since = second + 1
    ids = [encode_caption(caption.text) for caption in said]
    seconds = np.concatenate(
        [video.times, *(np.full(len(w), c.second) for w, c in zip(ids, said, strict=True))]
    )
    order = np.argsort(seconds, kind="stable")

    def join(visual: NDArray[np.int64], words: int) -> NDArray[np.int64]:
        return np.concatenate([visual, np.full(len(seconds) - n, words)])[order]

    spoken = replace(
        video,
        rows=join(video.rows, 0),
        times=seconds[order],
        cells=join(video.cells, 0),
        lit=np.concatenate(
            [
                video.lit,
                *(np.full(len(w), c.shape is not None) for w, c in zip(ids, said, strict=True)),
            ]
        )[order],
    )
    text = np.concatenate([np.zeros(0, np.int64), *parts])
    positions = np.concatenate([places, np.broadcast_to(text, (3, len(text)))], 1)[:, order]
    return SpokenVideo(
        spoken, said, np.concatenate([np.full(n, -1), *ids])[order], positions, behind
    )


def ask(
    rng: np.random.Generator, one: SpokenVideo, weights: Mapping[str, float], n: int
) -> list[Asked]:
    """Draw n questions about a video and what is said in it."""
    find = partial(find_facts, events=one.video.events, ask_s=one.video.span, said=one.said)
    types = list(weights)
    return [
        draw_question(rng, types, share_of(types, weights), find, one.video.events)
        for _ in range(n)
    ]


def make_speech_batch(
    rng: np.random.Generator, composer: Composer, stage: OrderStage, progress: float
) -> OrderBatch:
    """Make the next batch at the fraction `progress` of a stage."""
    scene = EASY if rng.random() < stage.easy * (1 - progress) else stage.scene
    silent = draw_videos(rng, composer, stage, scene)
    shift, mass = draw_shown(rng, stage, silent)
    spoken = [
        speak(video, draw_captions(rng, video), int(s))
        for video, s in zip(silent, shift, strict=True)
    ]
    videos = [one.video for one in spoken]
    tokens, lit = stack(composer, videos, shift, mass)
    ids = np.full(lit.shape, -1, np.int64)
    positions = np.zeros((3, *lit.shape), np.int64)
    for b, one in enumerate(spoken):
        ids[b, : len(one.ids)], positions[:, b, : len(one.ids)] = one.ids, one.positions
    tokens = replace(
        tokens,
        bias=None
        if tokens.bias is None
        else tokens.bias.masked_fill(torch.from_numpy(ids >= 0), 0.0),
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        end=torch.tensor([one.asked_at - N_PREFIX for one in spoken]),
    )
    weights = drift(stage.weights, stage.weights_end, progress)
    asked = [ask(rng, one, weights, stage.questions) for one in spoken]
    questions, labels = write_questions(asked)
    tokens = hide_some(rng, stage, videos, tokens, lit)
    if tokens.seen is not None:
        # Captions about owners are never hidden: a memory keeps or loses a caption as a whole.
        tokens = replace(tokens, seen=tokens.seen | torch.from_numpy(lit & (ids >= 0)))
    types = [kind for some in asked for kind, _, _ in some]
    return OrderBatch(tokens, torch.from_numpy(questions), torch.from_numpy(labels), types, {})
