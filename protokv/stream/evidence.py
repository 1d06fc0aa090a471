"""Evidence: the times of the stream that the model read for the first word of an answer.

The attention of the last token of the question is computed again in the layers that read memory
(`Backbone.reading_layers`; without them all are averaged, and a low share says nothing). The share
of each slot is credited to the step at which its anchor stands, one n-th of it where the slot
stands for n tokens: the rest is of tokens from anywhere in the past. `samples/studies/evidence/`
measures how good this is on the embedded model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protokv.core.context import EMPTY_BIAS, KVSegment
from protokv.core.parts import SessionView, TranscriptAttachment, Utterance
from protokv.core.rotary import rotate
from protokv.errors import ConfigError
from protokv.stream.reading import QuestionLogits

LEAST_EVIDENCE_SHARE = 0.05
"""Share of the strongest span below which the evidence may no longer be in memory. Fitted on
development worlds, where 71 % of the wrong answers and 15 % of the right ones lay below (n = 101
and 184)."""
LEAST_STEP_SHARE = 0.02  # share of attention from which a step is named
_MOST_SPANS = 3
_MOST_SAID = 8  # steps of a span whose words are told


@dataclass(frozen=True, slots=True)
class EvidenceSpan:
    """Consecutive steps that each stand out; single steps between two of them are included."""

    start_s: float  # stream time at the start of the first step
    end_s: float  # and at the end of the last
    share: float  # of attention, in [0, 1]
    # what was said meanwhile, in order; of much, what has the greatest shares
    words: tuple[Utterance, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """The spans that an answer stands on."""

    # the strongest first, at most three; none where no step stands out
    spans: tuple[EvidenceSpan, ...]
    measured: bool  # True if a low share says anything about this model

    @property
    def faint(self) -> bool | None:
        """True if the evidence may no longer be in memory; None: not measured for this model."""
        if not self.measured:
            return None
        return not self.spans or self.spans[0].share < LEAST_EVIDENCE_SHARE


@torch.inference_mode()
def find_evidence(session: SessionView, reading: QuestionLogits) -> Evidence:
    """Return the spans that the last token of a recorded question read. ConfigError: the memory
    cannot tell places.
    """
    if session.outside:
        raise ConfigError(
            "a protokv.Cache placed the tokens of this state, at positions that tell no time",
            hint="ask without evidence",
        )
    backbone = session.backbone
    clock = session.clock
    context = reading.cache.context
    # Tokens of the answer need not be recorded.
    queries = reading.cache.queries
    reading.cache.queries = None
    assert queries is not None
    layers = range(backbone.layers) if backbone.reading_layers is None else backbone.reading_layers
    prefix = session.sink_tokens
    prelude = reading.prelude
    transcript = session.transcript
    breaks = None if transcript is None else transcript.breaks()
    by_step = Counter[int]()
    for layer in layers:
        query = queries[layer]
        positions = context.positions_at(layer)
        if positions is None:
            name = session.config.name
            raise ConfigError(
                f"{name} does not tell what an answer stood on", hint="ask without evidence"
            )
        segments = context.at(layer, query)
        local_keys, _ = reading.cache.memory_layers[layer].read()
        local_keys = reading.cache.to_halves(local_keys)
        to_slots, to_local = measure_attention_weights(
            query[:, -1], segments, local_keys, backbone.head_size**-0.5
        )
        bias = torch.cat([segment.bias for segment in segments], 1)
        to_slots = torch.where(bias > EMPTY_BIAS, to_slots / bias.clamp(min=0.0).exp(), 0.0)
        # the prompt prefix stands before the stream
        read = [(positions[:, prefix:], to_slots[:, prefix:])]
        if len(prelude):
            again = prelude.expand(len(to_slots), *prelude.shape)
            read.append((again, to_local[:, : len(prelude)]))
        for where, weights in read:
            times = backbone.stream_times(where, clock, breaks, prefix)
            steps = (times / clock.step_seconds + 1e-6).floor().long().flatten().tolist()
            shares = weights.double().flatten() / (len(to_slots) * len(layers))
            for step, share in zip(steps, shares.tolist(), strict=True):
                by_step[step] += share
    spans = find_evidence_spans(by_step, clock.step_seconds)
    if transcript is not None:
        spans = tuple(replace(one, words=_words(transcript, one, by_step)) for one in spans)
    return Evidence(spans, backbone.reading_layers is not None)


def _words(
    transcript: TranscriptAttachment,
    span: EvidenceSpan,
    by_step: Mapping[int, float],
) -> tuple[Utterance, ...]:
    # A step next to the span touches it, give or take a rounding.
    lines = transcript.between(span.start_s + 1e-6, span.end_s - 1e-6)
    most = sorted(lines, key=lambda line: -by_step.get(line.step, 0.0))[:_MOST_SAID]
    return tuple(sorted(most, key=lambda line: line.start_s))


def find_evidence_spans(
    by_step: Mapping[int, float], step_seconds: float
) -> tuple[EvidenceSpan, ...]:
    """Join steps whose share is `LEAST_STEP_SHARE`, and a single one between two, to spans,
    strongest first.
    """
    runs: list[tuple[int, int]] = []
    for step in sorted(step for step, share in by_step.items() if share >= LEAST_STEP_SHARE):
        is_near = runs and step - runs[-1][1] <= 2
        runs.append((runs.pop()[0] if is_near else step, step))
    found = []
    for first, last in runs:
        share = sum(by_step.get(step, 0.0) for step in range(first, last + 1))
        found.append(EvidenceSpan(first * step_seconds, (last + 1) * step_seconds, share))
    return tuple(sorted(found, key=lambda span: -span.share)[:_MOST_SPANS])


def measure_attention_weights(
    query: Tensor, segments: Sequence[KVSegment], local_keys: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the attention weights of the last token `[Hq, D]`, rotated, the mean over the query
    heads of a KV head.

    They are `[H, N]` of the `N` slots of all segments and `[H, n]` of the local tokens, whose keys
    are `[H, n, D]` and all of which it sees: float32, together 1 in each head.
    """
    H, _, D = local_keys.shape
    asked = query.float() * scaling
    logits = [asked.view(H, -1, D) @ local_keys.float().transpose(1, 2)]
    for segment in segments:
        turn = segment.query_rotation
        rotated = asked if turn is None else rotate(asked, turn)
        keys = segment.keys[..., :D].float().transpose(1, 2)
        logits.append(rotated.view(H, -1, D) @ keys + segment.bias[:, None])
    weights = torch.cat(logits, -1).softmax(-1).mean(1)
    n = local_keys.shape[1]
    return weights[:, n:], weights[:, :n]
