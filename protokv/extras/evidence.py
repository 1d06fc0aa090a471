"""What an answer stood on: the times of the stream that the model read when it chose the answer's first word.

The attention of the last token of the prompt is made again in the layers that read memory, and what it gives to each
slot is put down to the step at which the slot's anchor stands. A pseudo-token that stands for n tokens speaks of its
anchor's time with one n-th of what it gets: the rest is of tokens from anywhere in the past.

What it is worth was measured on the embedded model (`samples/studies/evidence/`). Which layers read memory is the
backbone's to say (`Backbone.reading_layers`); where nobody has measured it all layers are averaged, and a low share
says nothing.
Knows no memory and no command line.

How much of what a token reads comes from each slot: the weights of its attention, which the kernels do not return.

Made again from queries, keys and bias, for the tokens and layers that somebody asks about; attention itself is as it
was. The same as `plain.weights`, up to the order of sums, for one token and the mean of a group of heads. Knows nothing
of stream time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protokv.backbones.base import Backbone
from protokv.core.attention import LocalKV
from protokv.core.context import EMPTY, RecordedContext, Segment
from protokv.core.records import StreamClock
from protokv.core.rotary import rotate

NOTICED: Final = 0.02
"""Share of attention from which a step is named."""
FAINT: Final = 0.05
"""Share of the strongest moment below which what was asked may no longer be in memory. Fitted on development worlds,
where 71 % of the wrong answers and 15 % of the right ones lay below (n = 101 and 184)."""
MOST_MOMENTS: Final = 3


@dataclass(frozen=True, slots=True)
class Moment:
    """Steps that follow each other, with at most one between two of them that is not named.

    Attributes:
        start_s, end_s: stream time, from the start of the first step to the end of the last.
        share: of attention, in [0, 1].
    """

    start_s: float
    end_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """The moments that an answer stood on.

    Attributes:
        moments: the strongest first, at most three; none where no step stands out.
        measured: whether a low share says anything about this model.
    """

    moments: tuple[Moment, ...]
    measured: bool

    @property
    def faint(self) -> bool | None:
        """Whether what was asked may no longer be in memory; None: nobody has measured it for this model."""
        if not self.measured:
            return None
        return not self.moments or self.moments[0].share < FAINT


def find_evidence(
    backbone: Backbone,
    context: RecordedContext,
    tail: LocalKV,
    clock: StreamClock,
    afresh: Tensor | None = None,
) -> Evidence | None:
    """What the last token that was forwarded read.

    Args:
        backbone: the model.
        context: what it read of memory, and the queries `[Hq, T, D]` of each layer.
        tail: what it read besides.
        clock: where the stream stands.
        afresh: stream positions `[R, P]` of the first tokens of the tail, where these are steps of the stream.

    Returns:
        None: the context does not know where its slots stand in the stream.
    """
    layers = range(backbone.layers) if backbone.reading_layers is None else backbone.reading_layers
    prefix = len(backbone.prefix_ids)
    steps, read = [], []
    for layer in layers:
        query, places = context.queries[layer], context.shown.places(layer)
        if places is None:
            return None
        segments = context.shown.at(layer, query)
        given, to_tail = shares(query[:, -1], segments, tail.read(layer)[0], backbone.head_size**-0.5)
        bias = torch.cat([segment.bias for segment in segments], 1)
        given = torch.where(bias > EMPTY, given / bias.clamp(min=0.0).exp(), 0.0)
        # The prompt prefix stands before the stream.
        found = [(places[:, prefix:], given[:, prefix:])]
        if afresh is not None:
            found.append((afresh.expand(len(given), *afresh.shape), to_tail[:, : len(afresh)]))
        for where, share in found:
            times = backbone.times_of(where, clock)
            steps.append((times / clock.step_seconds + 1e-6).floor().long().cpu().flatten())
            read.append(share.double().cpu().flatten() / (len(given) * len(layers)))
    by_step: dict[int, float] = {}
    for step, share in zip(torch.cat(steps).tolist(), torch.cat(read).tolist(), strict=True):
        by_step[step] = by_step.get(step, 0.0) + share
    return Evidence(find_moments(by_step, clock.step_seconds), backbone.reading_layers is not None)


def find_moments(by_step: Mapping[int, float], step_seconds: float) -> tuple[Moment, ...]:
    """Join the steps whose share is `NOTICED` or more to moments; the strongest of these, the earlier first if equal.

    A step between two that are named counts with them.
    """
    runs: list[list[int]] = []
    for step in sorted(step for step, share in by_step.items() if share >= NOTICED):
        if runs and step - runs[-1][-1] <= 2:
            runs[-1].append(step)
        else:
            runs.append([step])
    found = [
        Moment(
            run[0] * step_seconds,
            (run[-1] + 1) * step_seconds,
            sum(by_step.get(step, 0.0) for step in range(run[0], run[-1] + 1)),
        )
        for run in runs
    ]
    return tuple(sorted(found, key=lambda moment: -moment.share)[:MOST_MOMENTS])


def shares(query: Tensor, segments: Sequence[Segment], tail_keys: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """What the last token of the tail reads from where, the mean over the query heads of a KV head.

    Args:
        query: `[Hq, D]`, rotated.
        segments: what the layer read of a context, `N` slots together.
        tail_keys: `[H, n, D]`, all of which the token sees.
        scaling: the factor on the logits.

    Returns:
        `[H, N]` of the slots and `[H, n]` of the tail, float32; together they sum to 1 in each head.
    """
    H, _, D = tail_keys.shape
    asked = query.float() * scaling
    parts = []
    for segment in segments:
        turned = asked if segment.turn is None else rotate(asked, *segment.turn)
        logits = torch.matmul(turned.view(H, -1, D), segment.keys.float().transpose(1, 2))
        parts.append(logits + segment.bias[:, None])
    parts.append(torch.matmul(asked.view(H, -1, D), tail_keys.float().transpose(1, 2)))
    # Merged as attention over disjoint sets is: each by its own sum of exponentials.
    total = torch.stack([part.logsumexp(-1) for part in parts if part.shape[-1]], -1).logsumexp(-1, keepdim=True)
    *slots, tail = [(part - total).exp().mean(1) for part in parts]
    return torch.cat([tail[:, :0], *slots], 1), tail
