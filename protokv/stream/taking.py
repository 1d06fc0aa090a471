"""Steps of sessions of one model, taken together: one forward for the tokens of all.

Everything in a decoder but attention works on each token by itself. So the tokens of some streams
stand one after the other, each at its own position, and attention splits them: a token reads the
context and the tokens of its own stream. States are those one by one, up to the order of sums.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from protokv.core.attention import TokenCache
from protokv.core.parts import PositionedStep
from protokv.core.step import StepTokens
from protokv.device.arrays import KeysValues, concat_rows
from protokv.device.runs import Runs
from protokv.stream.asking import AskedStream
from protokv.stream.joining import forward_caches, split_batch
from protokv.timings import share_stage

MOST_STREAMS = 8
"""Streams in one forward: transformers makes a mask of all tokens beside all."""

ForwardedSteps = tuple[Tensor, Tensor, TokenCache]
"""Keys and values `[L, H, T, D]` of the steps of a session, at stream positions, and the settled
cache that forwarded them."""


class StepTaker(AskedStream):
    """A stream that takes embedded steps."""

    runs: Runs  # captures its forwards

    @property
    def weights(self) -> Hashable:
        """A key that is equal for sessions whose models differ in the system prompt alone."""
        return self.backbone.runs or self.backbone

    def take(self, steps: Sequence[StepTokens], starts_s: Sequence[float]) -> None:
        """Take embedded steps, which sessions of one backbone may share."""
        for error in take_together([DueSteps(self, steps, starts_s)]).values():
            raise error

    @abstractmethod
    def position_steps(
        self, steps: Sequence[StepTokens], starts_s: Sequence[float]
    ) -> list[PositionedStep]:
        """Give steps their positions."""


@dataclass(frozen=True, slots=True, eq=False)
class DueSteps:
    """Embedded steps that a session is to take, and their stream times."""

    session: StepTaker
    steps: Sequence[StepTokens]
    starts_s: Sequence[float]

    def split(self) -> list[DueSteps]:
        """Return what goes through the model at once: all, or one step after the other."""
        if not self.session.memory.one_by_one:
            return [self]
        each = zip(self.steps, self.starts_s, strict=True)
        return [DueSteps(self.session, [step], [start_s]) for step, start_s in each]


@torch.inference_mode()
def take_together(due: Sequence[DueSteps], most: int = MOST_STREAMS) -> dict[StepTaker, Exception]:
    """Let different sessions take steps; return why some have not. Steps that join others
    (`Backbone.joins`) go through their model together, at most so many, the others alone.
    """
    failed: dict[StepTaker, Exception] = {}
    for pieces in zip_longest(*(one.split() for one in due)):
        batches = dict[Hashable, list[DueSteps]]()
        for one in pieces:
            if one is not None and (session := one.session) not in failed:
                joins = len(due) > 1 and session.backbone.joins
                batches.setdefault(session.weights if joins else session, []).append(one)
        for batch in batches.values():
            alone = len(batch) == 1
            parts = [batch] if alone else split_batch(batch, batch[0].session.backbone, most)
            for part in parts:
                _take_batch(part, failed)
    for one in due:
        one.session._note_runs()
    return failed


def _take_batch(due: Sequence[DueSteps], failed: dict[StepTaker, Exception]) -> None:
    def attempt(stage: str, call: Callable[..., Any], *given: Any, by: Sequence[StepTaker]) -> Any:
        """Return what a call returns, and count its time; if it raises, that is why these fail."""
        timings = [one.timings for one in by if one.timings is not None]
        try:
            with share_stage(timings, stage) if timings else nullcontext():
                return call(*given)
        except Exception as error:
            failed.update(dict.fromkeys(by, error))

    placed: dict[StepTaker, list[PositionedStep]] = {}
    for one in due:
        session = one.session
        found = attempt("memory", session.position_steps, one.steps, one.starts_s, by=[session])
        if found is not None:
            placed[session] = found
    forwarded = attempt("forward", forward_steps, placed, by=[*placed]) if placed else None
    for session, (keys, values, cache) in zip(placed, forwarded or (), strict=False):
        attempt("memory", session.commit, placed[session], keys, values, cache, by=[session])


def forward_steps(placed: dict[StepTaker, list[PositionedStep]]) -> list[ForwardedSteps]:
    """Forward steps of sessions of one model; all in `torch.inference_mode()`.

    The steps of one session are captured as a whole where a device can; those of several are
    captured around attention (`joining`). At compact positions a session shows its memory and its
    steps elsewhere than in the stream: the new keys are rotated back from there.
    """
    first = next(iter(placed))
    tokens = [step.tokens for steps in placed.values() for step in steps]
    sizes = tuple((len(one.embeddings), one.grid, repr(one.visual)) for one in tokens)
    deep = [one.deepstack for one in tokens if one.deepstack is not None]
    each = [[step.positions for step in steps] for steps in placed.values()]
    embeddings, *lines = map(concat_rows, ([one.embeddings for one in tokens], *each))

    def forward(cache: TokenCache, given: Sequence[Tensor]) -> Tensor:
        positions, embeddings, *deep = given
        fed = tokens
        if deep:
            fed = [replace(one, deepstack=own) for one, own in zip(tokens, deep, strict=True)]
        return first.backbone.forward(embeddings, positions, cache, steps=fed)

    def run(line: Tensor, *given: Tensor) -> ForwardedSteps:
        cache, positions = _begin(first, line)
        forward(cache, [positions, *given])
        found = cache.read_all()
        cache.settle()
        return _end(first, cache, found)

    if len(placed) == 1:
        memory = first.memory.context_key
        key = None if memory is None else (sizes, first.cache.key, memory)
        return [first.runs.run("forward", key, run, *lines, embeddings, *deep)]
    caches, positions = zip(*map(_begin, placed, lines), strict=True)
    given = [torch.cat(positions), embeddings, *deep]
    counts = [len(line) for line in lines]
    found = forward_caches(first.backbone, sizes, caches, counts, forward, given)
    return list(map(_end, placed, caches, found))


def _begin(session: StepTaker, line: Tensor) -> tuple[TokenCache, Tensor]:
    """Return a cache to forward tokens with, and their positions for the model, given those in the
    stream, `[T, P]`.
    """
    placement = session.placement
    # The end of the stream says where text begins, and nothing of steps. So a capture may have an
    # old one.
    context = placement.place(session.memory.context(), session.clock.next_position)
    cache = session.cache.fork(context)
    cache.queries = [] if session.memory.reads_queries else None
    return cache, placement.forward_positions(line, context)


def _end(session: StepTaker, cache: TokenCache, found: KeysValues) -> ForwardedSteps:
    """Return keys and values `[L, H, T, D]`, moved to stream positions, and the settled cache."""
    keys, values = found
    place = session.placement.stream_keys
    if cache.queries:
        queries = torch.stack([query.to(keys.device) for query in cache.queries])
        cache.queries = [*place(queries, cache.context)]
    return place(keys, cache.context), values, cache
