"""Ask a stream: read the question, then generate an answer, or choose among some texts.

A question is forwarded after everything seen, with a fork of the stream's layers: it attends to the
memory and to itself, and is dropped. So asking changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from protokv.core.backbone import Backbone, ChatTurn
from protokv.core.context import CachedContext, Context
from protokv.core.decoding import (
    Decoding,
    Detokenizer,
    FinishReason,
    TokenSampler,
    is_looping,
)
from protokv.core.parts import TokenPlacement, TranscriptAttachment
from protokv.core.recent import RecentSteps
from protokv.core.step import StreamClock
from protokv.stream.answer import Answer
from protokv.stream.evidence import Evidence, find_evidence
from protokv.stream.guide import JsonGuide
from protokv.stream.promise import PromiseRule
from protokv.stream.reading import QuestionForwarder, QuestionLogits
from protokv.stream.stream import Stream
from protokv.timings import Timings


class AskedStream(Stream):
    """A stream that answers questions."""

    timings: Timings | None = None  # where to add up seconds by stage
    backbone: Backbone
    placement: TokenPlacement
    recent: RecentSteps
    words_end: StreamClock | None  # where the stream stood after the last step with words
    _reader: QuestionForwarder

    @property
    def transcript(self) -> TranscriptAttachment | None:
        """The attachment that keeps what was said; None: there is none."""
        found = (one for one in self.attachments if isinstance(one, TranscriptAttachment))
        return next(found, None)

    def prefill(self, question: str | list[int]) -> Tensor:
        """Return the logits `[n, vocabulary]` float32 of the tokens after the video, from which
        `ask` answers.
        """
        return self.read_question(question, whole=True).logits

    def ask(self, question: str, decoding: Decoding | None = None, **how: Any) -> Answer:
        """Return the whole answer at once; `how` are the keywords of `stream`: evidence, turns,
        system, promise.
        """
        pieces = self.stream(question, decoding, **how)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def choose(self, question: str, choices: Sequence[str], **how: Any) -> Answer:
        """Answer with one of some texts: the one whose first token is likeliest. One forward;
        nothing is generated.

        `Answer.mean_logprob` is that of the chosen one among all that the model could say. `how`
        and errors: `stream`.
        """
        return self.ask(question, Decoding(choices=tuple(choices)), **how)

    def stream(
        self,
        question: str,
        decoding: Decoding | None = None,
        *,
        evidence: bool = False,
        turns: Sequence[ChatTurn] = (),
        system: str | None = None,
        promise: PromiseRule | None = None,
    ) -> Generator[str, None, Answer]:
        """Answer from memory alone, piece by piece. Changes nothing; the generator returns the
        `Answer`.

        It reads the memory in place, so let it end before the next `watch`. Without `decoding`,
        tokens are chosen as the model was published to. With `evidence` the answer names the stream
        times that it stands on. `turns` are earlier questions with their answers, and `system`
        stands in front of the question. A `promise` needs the evidence, waits for the whole answer,
        and may withhold it.

        Raises:
            QuestionError: a text is empty, longer than `_MOST_QUESTION_TOKENS`, or contains control
                tokens.
            ConfigError: evidence is wanted and the memory does not know the positions of its slots.
        """
        if promise is not None:
            pieces = self.stream(question, decoding, evidence=True, turns=turns, system=system)
            return (yield from promise.hold_back(pieces, self))
        decoding = decoding or self.backbone.decoding
        firsts = self.backbone.choice_ids(decoding.choices)
        began = time.perf_counter()
        ids, kept = self.backbone.question_ids(question, turns, system)
        reading = self.read_question(ids, record=evidence, answer_tokens=decoding.max_new_tokens)
        found = self._find_evidence(ids, reading) if evidence else None
        stream_s = self.clock.stream_time_s
        answer = Answer(question, stream_time_s=stream_s, evidence=found, turns=kept)
        if firsts:
            likely = reading.logits[-1].log_softmax(-1)
            each = torch.stack([likely[own].logsumexp(0) for own in firsts])
            answer = choose_text(answer, decoding.choices, each.cpu())
            yield answer.text
            first_at = time.perf_counter()
        else:
            # Penalties count the text before and after the video; -1 stands for the video between
            # the two.
            prompt = [*self.backbone.prefix_ids, -1, *ids]
            guide = JsonGuide(self.backbone, decoding.schema) if decoding.schema else None
            sample = TokenSampler(decoding, self.backbone.device, prompt, guide)
            tokens = self._draw_tokens(reading, sample)
            answer, first_at = yield from write_answer(answer, tokens, self.backbone, decoding)
            top = decoding.top_logprobs
            chances = None if top is None else sample.read_chances()[: answer.tokens]
            answer = replace(answer, mean_logprob=sample.mean_logprob(), chances=chances)
        self._note_runs()
        # This waits for the device, so it comes after the last token.
        visible = reading.cache.context.visible_tokens()
        return replace(
            answer,
            ttft_ms=(first_at - began) * 1e3,
            total_ms=(time.perf_counter() - began) * 1e3,
            context_tokens=visible + len(reading.prelude),
        )

    def _find_evidence(self, ids: list[int], reading: QuestionLogits) -> Evidence:
        if reading.cache.queries is None:
            # A call that was replayed recorded nothing.
            reading = self.read_question(ids, record=True)
        return find_evidence(self, reading)

    def _draw_tokens(self, reading: QuestionLogits, sample: TokenSampler) -> Iterator[int]:
        """Yield the tokens that follow a question, each when it is asked for."""
        chosen = sample(reading.logits[-1])
        for index in count():
            yield sample.fetch(chosen)
            with torch.inference_mode():
                chosen = sample(self._reader.decode(reading, chosen, index))

    def _note_runs(self) -> None:
        """Add to the timings how calls were run."""

    @torch.inference_mode()
    def read_question(
        self,
        question: str | list[int],
        *,
        whole: bool = False,
        record: bool = False,
        answer_tokens: int | None = None,
    ) -> QuestionLogits:
        """Forward a question, or token ids as they are, after the memory.

        The logits are those of the last token, or of the `whole` question, which may take
        gigabytes. With room for so many `answer_tokens` it is captured where that can be. Else,
        with `record`, the cache keeps the queries that read the context, for `find_evidence`.
        """
        backbone = self.backbone
        placement = self.placement
        ids = backbone.question_ids(question)[0] if isinstance(question, str) else question
        prelude = self.recent.steps
        if answer_tokens is not None:
            differs = bool(prelude) or self.clock == self.words_end
            reading = self._reader.read(self, ids, answer_tokens, differs=differs)
            if reading is not None:
                return reading
        ids, context, start = self.aim(ids)
        cache = self.cache.fork(CachedContext(context))
        again = backbone.text_positions(0, 0)
        if prelude:
            steps = [tokens for tokens, _ in prelude]
            again = torch.cat([where for _, where in prelude])
            shown = placement.forward_positions(again, context)
            embedded = torch.cat([one.embeddings for one in steps])
            backbone.forward(embedded, shown, cache, steps=steps)
            start = max(start, int(shown.max()) + 1)
        cache.queries = [] if record else None
        where = backbone.text_positions(start, len(ids))
        hidden = backbone.forward(backbone.embed_text(ids), where, cache)
        logits = backbone.logits(hidden if whole else hidden[-1:])
        return QuestionLogits(logits, cache, start + len(ids), again)

    def aim(self, ids: list[int]) -> tuple[list[int], Context, int]:
        """Return the ids of a question as they are forwarded, what they attend to, and the position
        of the first one.
        """
        context = self.recent.hide(self.memory.recall())
        clock = self.clock
        ends_with_words = self.clock == self.words_end
        if ends_with_words and not self.memory.retrieves and not self.recent.steps:
            ids, context, clock = self.backbone.after_words(ids, context, clock)
        context = self.placement.place(context, clock.next_position)
        return ids, context, self.placement.text_start(context, clock)


def write_answer(
    answer: Answer, tokens: Iterator[int], backbone: Backbone, decoding: Decoding
) -> Generator[str, None, tuple[Answer, float]]:
    """Make text of tokens, and yield it as it comes; return the answer, and when its first token
    was there.
    """
    text = Detokenizer(backbone.decode, decoding.stop)
    first_at = 0.0
    pieces = []
    ids = list[int]()
    finish_reason: FinishReason = "stop"
    for token in tokens:
        first_at = first_at or time.perf_counter()
        if token in backbone.stop_ids:
            break
        ids.append(token)
        if piece := text.push(token):
            pieces.append(piece)
            yield piece
        if text.stopped:
            break
        if len(ids) == decoding.max_new_tokens:
            finish_reason = "length"
            break
        # Greedy decoding repeats for ever once it repeats; a drawn answer may leave the loop.
        if decoding.temperature == 0 and is_looping(ids):
            finish_reason = "repetition"
            break
    if piece := text.finish():
        pieces.append(piece)
        yield piece
    said = "".join(pieces).strip()
    return replace(answer, text=said, tokens=len(ids), finish_reason=finish_reason), first_at


def choose_text(answer: Answer, choices: Sequence[str], chances: Tensor) -> Answer:
    """Return an answer with the likeliest of some texts, by the log probabilities `[n]` of the
    tokens with which each may begin.
    """
    best = int(chances.argmax())
    shares = dict(zip(choices, chances.softmax(0).tolist(), strict=True))
    return replace(
        answer, text=choices[best], mean_logprob=float(chances[best]), probabilities=shares
    )
