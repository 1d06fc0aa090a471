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

from protokv.core.attention import ContextReaders, TokenCache
from protokv.core.parts import PositionedStep
from protokv.core.step import StepTokens
from protokv.device.arrays import concat_rows
from protokv.device.runs import Runs
from protokv.stream.asking import AskedStream
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
    def joins_steps(self) -> bool:
        """Whether its steps join others: no neighbours mix in its model, nothing is captured."""
        return self.backbone.joins and bool(self.runs.why_not)

    @property
    def weights(self) -> Hashable:
        """What is one for sessions whose models differ in the system prompt alone."""
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
    (`StepTaker.joins_steps`) go through their model together, at most so many, the others alone.
    """
    failed: dict[StepTaker, Exception] = {}
    for pieces in zip_longest(*(one.split() for one in due)):
        batches = dict[Hashable, list[DueSteps]]()
        for one in pieces:
            if one is not None and (session := one.session) not in failed:
                joins = len(due) > 1 and session.joins_steps
                batches.setdefault(session.weights if joins else session, []).append(one)
        for batch in batches.values():
            for start in range(0, len(batch), most):
                _take_batch(batch[start : start + most], failed)
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
    for session, own in zip(placed, forwarded or (), strict=False):
        attempt("memory", session.commit, placed[session], *own, by=[session])


def forward_steps(placed: dict[StepTaker, list[PositionedStep]]) -> list[ForwardedSteps]:
    """Forward steps of sessions of one model; all in `torch.inference_mode()`."""
    first = next(iter(placed))
    tokens = [step.tokens for steps in placed.values() for step in steps]

    def run(positions: Tensor, embeddings: Tensor, *deep: Tensor) -> list[ForwardedSteps]:
        parts: list[tuple[StepTaker, slice, TokenCache]] = []
        shown = list[Tensor]()
        start = 0
        for session, steps in placed.items():
            own = slice(start, start := start + sum(len(step.positions) for step in steps))
            context = session.placement.place(session.memory.context(), session.clock.next_position)
            cache = session.cache.fork(context)
            cache.queries = [] if session.memory.reads_queries else None
            shown.append(session.placement.forward_positions(positions[own], context))
            parts.append((session, own, cache))
        fed = tokens
        if deep:
            fed = [replace(one, deepstack=own) for one, own in zip(tokens, deep, strict=True)]
        whole = parts[0][2]
        where = shown[0]
        if len(parts) > 1:
            whole = whole.fork()
            whole.readers = [ContextReaders(one.context, own, local=own) for _, own, one in parts]
            whole.queries = None if all(one.queries is None for *_, one in parts) else []
            where = torch.cat(shown)
        first.backbone.forward(embeddings, where, whole, steps=fed)
        keys, values = whole.read_all()
        found: list[ForwardedSteps] = []
        for session, own, cache in parts:
            cache.settle() if cache is whole else cache.take(cache, own.stop - own.start)
            place = session.placement.stream_keys
            if cache.queries is not None and whole.queries:
                queries = torch.stack([query[:, own].to(keys.device) for query in whole.queries])
                cache.queries = [*place(queries, cache.context)]
            found.append((place(keys[:, :, own], cache.context), values[:, :, own], cache))
        return found

    deep = [one.deepstack for one in tokens if one.deepstack is not None]
    positions = [step.positions for steps in placed.values() for step in steps]
    given = map(concat_rows, (positions, [one.embeddings for one in tokens]))
    sizes = tuple((len(one.embeddings), one.grid, repr(one.visual)) for one in tokens)
    memory = first.memory.context_key
    # A capture reads the slots of one session, so those that are captured do not join.
    key = None if memory is None or len(placed) > 1 else (sizes, first.cache.key, memory)
    found: list[ForwardedSteps] = first.runs.run("forward", key, run, *given, *deep)
    return found
