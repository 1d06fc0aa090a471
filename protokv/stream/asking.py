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
    TokenLogprob,
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

AnswerInParts = Generator[Any, Any, Answer]
"""Yields text; the ids of the question, for which it is sent `QuestionLogits`; and each token that
is to be forwarded, `[1]` int64, for which it is sent logits `[vocabulary]`."""


class AskedStream(Stream):
    """A stream that answers questions."""

    tells_evidence = True  # whether an answer can name the times that it stands on
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

    @property
    def joins(self) -> bool:
        """Whether its questions go through the model with others (`stream.together`): no steps are
        read again before them.
        """
        return self.backbone.joins and not self.recent.steps

    @property
    def captures(self) -> bool:
        """Whether a question alone is captured as a whole, which is quicker than joining none."""
        return not self._reader.runs.why_not

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
        pieces = self.begin_answer(
            question, decoding, evidence=evidence, turns=turns, system=system, promise=promise
        )
        record = evidence or promise is not None
        room = (decoding or self.backbone.decoding).max_new_tokens
        indices = count()
        sent: Any = None
        try:
            while True:
                item = pieces.send(sent)
                sent = None
                if isinstance(item, str):
                    yield item
                elif isinstance(item, list):
                    sent = reading = self.read_question(item, record=record, answer_tokens=room)
                else:
                    with torch.inference_mode():
                        sent = self._reader.decode(reading, item, next(indices))
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    def begin_answer(
        self,
        question: str,
        decoding: Decoding | None = None,
        *,
        evidence: bool = False,
        turns: Sequence[ChatTurn] = (),
        system: str | None = None,
        promise: PromiseRule | None = None,
    ) -> AnswerInParts:
        """Answer as `stream` does, and leave the forwards to who reads the parts."""
        if promise is not None:
            pieces = self.begin_answer(
                question, decoding, evidence=self.tells_evidence, turns=turns, system=system
            )
            return (yield from promise.hold_back(pieces, self))
        writer = AnswerWriter(self.backbone, decoding)
        ids, kept = self.backbone.question_ids(question, turns, system)
        writer.answer = Answer(question, stream_time_s=self.clock.stream_time_s, turns=kept)
        yield from self._write(ids, writer, evidence)
        return writer.complete()

    def _write(
        self, ids: list[int], writer: AnswerWriter, evidence: bool
    ) -> Generator[Any, Any, None]:
        """Write the answer to a question of these ids; yield what `AnswerInParts` says."""
        reading: QuestionLogits = yield ids
        found = self._find_evidence(ids, reading) if evidence else None
        if writer.firsts:
            likely = reading.logits[-1].log_softmax(-1)
            yield from writer.choose([likely[own].logsumexp(0) for own in writer.firsts])
        else:
            decoding = writer.decoding
            # Penalties count the text before and after the video; -1 stands for the video between
            # the two.
            prompt = [*self.backbone.prefix_ids, -1, *ids]
            guide = JsonGuide(self.backbone, decoding.schema) if decoding.schema else None
            sample = TokenSampler(decoding, self.backbone.device, prompt, guide)
            chosen = sample(reading.logits[-1])
            while True:
                yield from writer.push(sample.fetch(chosen))
                if writer.reason:
                    break
                chosen = sample((yield chosen))
            wanted = decoding.top_logprobs is not None
            chances = sample.read_chances() if wanted else None
            yield from writer.finish(sample.mean_logprob(), chances)
        self._note_runs()
        # This waits for the device, so it comes after the last token.
        seen = reading.cache.context.visible_tokens() + len(reading.prelude)
        writer.answer = replace(writer.answer, evidence=found, context_tokens=seen)

    def _find_evidence(self, ids: list[int], reading: QuestionLogits) -> Evidence:
        if reading.cache.queries is None:
            # A call that was replayed recorded nothing.
            reading = self.read_question(ids, record=True)
        return find_evidence(self, reading)

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

    def aim(
        self, ids: list[int], *, shown: tuple[Context, int] | None = None
    ) -> tuple[list[int], Context, int]:
        """Return the ids of a question as they are forwarded, what it attends to, and its position;
        the last two are `shown` if that is at hand.
        """
        context = self.recent.hide(self.memory.recall())
        clock = self.clock
        if clock == self.words_end and not self.memory.retrieves and not self.recent.steps:
            ids, context, clock = self.backbone.after_words(ids, context, clock)
        if shown is not None:
            return ids, *shown
        context = self.placement.place(context, clock.next_position)
        return ids, context, self.placement.text_start(context, clock)


class AnswerWriter:
    """Makes an answer of its tokens, as they come, or of the chances of some texts."""

    answer: Answer
    reason: FinishReason | None = None  # why no further token is wanted

    def __init__(self, backbone: Backbone, decoding: Decoding | None) -> None:
        """Begin to measure time. ConfigError: the choices cannot be told apart."""
        self.decoding = decoding or backbone.decoding
        self.firsts = backbone.choice_ids(self.decoding.choices)
        self._began = time.perf_counter()
        self._first_at = 0.0
        self._stop_ids = backbone.stop_ids
        self._text = Detokenizer(backbone.decode, self.decoding.stop)
        self._ids = list[int]()
        self._said = ""

    def push(self, token: int) -> Iterator[str]:
        """Take the next token; yield the text that it completes."""
        decoding = self.decoding
        self._first_at = self._first_at or time.perf_counter()
        if token in self._stop_ids:
            self.reason = "stop"
            return
        self._ids.append(token)
        yield from self._take(self._text.push(token))
        if self._text.stopped:
            self.reason = "stop"
        elif len(self._ids) == decoding.max_new_tokens:
            self.reason = "length"
        # Greedy decoding repeats for ever once it repeats; a drawn answer may leave the loop.
        elif decoding.temperature == 0 and is_looping(self._ids):
            self.reason = "repetition"

    def finish(
        self, mean_logprob: float, chances: list[list[TokenLogprob]] | None
    ) -> Iterator[str]:
        """Yield the text that was held back; the answer is that of all tokens."""
        yield from self._take(self._text.finish())
        tokens = len(self._ids)
        self.answer = replace(
            self.answer,
            text=self._said.strip(),
            tokens=tokens,
            finish_reason=self.reason or "stop",
            mean_logprob=mean_logprob,
            chances=None if chances is None else chances[:tokens],
        )

    def choose(self, chances: Sequence[Tensor]) -> Iterator[str]:
        """Answer with the likeliest choice, by the log probability of the tokens with which each
        may begin; yield it.
        """
        each = torch.stack([*chances]).cpu()
        self._first_at = time.perf_counter()
        choices = self.decoding.choices
        best = int(each.argmax())
        self.answer = replace(
            self.answer,
            text=choices[best],
            mean_logprob=float(each[best]),
            probabilities=dict(zip(choices, each.softmax(0).tolist(), strict=True)),
        )
        yield self.answer.text

    def complete(self) -> Answer:
        """Return the answer with its times."""
        now = time.perf_counter()
        ttft_ms = ((self._first_at or now) - self._began) * 1e3
        return replace(self.answer, ttft_ms=ttft_ms, total_ms=(now - self._began) * 1e3)

    def _take(self, piece: str) -> Iterator[str]:
        if piece:
            self._said += piece
            yield piece
