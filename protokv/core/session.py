"""A session: a backbone, a memory and a clock.

Watching: a step attends to the memory and to itself; then the memory takes its keys and values.
Asking: the question is forwarded after everything seen, attends to the memory and to itself, and is
dropped, so asking changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protokv.core.arrays import concat_rows
from protokv.core.attention import TokenCache
from protokv.core.backbone import Backbone, ChatTurn, PreparedStep
from protokv.core.build import build_memory, choose_rotary, make_memory_shape, restore_memory
from protokv.core.context import CachedContext
from protokv.core.decoding import (
    Decoding,
    Detokenizer,
    FinishReason,
    TokenLogprob,
    TokenSampler,
    is_looping,
)
from protokv.core.evidence import find_evidence
from protokv.core.graphs import Graphs
from protokv.core.layers import declare_layer_tensors
from protokv.core.memory import Memory
from protokv.core.packing import split_tensors
from protokv.core.parts import (
    Evidence,
    PositionedStep,
    QuestionLogits,
    SessionAttachment,
    SessionListener,
    TokenPlacement,
    TranscriptAttachment,
)
from protokv.core.pushed import PushedFrameBuffer
from protokv.core.reading import QuestionForwarder
from protokv.core.recent import RecentSteps
from protokv.core.settings import MemoryConfig, check_sampled_fps
from protokv.core.step import StepTokens, StreamClock, split_steps
from protokv.core.tensors import TensorSpec, count_bytes
from protokv.errors import ConfigError, StateCorrupt
from protokv.timings import Timings, time_stage

_Images = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and its cost."""

    question: str
    text: str  # the generated answer
    stream_time_s: float  # stream time at which it was asked
    ttft_ms: float  # from the arrival of the question to the first token
    total_ms: float  # to the last one
    # slots of memory that attention could see, and tokens of steps that were read again
    context_tokens: int
    tokens: int  # generated tokens
    # mean log probability, in nats, of its tokens and its end: how sure the model is
    mean_logprob: float
    # the stream times that the answer stands on; None unless asked for
    evidence: Evidence | None = None
    # also: it has the most tokens allowed, or it repeated itself
    finish_reason: FinishReason = "stop"
    turns: int = 0  # earlier turns of the conversation that the model read, the newest ones
    # of each token, first the one that was chosen; None unless `Decoding.top_logprobs` asks for
    # them
    chances: list[list[TokenLogprob]] | None = None
    # of each choice, together 1; None: there were none to choose from
    probabilities: Mapping[str, float] | None = None


class Session:
    """Watch a stream step by step, ask at any time.

    The cache has what layers of the model hold that the memory does not serve; steps and questions
    forward with its forks. Attachments are what its state has besides, such as thumbnails; they
    listen to it.
    """

    timings: Timings | None = None  # where to add up seconds by stage
    words_end: StreamClock | None  # where the stream stood after the last step with words
    # memory and clock agree about the steps seen; after an error within a step they do not: do not
    # save
    intact: bool

    def __init__(
        self,
        backbone: Backbone,
        config: MemoryConfig,
        memory: Memory,
        cache: TokenCache,
        clock: StreamClock,
        attachments: Sequence[SessionAttachment] = (),
    ) -> None:
        """Join a backbone and a memory that has its prompt prefix; `start` and `resume` make them
        from a config.
        """
        self.backbone = backbone
        self.config = config
        self.memory = memory
        self.cache = cache
        self.clock = clock
        self.attachments = list(attachments)
        self.placement = TokenPlacement(backbone, config.positions == "compact")
        self._memory_listeners = config.listeners()
        self.recent = RecentSteps(config, make_memory_shape(backbone, config))
        self.words_end = None if self.transcript is None else self.transcript.words_end(clock)
        self.intact = True
        self._renew_graphs()
        self._pushed = PushedFrameBuffer(clock.stream_time_s)
        self._form: tuple[tuple[int, int], slice | None, int] | None = None

    @classmethod
    def start(
        cls,
        backbone: Backbone,
        config: MemoryConfig,
        *,
        fps: float | None = None,
        attachments: Sequence[SessionAttachment] = (),
    ) -> Session:
        """Start an empty stream: the prompt prefix is forwarded and becomes the sink of the memory.

        `fps` are sampled frames a second, above 0 and at most 240; None: the rate that the model
        was trained at. A stream with words needs a `protokv.words.transcript.Transcript` among its
        attachments. ConfigError: the rate is out of range, or the memory does not fit the model.
        """
        rate = backbone.default_fps if fps is None else fps
        check_sampled_fps(rate)
        memory = build_memory(
            config, make_memory_shape(backbone, config), choose_rotary(backbone, config)
        )
        prefix = len(backbone.prefix_ids)
        cache = backbone.new_cache()
        with torch.inference_mode():
            backbone.forward(
                backbone.embed_text(backbone.prefix_ids), backbone.text_positions(0, prefix), cache
            )
            memory.start(*cache.read_all())
            cache.settle()
        clock = StreamClock(0, 0.0, prefix, 0, fps=rate, frames_per_step=backbone.frames_per_step)
        return cls(backbone, config, memory, cache, clock, attachments)

    @classmethod
    def resume(
        cls,
        backbone: Backbone,
        config: MemoryConfig,
        clock: StreamClock,
        tensors: Mapping[str, Tensor],
        attachments: Sequence[SessionAttachment] = (),
    ) -> Session:
        """Continue a saved session of the same backbone and config; `attachments` have the tensors
        that are theirs.

        StateCorrupt: its tensors are none that a stream leaves, or its clock contradicts itself or
        the model.
        """
        if (
            clock.next_position < len(backbone.prefix_ids)
            or clock.frames_per_step != backbone.frames_per_step
        ):
            raise StateCorrupt(f"the clock of the state is impossible for this model: {clock}")
        attached = {spec.name for one in attachments for spec in one.declare()}
        kept = {name: one for name, one in tensors.items() if name not in attached}
        layers, recent, own = split_tensors(kept, "layers", "recent")
        memory = restore_memory(
            config,
            make_memory_shape(backbone, config),
            choose_rotary(backbone, config),
            own,
            clock.steps,
        )
        session = cls(backbone, config, memory, backbone.new_cache(layers), clock, attachments)
        session.recent.load(recent)
        return session

    @property
    def transcript(self) -> TranscriptAttachment | None:
        """The attachment that keeps what was said; None: there is none."""
        return next(
            (one for one in self.attachments if isinstance(one, TranscriptAttachment)), None
        )

    @property
    def listeners(self) -> list[SessionListener]:
        """All who listen, in the order in which they are told."""
        return [*self.attachments, *self._memory_listeners]

    @torch.inference_mode()
    def watch(
        self, images: _Images, time_s: float | None = None, words: Sequence[str] = ()
    ) -> None:
        """Take one step of the stream, `[frames_per_step, height, width, 3]` uint8 RGB, and the
        texts said meanwhile.

        `time_s` is the stream time of the first frame; None: the step follows the last one without
        a gap.
        """
        if not isinstance(images, np.ndarray):
            what = f"one step is an array [{self.clock.frames_per_step}, height, width, 3], not a"
            raise ConfigError(
                f"{what} {type(images).__name__}",
                hint="np.stack its frames, or push them one by one",
            )
        start_s = self.clock.steps * self.clock.step_seconds if time_s is None else time_s
        self.watch_prepared([self.backbone.prepare(images)], [start_s], [words])

    def push(self, frame: Any, time_s: float, *, bgr: bool = False) -> bool:
        """Take one frame of a stream as it comes; return True if it completed a step, which was
        then watched.

        The first frame in each interval of `1 / fps` is sampled, and the others are dropped. Frames
        of a step that is not complete are in no state, and no question sees them.

        Args:
            frame: `[height, width, 3]` uint8 RGB, or a picture of PIL.
            time_s: its stream time in seconds, which never runs back.
            bgr: an array is BGR, as OpenCV has it.

        Raises:
            ConfigError: it is no such frame, has not the size of the others of its step, or its
                time ran back.
        """
        step = self._pushed.add(frame, time_s, self.clock, bgr=bgr)
        if step is not None:
            self.watch(*step)
        return step is not None

    def watch_prepared(
        self,
        steps: Sequence[PreparedStep],
        starts_s: Sequence[float],
        words: Sequence[Sequence[str]] = (),
    ) -> None:
        """Take consecutive steps, the frames of each prepared already, at their stream times, with
        the words of each.

        Several steps are a chunk: they go through the vision tower together and through the
        language model in one forward. Each attends to the memory before the chunk, to the earlier
        steps of the chunk exactly, and to itself; then the memory takes them one by one. Until the
        first eviction this equals watching them one by one.
        """
        with time_stage(self.timings, "vision tower"), torch.inference_mode():
            tokens = self.backbone.embed_steps(
                steps, [self._mean_time(start_s) for start_s in starts_s]
            )
            if any(words):
                tokens = list(map(self.backbone.add_words, tokens, words))
        self.take(tokens, starts_s)

    @torch.inference_mode()
    def embed(self, images: _Images, start_s: float, words: Sequence[str] = ()) -> StepTokens:
        """Return what the vision tower makes of a step, and its words, at stream time `start_s`,
        for `take`.
        """
        return self.backbone.add_words(
            self.backbone.embed_step(images, self._mean_time(start_s)), words
        )

    @torch.inference_mode()
    def take(self, steps: Sequence[StepTokens], starts_s: Sequence[float]) -> None:
        """Take embedded steps: the rest of `watch_prepared`. Sessions of one backbone may share
        embeddings.
        """
        together = len(steps) if self.memory.joins_steps else 1
        for start in range(0, len(steps), together):
            some = slice(start, start + together)
            with time_stage(self.timings, "memory"):
                placed = self.position_steps(steps[some], starts_s[some])
            with time_stage(self.timings, "forward"):
                forwarded = self.forward(placed)
            with time_stage(self.timings, "memory"):
                self.append(placed, *forwarded)
        self._tell_graphs()

    def _renew_graphs(self) -> None:
        self._graphs = Graphs(self.backbone.device, self.backbone.why_eager)
        self._reader = QuestionForwarder(self.backbone)

    def _tell_graphs(self) -> None:
        if self.timings is not None and self.backbone.device.type != "cpu":
            for one in (
                self.backbone.graphs,
                self._graphs,
                self.memory.graphs,
                self._reader.graphs,
            ):
                self.timings.graphs |= {} if one is None else one.how

    def position_steps(
        self, steps: Sequence[StepTokens], starts_s: Sequence[float]
    ) -> list[PositionedStep]:
        """Give steps their positions: the part of `take` before the forward, all in
        `torch.inference_mode()`.
        """
        if not self.clock.steps:
            self.settle(self.config.for_step(len(steps[0]) - steps[0].words))
        clock = self.clock
        words_end = self.words_end
        positioned = list[PositionedStep]()
        for one, start_s in zip(steps, starts_s, strict=True):
            positioned.append(self._position(one, start_s, clock, words_end))
            clock = positioned[-1].clock
            words_end = positioned[-1].words_end
        return positioned

    def settle(self, config: MemoryConfig) -> None:
        """Begin under other settings: the memory, which has seen no step yet, is made anew."""
        if config != self.config:
            del self.memory  # both at once take twice the bytes
            with torch.inference_mode(False):
                try:
                    self.config, self.memory = config, Session.start(self.backbone, config).memory
                except BaseException:
                    self.memory = Session.start(self.backbone, self.config).memory
                    raise
            self._renew_graphs()

    def forward(self, steps: Sequence[PositionedStep]) -> tuple[Tensor, Tensor, TokenCache]:
        """Return keys and values `[L, H, T, D]` of steps, at stream positions, and the cache that
        forwarded them.
        """
        tokens = [step.tokens for step in steps]

        def run(
            positions: Tensor, embeddings: Tensor, *deep: Tensor
        ) -> tuple[Tensor, Tensor, TokenCache]:
            context = self.placement.place(self.memory.context(), self.clock.next_position)
            cache = self.cache.fork(context)
            shown = self.placement.forward_positions(positions, context)
            fed = (
                [replace(one, deepstack=own) for one, own in zip(tokens, deep, strict=True)]
                if deep
                else tokens
            )
            self.backbone.forward(embeddings, shown, cache, steps=fed)
            keys, values = cache.read_all()
            cache.settle()
            return self.placement.stream_keys(keys, context), values, cache

        given = (
            concat_rows([step.positions for step in steps]),
            concat_rows([one.embeddings for one in tokens]),
        )
        deep = [one.deepstack for one in tokens if one.deepstack is not None]
        # A graph reads the same buffers every time.
        sizes = tuple((len(one), one.grid, repr(one.visual)) for one in tokens)
        form = (sizes, self.cache.form) if self.memory.steady else None
        self.memory.join()
        found: tuple[Tensor, Tensor, TokenCache] = self._graphs.run(
            "forward", form, run, *given, *deep
        )
        return found

    def append(
        self, steps: Sequence[PositionedStep], keys: Tensor, values: Tensor, cache: TokenCache
    ) -> None:
        """Put forwarded steps into the memory: the part of `take` after `forward`."""
        places = [(step.positions, step.coordinates, step.tokens.words) for step in steps]
        if self.transcript is None and any(words for *_, words in places):
            raise ConfigError(
                "words: this session has no transcript",
                hint="start it with attachments=[Transcript()]",
            )
        self.intact = False
        listeners = self.listeners
        for step, kv in zip(
            steps, split_steps(keys, values, places, self.clock.steps), strict=True
        ):
            for listener in listeners:
                listener.before_append(self, step)
            self.memory.append(kv)
            self.recent.steps.append((step.tokens, step.positions))
            self.placement.check_limit(step, cache.context)
            for listener in listeners:
                listener.after_append(self, step, cache.context)
            self.clock = step.clock
            self.words_end = step.words_end
        self.cache.take(cache)
        self.intact = True

    def _position(
        self, tokens: StepTokens, start_s: float, clock: StreamClock, words_end: StreamClock | None
    ) -> PositionedStep:
        """Return the positions of a step that follows `clock`, and the tokens that the memory
        selects of it.
        """
        # Words end a video, as in a prompt of several videos: the steps after them are a video of
        # its own.
        origin = len(self.backbone.prefix_ids)
        index = clock.steps
        since_s = 0.0
        if words_end is not None:
            origin = words_end.next_position
            index = index - words_end.steps
            since_s = words_end.stream_time_s
        placed = self.backbone.step_positions(
            tokens,
            origin=origin,
            start=clock.next_position,
            index=index,
            time_s=max(0.0, start_s - since_s),
        )
        clock = replace(
            clock,
            steps=clock.steps + 1,
            stream_time_s=start_s + clock.step_seconds,
            next_position=max(clock.next_position, max(placed.highest) + 1),
            tokens_seen=clock.tokens_seen + len(placed.positions),
        )
        # Made anew only if its grid or its text differs from the last step's.
        if self._form != (form := (tokens.grid, tokens.visual, len(tokens))):
            self._form = form
            self._coordinates = tokens.coordinates()
        positions = placed.positions
        coordinates = self._coordinates
        selected = self.memory.select(tokens.embeddings[tokens.visual or slice(None)], tokens.grid)
        if selected is not None:
            self.intact = False  # a memory that selects has noted the step already
            tokens, rows = tokens.select(selected)
            positions = positions[rows]
            coordinates = coordinates[rows]
        return PositionedStep(
            tokens,
            positions,
            coordinates,
            placed.highest,
            clock,
            clock if tokens.words else words_end,
        )

    def _mean_time(self, start_s: float) -> float:
        """Return the mean stream time of the frames of a step that starts at `start_s`."""
        return start_s + (self.clock.frames_per_step - 1) / (2 * self.clock.fps)

    def prefill(self, question: str | list[int]) -> Tensor:
        """Return the logits `[n, vocabulary]` float32 of the tokens after the video, from which
        `ask` answers.
        """
        return self.read_question(question, whole=True).logits

    def ask(
        self,
        question: str,
        decoding: Decoding | None = None,
        *,
        evidence: bool = False,
        turns: Sequence[ChatTurn] = (),
        system: str | None = None,
    ) -> Answer:
        """Return the whole answer at once; arguments are those of `stream`."""
        pieces = self.stream(question, decoding, evidence=evidence, turns=turns, system=system)
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
    ) -> Generator[str, None, Answer]:
        """Answer from memory alone, piece by piece. Changes nothing; the generator returns the
        `Answer`.

        It reads the memory in place, so let it end before the next `watch`. Without `decoding`,
        tokens are chosen as the model was published to. With `evidence` the answer names the stream
        times that it stands on. `turns` are earlier questions with their answers, and `system`
        stands in front of the question.

        Raises:
            QuestionError: a text is empty, longer than `_MOST_QUESTION_TOKENS`, or contains control
                tokens.
            ConfigError: evidence is wanted and the memory does not know the positions of its slots.
        """
        decoding = decoding or self.backbone.decoding
        firsts = self.backbone.choice_ids(decoding.choices)
        began = time.perf_counter()
        asked, kept = self.backbone.question_ids(question, turns, system)
        reading = self.read_question(asked, record=evidence, room=decoding.max_new_tokens)
        by_graph = reading.cache.queries is None
        recorded = self.read_question(asked, record=True) if evidence and by_graph else reading
        found = find_evidence(self, recorded) if evidence else None
        if firsts:
            likely = reading.logits[-1].log_softmax(-1)
            chances = torch.stack([likely[ids].logsumexp(0) for ids in firsts]).cpu()
            best, sure = max(
                zip(decoding.choices, chances.tolist(), strict=True), key=lambda one: one[1]
            )
            shares = dict(zip(decoding.choices, chances.softmax(0).tolist(), strict=True))
            took_ms = (time.perf_counter() - began) * 1e3
            read = reading.cache.context.visible_tokens() + len(reading.prelude)
            cost = self.clock.stream_time_s, took_ms, took_ms, read, 0
            yield best
            return Answer(question, best, *cost, sure, found, turns=kept, probabilities=shares)
        # Penalties count the text before and after the video; -1 stands for the video between the
        # two.
        choose = TokenSampler(
            decoding, self.backbone.device, [*self.backbone.prefix_ids, -1, *asked]
        )
        text = Detokenizer(self.backbone.decode, decoding.stop)
        chosen = choose(reading.logits[-1])
        token = choose.fetch(chosen)
        first = time.perf_counter()
        pieces = []
        ids = list[int]()
        finish_reason: FinishReason = "stop"
        while token not in self.backbone.stop_ids:
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
            with torch.inference_mode():
                chosen = choose(self._reader.decode(reading, chosen, len(ids) - 1))
            token = choose.fetch(chosen)
        if piece := text.finish():
            pieces.append(piece)
            yield piece
        self._tell_graphs()
        return Answer(
            question=question,
            text="".join(pieces).strip(),
            stream_time_s=self.clock.stream_time_s,
            ttft_ms=(first - began) * 1e3,
            total_ms=(time.perf_counter() - began) * 1e3,
            context_tokens=reading.cache.context.visible_tokens() + len(reading.prelude),
            tokens=len(ids),
            mean_logprob=choose.mean_logprob(),
            evidence=found,
            finish_reason=finish_reason,
            turns=kept,
            chances=None if decoding.top_logprobs is None else choose.read_chances()[: len(ids)],
        )

    @torch.inference_mode()
    def read_question(
        self,
        question: str | list[int],
        *,
        whole: bool = False,
        record: bool = False,
        room: int | None = None,
    ) -> QuestionLogits:
        """Forward a question, or token ids as they are, after the memory.

        The logits are those of the last token, or of the `whole` question, which may take
        gigabytes. With `room` for so many tokens of an answer it is read by a graph where that can
        be. Else, with `record`, the cache keeps the queries that read the context, for
        `find_evidence`.
        """
        backbone = self.backbone
        placement = self.placement
        ids = backbone.question_ids(question)[0] if isinstance(question, str) else question
        prelude = self.recent.steps
        positions = [where for _, where in prelude]
        if room is not None:
            differs = bool(prelude) or self.clock == self.words_end
            reading = self._reader.read(self, ids, room, differs=differs)
            if reading is not None:
                return reading
        context = self.recent.hide(self.memory.recall())
        clock = self.clock
        if clock == self.words_end and self.memory.hides_recent and not prelude:
            ids, context, clock = backbone.after_words(ids, context, clock)
        context = placement.place(context, clock.next_position)
        start = placement.text_start(context, clock)
        cache = self.cache.fork(CachedContext(context))
        if prelude:
            steps = [tokens for tokens, _ in prelude]
            shown = placement.forward_positions(torch.cat(positions), context)
            backbone.forward(
                torch.cat([one.embeddings for one in steps]), shown, cache, steps=steps
            )
            start = max(start, int(shown.max()) + 1)
        cache.queries = [] if record else None
        where = backbone.text_positions(start, len(ids))
        hidden = backbone.forward(backbone.embed_text(ids), where, cache)
        logits = backbone.logits(hidden if whole else hidden[-1:])
        return QuestionLogits(
            logits, cache, start + len(ids), torch.cat(positions) if prelude else where[:0]
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return what the memory holds, the layers beside it and the recent steps, by the names of
        a state.
        """
        return self.memory.tensors() | self.cache.tensors() | self.recent.tensors()

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the declarations of these tensors."""
        return (
            *self.memory.specs(),
            *declare_layer_tensors(self.cache.tensors()),
            *self.recent.specs(),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of all that is held of the stream, without attachments."""
        return self.memory.bytes_held + count_bytes(
            *self.cache.tensors().values(), *self.recent.tensors().values()
        )
