"""Pictures of sessions of one model, watched together: one pass of the vision tower, one forward.

A tower sees each step by itself, so steps of several streams go through it as a chunk of one stream
does. Pictures that share a pass have one size: every family sees them alike, and few passes differ.
States are those one by one, up to the order of sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from protokv.core.backbone import PreparedStep
from protokv.core.step import StepTokens
from protokv.stream.joining import split_batch
from protokv.stream.taking import MOST_STREAMS, DueSteps, StepTaker, take_together
from protokv.timings import time_stage


class PictureTaker(StepTaker):
    """A stream that takes prepared pictures."""

    # The last picture of a single step or of a chunk that shows no other, and its tokens.
    still: tuple[PreparedStep, StepTokens] | None = None

    def watch_prepared(
        self,
        steps: Sequence[PreparedStep],
        starts_s: Sequence[float],
        words: Sequence[Sequence[str]] = (),
    ) -> None:
        """Take consecutive steps, prepared already, at their stream times, with words of each.

        Several steps are a chunk: one forward of the vision tower, and one of the language model.
        Each attends to the memory before the chunk, to the earlier steps of it exactly, and to
        itself; the memory takes them one by one. Before an eviction this equals single steps.
        """
        self.take(self.embed_prepared(steps, starts_s, words), starts_s)

    def embed_prepared(
        self,
        steps: Sequence[PreparedStep],
        starts_s: Sequence[float],
        words: Sequence[Sequence[str]] = (),
    ) -> list[StepTokens]:
        """Return these steps for `take`. A picture that stays goes through the vision tower once.

        It is used again only if no other of its stream went with it, so that a stream that is
        continued from a state goes on to the same bytes.
        """
        with time_stage(self.timings, "vision tower"), torch.inference_mode():
            times_s = [self.clock.mean_time(start_s) for start_s in starts_s]
            first = steps[0]
            if all(one.shows_the_same(first) for one in steps[1:]):
                seen = self.find_seen(first)
                if seen is None:
                    (seen,) = self.backbone.embed_steps([first], times_s[:1])
                    self.still = first, seen
                tokens = [self.backbone.retime(seen, time_s) for time_s in times_s]
            else:
                self.still = None
                tokens = self.backbone.embed_steps(steps, times_s)
            return list(map(self.backbone.add_words, tokens, words)) if any(words) else tokens

    def find_seen(self, step: PreparedStep) -> StepTokens | None:
        """Return the tokens of a step that shows `still`; None: it shows another picture."""
        if self.still is None or not self.still[0].shows_the_same(step):
            return None
        return self.still[1]


@dataclass(eq=False, slots=True)
class StepsToWatch:
    """Prepared steps that a session is to watch, their stream times, and the words of each."""

    session: PictureTaker
    steps: Sequence[PreparedStep]
    starts_s: Sequence[float]
    words: Sequence[Sequence[str]] = ()
    error: Exception | None = None  # why they were not watched


def watch_together(due: Sequence[StepsToWatch]) -> None:
    """Watch steps of different sessions: what they show in `see_together`, the rest in
    `take_together`.
    """
    see_together(due)
    embedded = list[DueSteps]()
    for one in due:
        try:
            tokens = one.session.embed_prepared(one.steps, one.starts_s, one.words)
            embedded.append(DueSteps(one.session, tokens, one.starts_s))
        except Exception as error:
            one.error = error
    failed = take_together(embedded)
    for one in due:
        one.error = one.error or failed.get(one.session)


@torch.inference_mode()
def see_together(due: Sequence[StepsToWatch]) -> None:
    """Let single steps of one model and size go through its vision tower at once. Their sessions
    hold what it saw; where it fails, each has to see its own alone.
    """
    alike = defaultdict[Hashable, list[StepsToWatch]](list)
    for one in due:
        first, *others = one.steps
        if not others and one.session.find_seen(first) is None:
            alike[one.session.weights, first.grid].append(one)
    batches = [
        batch
        for some in alike.values()
        for batch in split_batch(some, some[0].session.backbone, MOST_STREAMS)
        if len(batch) > 1
    ]
    for batch in batches:
        steps = [one.steps[0] for one in batch]
        times_s = [one.session.clock.mean_time(one.starts_s[0]) for one in batch]
        with suppress(Exception):
            seen = batch[0].session.backbone.embed_steps(steps, times_s)
            for one, tokens in zip(batch, seen, strict=True):
                one.session.still = one.steps[0], tokens
