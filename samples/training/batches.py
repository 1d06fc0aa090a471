"""One training batch: composed videos, questions about them, and masks.

Questions come from `questions.find_facts`, as in evaluation. The videos of a batch share length and
masking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samples.training.compose import Composer, Seen, Video
from samples.training.curriculum import Stage
from samples.training.forward import QUESTION_TOKENS
from samples.training.model import TOKENS
from samples.training.visual_tokens import N_PREFIX, VisualTokens, show_whole_steps
from samples.training.vocabulary import encode, token_ids
from samples.worlds.phrases import TEMPLATES
from samples.worlds.questions import Fact, find_facts, phrase, pick

IGNORED: Final = -100
LARGEST_BATCH: Final = 72
LONGEST_SHIFT: Final = 700
_NEEDS_TIME: Final = frozenset({"first", "last", "which_first", "which_last"})


@dataclass(frozen=True, slots=True)
class Batch:
    """Videos, ids and labels `[B, Q, QUESTION_TOKENS]` of the questions about them, and the type of
    each question.
    """

    tokens: VisualTokens
    questions: Tensor
    labels: Tensor
    types: list[str]


@lru_cache(maxsize=65536)
def encode_question(question: str, answer: str) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Return the ids of question and answer, the index that predicts the answer's first token, and
    the answer's ids.
    """
    prompt = encode(f"<|vision_end|> {question} <|im_end|> <|im_start|> assistant", "words")
    reply = encode(f"{answer} <|im_end|>", "words")
    return tuple(prompt + reply[:-1]), len(prompt) - 1, tuple(reply)


def write_question(
    ids: NDArray[np.int64], labels: NDArray[np.int64], question: str, answer: str
) -> None:
    """Fill a block of token ids and one of labels, `[QUESTION_TOKENS]` each; labels outside the
    answer are IGNORED.
    """
    tokens, start, reply = encode_question(question, answer)
    ids[: len(tokens)] = tokens
    labels[start : start + len(reply)] = reply


class Asked(NamedTuple):
    """A question: its type, its fact, and its text."""

    kind: str
    fact: Fact
    text: str


def judge_answers(logits: Tensor, labels: Tensor) -> list[bool]:
    """Return for each answer if all tokens before its end are the likeliest; logits `[n, V]` at the
    labels.
    """
    ok = torch.ones(labels.shape, dtype=torch.bool)
    select = labels != IGNORED
    ok[select] = logits.argmax(-1) == labels[select]
    verdict: list[bool] = (ok | (labels == token_ids()["<|im_end|>"])).all(-1).view(-1).tolist()
    return verdict


def drift(
    weights: Mapping[str, float], weights_end: Mapping[str, float], progress: float
) -> dict[str, float]:
    """Return the weight of each type at the fraction `progress` of a stage; `weights_end` hold from
    .6 on.
    """
    done = min(1.0, progress / 0.6)
    return {kind: w + (weights_end.get(kind, w) - w) * done for kind, w in weights.items()}


def share_of(types: Sequence[str], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the cumulative shares of the types."""
    share: NDArray[np.float64] = np.cumsum([weights[kind] for kind in types])
    share /= share[-1]
    return share


def draw_question(
    rng: np.random.Generator,
    types: Sequence[str],
    share: NDArray[np.float64],
    find: Callable[[str], list[Fact]],
    events: Sequence[Seen],
    phrasing: Mapping[str, int] | None = None,
) -> Asked:
    """Draw a question about `events`; `find` returns the facts of a type, `share` is cumulative
    over the types.
    """
    for _ in range(40):
        kind = types[int(np.searchsorted(share, rng.random()))]
        found = find(kind)
        if found:
            break
    else:
        kind = "whether"
        found = find("whether")
    if kind == "times":
        # Ask for each number equally often.
        answers = sorted({fact.answer for fact in found})
        answer = answers[int(rng.integers(len(answers)))]
        found = [fact for fact in found if fact.answer == answer]
    fact = pick(rng, found)
    if kind in ("which_first", "which_last", "before", "after") and rng.random() < 0.6:
        # Events close in time are the hard ones, so take the closest of three pairs.
        rivals = [fact, pick(rng, found), pick(rng, found)]
        fact = min(
            rivals, key=lambda f: abs(events[f.evidence[0]].start_s - events[f.evidence[1]].start_s)
        )
    text = phrase(rng, kind, fact, (phrasing or {}).get(kind))
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    return Asked(kind, fact, text)


def _hidden(
    rng: np.random.Generator, lit: NDArray[np.bool_], onset: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Mark the tokens `[B, 9K]` that the question sees: evidence (sometimes thinned), the last two
    steps, others.
    """
    B, K, _ = lit.shape
    rate = rng.uniform(0.1, 0.95)
    last = np.zeros((B, K, 1), np.bool_)
    last[:, -2:] = True
    whole_steps = rng.random() < 0.5
    evidence = lit.any(2, keepdims=True) if whole_steps else lit
    if rng.random() < 0.35:
        thin = (rng.random((B, K, 1)) < 0.5) & ~onset[:, :, None]
        evidence = evidence & ~thin
    others = rng.random((B, K, 1 if whole_steps else TOKENS)) >= rate
    return np.broadcast_to(evidence | last | others, lit.shape).reshape(B, -1)


def make_batch(
    rng: np.random.Generator, composer: Composer, stage: Stage, progress: float
) -> Batch:
    """Make the next batch at the fraction `progress` of a stage."""
    span, kept = stage.spans[int(rng.integers(len(stage.spans)))]
    Q = stage.questions
    B = int(
        np.clip(
            round(stage.tokens / (N_PREFIX + TOKENS * kept + Q * QUESTION_TOKENS)), 1, LARGEST_BATCH
        )
    )
    weights = drift(stage.weights, stage.weights_end, progress)
    types = [t for t in TEMPLATES if t in weights and (span > 2 or t not in _NEEDS_TIME)]
    share = share_of(types, weights)

    videos: list[Video] = []
    ids = np.zeros((B, Q, QUESTION_TOKENS), np.int64)
    labels = np.full(ids.shape, IGNORED, np.int64)
    asked: list[str] = []
    for b in range(B):
        video = composer.compose(rng, stage, span, kept)
        videos.append(video)
        for q in range(Q):
            find = partial(find_facts, events=video.events, ask_s=span)
            kind, fact, text = draw_question(rng, types, share, find, video.events, stage.phrasing)
            write_question(ids[b, q], labels[b, q], text, fact.answer)
            asked.append(kind)
    times = np.stack([v.times for v in videos])
    lit = np.stack([v.lit for v in videos])
    onset = np.stack([v.onset for v in videos])
    shift = rng.integers(0, LONGEST_SHIFT, B) * (rng.random(B) < stage.shift)

    window = None
    far = None
    seen = None
    way = rng.random()
    if way < stage.window + stage.far and span > 1:
        window = int(rng.integers(2, stage.longest_window + 1))
        if way < stage.far:
            some = rng.random((B, kept, 1)) < rng.uniform(0.05, 0.9)
            some = some & (rng.random(lit.shape) < (1.0 if rng.random() < 0.5 else 0.5))
            evidence = lit & (rng.random((B, kept, 1)) < 0.85)
            far = torch.from_numpy((some | evidence).reshape(B, -1))
    if rng.random() < stage.drop:
        seen = torch.from_numpy(np.array(_hidden(rng, lit, onset)))
    rows = torch.from_numpy(np.concatenate([v.rows for v in videos]))
    features = composer.bank.features[rows].view(B, kept * TOKENS, -1)
    tokens = show_whole_steps(
        features,
        torch.from_numpy(times + shift[:, None]),
        torch.from_numpy(shift + span),
        window=window,
        far=far,
        seen=seen,
    )
    return Batch(tokens, torch.from_numpy(ids), torch.from_numpy(labels), asked)
