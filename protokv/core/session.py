"""A session: a backbone, a memory and a clock. The only place that joins a model and a memory.

Owns the order of things (a step attends to the memory and to itself, then the memory takes its keys and values) and
the positions (steps continue the stream, text stands behind everything seen). Asking forwards the question into a
tail of its own and drops it, so it changes nothing. Knows no files, no video formats and no command line.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from protokv.backbones.base import Backbone, PreparedStep, StepTokens
from protokv.config import MemoryConfig
from protokv.core.attention import LocalKV
from protokv.core.context import Anchoring, Context, RecordedContext
from protokv.core.decoding import Chooser, Decoding, TextStream, log_probability, read_token
from protokv.core.memory import Memory, MemoryShape, StepKV
from protokv.core.records import StreamClock
from protokv.core.registry import build_memory, restore_memory
from protokv.core.rotary import Rotary, direction, rotate, turn
from protokv.core.step import coordinates_of, read_recent, recent_step, thinned
from protokv.errors import ConfigError, StateCorrupt
from protokv.extras.evidence import Evidence, find_evidence
from protokv.extras.position_limit import PositionLimit
from protokv.extras.recent import WithRecent
from protokv.timings import Timings, stage

if TYPE_CHECKING:
    from protokv.core.snapshot import State

# No camera gives more, and the time of a step stays well above the rounding of time stamps.
MOST_FPS = 240

# Questions are forwarded whole: with this many tokens that takes seconds on a CPU, and room for them is no concern.
MOST_QUESTION_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and what it took.

    Attributes:
        question, text: what was asked and answered.
        stream_time_s: stream time at which it was asked.
        ttft_ms, total_ms: from the arrival of the question to the first and to the last token.
        context_tokens: slots of memory that attention could see.
        tokens: generated tokens.
        mean_logprob: the mean log probability, in nats, that the model gave the tokens of the answer, the one that ends
            it included: how sure it is, the same for answers of any length.
        evidence: the stream times that it stood on; None where that was not asked for.
    """

    question: str
    text: str
    stream_time_s: float
    ttft_ms: float
    total_ms: float
    context_tokens: int
    tokens: int
    mean_logprob: float
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class PositionedStep:
    """A step of the stream: what is read of it, where, and the clock behind it."""

    read: StepTokens
    positions: Tensor
    coordinates: Tensor
    highest: tuple[int, ...]
    clock: StreamClock


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Steps on their way into a memory: placed, and to be forwarded.

    Attributes:
        placed: the steps.
        positions: of their tokens in the stream, `[T, P]`.
        shown: where they are forwarded, `[T, P]`.
        context: what they attend to besides themselves.
        tail: takes their keys and values.
    """

    placed: Sequence[PositionedStep]
    positions: Tensor
    shown: Tensor
    context: Context
    tail: LocalKV

    @property
    def reads(self) -> list[StepTokens]:
        """What is read of each step."""
        return [one.read for one in self.placed]

    @property
    def embeddings(self) -> Tensor:
        """Of all their tokens, `[T, E]`."""
        return _joined([read.embeddings for read in self.reads])


class Session:
    """Watch a stream step by step, ask at any time.

    Attributes:
        backbone, config, memory, clock: what it joins.
        intact: whether memory and clock speak of the same steps. False after an error within a step: such a session
            must not be saved.
        timings: where to add up seconds by stage; None: nowhere.
    """

    timings: Timings | None = None

    def __init__(self, backbone: Backbone, config: MemoryConfig, memory: Memory, clock: StreamClock) -> None:
        """Join what fits together already; `start` and `resume` make the parts.

        Args:
            backbone: the model.
            config: of the memory.
            memory: what it remembers, the prompt prefix included.
            clock: where the stream stands.
        """
        self.backbone, self.config, self.memory, self.clock = backbone, config, memory, clock
        self.intact = True
        self._prefix = len(backbone.prefix_ids)
        self._moving = direction(backbone.moving, backbone.position_components, backbone.device)
        advice = "" if config.positions == "compact" else "; positions=compact would stay inside"
        self._reach = PositionLimit(backbone.max_position, backbone.moving, advice)
        self._form: tuple[tuple[int, int], slice | None, int] | None = None

    @classmethod
    def start(cls, backbone: Backbone, config: MemoryConfig, *, fps: float | None = None) -> Session:
        """An empty stream: the prompt prefix is forwarded and becomes the sink of the memory.

        Args:
            backbone: the model.
            config: which memory, and its budget.
            fps: sampled frames per second; what the backbone was trained at where None.

        Raises:
            ConfigError: fps is not a positive number up to `MOST_FPS`, or the memory does not fit the model.
        """
        rate = backbone.default_fps if fps is None else fps
        if not 0 < rate <= MOST_FPS:
            raise ConfigError(f"fps is {rate:g}", hint=f"use a number of frames per second above 0, at most {MOST_FPS}")
        memory, prefix = build_memory(config, shape_of(backbone), rotary_of(backbone, config)), len(backbone.prefix_ids)
        tail = backbone.new_local_kv(prefix)
        with torch.inference_mode():
            embeddings = backbone.embed_text(backbone.prefix_ids)
            backbone.forward(embeddings, backbone.text_positions(0, prefix), backbone.empty_context(), tail)
            memory.start(*tail.read_all())
        clock = StreamClock(
            steps=0,
            stream_time_s=0.0,
            next_position=prefix,
            tokens_seen=0,
            fps=rate,
            frames_per_step=backbone.frames_per_step,
        )
        return cls(backbone, config, memory, clock)

    @classmethod
    def resume(cls, backbone: Backbone, config: MemoryConfig, state: State) -> Session:
        """Continue where a saved session of the same backbone and config stood; nothing is forwarded.

        Raises:
            StateCorrupt: a tensor is missing, superfluous, misshapen or holds what no stream leaves, or the clock
                contradicts itself or the model.
        """
        clock = state.clock
        if clock.next_position < len(backbone.prefix_ids) or clock.frames_per_step != backbone.frames_per_step:
            raise StateCorrupt(f"the clock of the state is impossible for this model: {clock}")
        clock.check()
        memory = restore_memory(config, shape_of(backbone), rotary_of(backbone, config), state.tensors, clock)
        return cls(backbone, config, memory, clock)

    @torch.inference_mode()
    def watch(self, images: np.ndarray[Any, np.dtype[np.uint8]], time_s: float | None = None) -> None:
        """Take one step of the stream into the memory.

        Args:
            images: `[frames_per_step, height, width, 3]` uint8 RGB.
            time_s: stream time of the first frame; where None the step follows the last one without a gap.
        """
        start_s = self.clock.steps * self.clock.step_seconds if time_s is None else time_s
        self.watch_prepared([self.backbone.prepare(images)], [start_s])

    def watch_prepared(self, steps: Sequence[PreparedStep], starts_s: Sequence[float]) -> None:
        """Take steps that follow each other, the frames of each prepared already, at their stream times.

        One step is what `watch` takes. Several are a chunk, for streams that need not be answered in between: they go
        through the vision tower together and through the language model in one forward. Each attends to the memory as
        it stood before the chunk, to the earlier steps of the chunk exactly, and to itself; then the memory takes them
        one by one. While nothing has been evicted, that is what they attend to one by one. From then on a chunk reads
        its own last steps exactly, and not what the memory would have made of older ones meanwhile. A memory whose
        steps do not see each other has them forwarded one by one.
        """
        with stage(self.timings, "vision tower"), torch.inference_mode():
            tokens = self.backbone.embed_steps(steps, [self._mean_time(start_s) for start_s in starts_s])
        self.take(tokens, starts_s)

    @torch.inference_mode()
    def embed(self, images: np.ndarray[Any, np.dtype[np.uint8]], start_s: float) -> StepTokens:
        """A step through the vision tower, at stream time `start_s` and the stream's rate: what `take` wants."""
        return self.backbone.embed_step(images, self._mean_time(start_s))

    @torch.inference_mode()
    def take(self, steps: Sequence[StepTokens], starts_s: Sequence[float]) -> None:
        """Take steps that were embedded already: what `watch_prepared` does behind the vision tower.

        Several sessions of one backbone may share the embedding of a step.
        """
        if self.memory.joins_steps:
            self._forward_and_append(steps, starts_s)
            return
        for one, start_s in zip(steps, starts_s, strict=True):
            self._forward_and_append([one], [start_s])

    def skip(self, step: StepTokens, start_s: float) -> None:
        """Let a step go by that no question will depend on (`MemoryConfig.horizon`): the clock alone goes on."""
        self.clock = self._place([step], [start_s])[0].clock

    def _forward_and_append(self, steps: Sequence[StepTokens], starts_s: Sequence[float]) -> None:
        with stage(self.timings, "forward"):
            pending = self.place(steps, starts_s)
            self.backbone.forward(pending.embeddings, pending.shown, pending.context, pending.tail, steps=pending.reads)
        with stage(self.timings, "memory"):
            self.append(pending)

    @torch.inference_mode()
    def place(self, steps: Sequence[StepTokens], starts_s: Sequence[float]) -> StepBatch:
        """The first half of `take`: what it forwards. For streams whose steps share a forward (`side_by_side`)."""
        placed = self._place(steps, starts_s)
        positions = _joined([one.positions for one in placed])
        context = self._placed(self.memory.context())
        if self.config.encode_with == "near":
            context = context.without_far()
        shown = self._shifted(positions, context)
        return StepBatch(placed, positions, shown, context, self.backbone.new_local_kv(len(positions)))

    @torch.inference_mode()
    def append(self, pending: StepBatch) -> None:
        """Put what was placed and forwarded into the memory: the second half of `take`."""
        context, tail = pending.context, pending.tail
        keys, values = tail.read_all()
        counts = [len(one.positions) for one in pending.placed]
        split = (torch.split(self._in_stream(keys, context), counts, 2), torch.split(values, counts, 2))
        self.intact = False
        for one, own_keys, own_values in zip(pending.placed, *split, strict=True):
            self._make_room(len(one.positions))
            self.memory.append(StepKV(own_keys, own_values, one.positions, one.coordinates, self.clock.steps))
            self._reach.follow(self.clock.steps, one.highest, context.shift)
            if isinstance(self.memory, WithRecent):
                self.memory.remember(recent_step(one.read, one.positions, self.clock.steps))
            self.clock = one.clock
        self.intact = True

    def _make_room(self, tokens: int) -> None:
        """Ask what a memory wants asked before it takes a step of this many tokens; for most memories nothing."""
        probes = self.memory.probes_for(tokens)
        if probes:
            self.memory.compact([self._find_queries(text) for text in probes], tokens)

    def _find_queries(self, text: str) -> Tensor:
        """Queries `[L, Hq, t, D]` of a text that is asked now and not answered, at stream positions."""
        backbone, ids = self.backbone, self.backbone.suffix_ids(text)
        context = RecordedContext(self._placed(self.memory.context()))
        shown = backbone.text_positions(self._behind(context), len(ids))
        backbone.forward(backbone.embed_text(ids), shown, context, backbone.new_local_kv(len(ids)))
        queries = torch.stack([query.to(backbone.device) for query in context.queries])
        stands = backbone.text_positions(self.clock.next_position, len(ids))
        precise = backbone.precise_rotary
        return turn(queries, shown, stands, precise) if context.next_position is not None else queries

    def _place(self, steps: Sequence[StepTokens], starts_s: Sequence[float]) -> list[PositionedStep]:
        """Where each of some steps stands in the stream, and what of it is read."""
        clock, placed = self.clock, []
        for tokens, start_s in zip(steps, starts_s, strict=True):
            stands = self.backbone.step_positions(
                tokens, origin=self._prefix, start=clock.next_position, index=clock.steps, time_s=start_s
            )
            read, positions, coordinates = tokens, stands.places, self._coordinates_of(tokens)
            kept = self.memory.select(tokens.embeddings[tokens.visual or slice(None)], tokens.grid)
            if kept is not None:
                # A memory that selects has taken note of the step.
                self.intact = False
                read, rows = thinned(tokens, kept)
                positions, coordinates = positions[rows], coordinates[rows]
            clock = replace(
                clock,
                steps=clock.steps + 1,
                stream_time_s=start_s + clock.step_seconds,
                next_position=max(clock.next_position, max(stands.highest) + 1),
                tokens_seen=clock.tokens_seen + len(stands.places),
            )
            placed.append(PositionedStep(read, positions, coordinates, stands.highest, clock))
        return placed

    def _mean_time(self, start_s: float) -> float:
        """Of the frames of a step that starts then."""
        return start_s + (self.clock.frames_per_step - 1) / (2 * self.clock.fps)

    @torch.inference_mode()
    def prefill(self, question: str) -> Tensor:
        """Logits `[n, vocabulary]` float32 of the tokens that stand behind the video: what `ask` starts from."""
        logits, *_ = self._forward_question(question, room=0)
        return logits

    def ask(self, question: str, decoding: Decoding | None = None, *, evidence: bool = False) -> Answer:
        """The whole answer at once; see `stream`."""
        pieces = self.stream(question, decoding, evidence=evidence)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def stream(
        self, question: str, decoding: Decoding | None = None, *, evidence: bool = False
    ) -> Generator[str, None, Answer]:
        """Answer from memory alone, piece by piece. Changes nothing; the generator returns the `Answer`.

        It reads the memory in place, so let it end before the next `watch`. With `evidence` the answer says what it
        stood on; the attention that tells it is made a second time.

        Raises:
            ConfigError: the question is empty, longer than `MOST_QUESTION_TOKENS`, or contains control tokens; or
                evidence is wanted and the memory does not know where what it shows stands in the stream.
        """
        decoding = decoding or Decoding()
        began = time.perf_counter()
        with torch.inference_mode():
            logits, context, tail, position = self._forward_question(question, decoding.max_new_tokens, record=evidence)
            stood_on = self._stood_on(context, tail) if isinstance(context, RecordedContext) else None
        choose = Chooser(decoding, self.backbone.device)
        text = TextStream(self.backbone.decode)
        chosen = choose(logits[-1])
        sure = [log_probability(logits[-1], chosen)]
        token = read_token(chosen)
        first = time.perf_counter()
        pieces, n_tokens = [], 0
        afresh = tail.length - len(logits)
        while token not in self.backbone.stop_ids:
            n_tokens += 1
            if piece := text.push(token):
                pieces.append(piece)
                yield piece
            if n_tokens == decoding.max_new_tokens:
                break
            with torch.inference_mode():
                embedded = self.backbone.embed_token(chosen)
                where = self.backbone.text_positions(position, 1)
                hidden = self.backbone.forward(embedded, where, context, tail)
                scores = self.backbone.logits(hidden[-1])
                chosen = choose(scores)
                sure.append(log_probability(scores, chosen))
            token = read_token(chosen)
            position += 1
        if piece := text.finish():
            pieces.append(piece)
            yield piece
        return Answer(
            question=question,
            text="".join(pieces).strip(),
            stream_time_s=self.clock.stream_time_s,
            ttft_ms=(first - began) * 1e3,
            total_ms=(time.perf_counter() - began) * 1e3,
            context_tokens=context.visible_tokens() + afresh,
            tokens=n_tokens,
            mean_logprob=float(torch.cat(sure).mean()),
            evidence=stood_on,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything the memory holds, by the names of the snapshot's schema."""
        self._reach.tell(self.clock.steps)
        return self.memory.tensors()

    def _forward_question(
        self, question: str, room: int, *, record: bool = False
    ) -> tuple[Tensor, Context, LocalKV, int]:
        """Logits of the question, what it read, the tail behind it, and the position of its first answered token."""
        backbone, ids = self.backbone, self._ids_of(question)
        self._reach.tell(self.clock.steps)
        recent = self.memory.recent() if isinstance(self.memory, WithRecent) else ()
        tail = backbone.new_local_kv(sum(len(one.positions) for one in recent) + len(ids) + room)
        context = self._placed(self.memory.recall())
        start = self._behind(context)
        if recent:
            reads = [read_recent(one) for one in recent]
            shown = self._shifted(torch.cat([one.positions for one in recent]), context)
            backbone.forward(torch.cat([read.embeddings for read in reads]), shown, context, tail, steps=reads)
            start = max(start, int(shown.max()) + 1)
        if record:
            context = RecordedContext(context)
        positions = backbone.text_positions(start, len(ids))
        hidden = backbone.forward(backbone.embed_text(ids), positions, context, tail)
        return backbone.logits(hidden), context, tail, start + len(ids)

    def _stood_on(self, context: RecordedContext, tail: LocalKV) -> Evidence:
        recent = self.memory.recent() if isinstance(self.memory, WithRecent) else ()
        afresh = torch.cat([one.positions for one in recent]) if recent else None
        found = find_evidence(self.backbone, context, tail, self.clock, afresh)
        if found is None:
            raise ConfigError(f"{self.config.name} does not tell what an answer stood on", hint="ask without evidence")
        return found

    def _ids_of(self, question: str) -> list[int]:
        # A token has seldom more than ten characters, and splitting a text into tokens takes time too.
        long = len(question) > 16 * MOST_QUESTION_TOKENS
        ids = [] if long else self.backbone.suffix_ids(question)
        if long or len(ids) > MOST_QUESTION_TOKENS:
            size = f"{len(question)} characters" if long else f"{len(ids)} tokens"
            raise ConfigError(
                f"the question has {size}; the most is {MOST_QUESTION_TOKENS} tokens", hint="ask something shorter"
            )
        return ids

    def _placed(self, context: Context) -> Context:
        """What is shown, where the config wants it: at stream positions, or re-anchored to consecutive ones."""
        if self.config.positions == "stream":
            return context
        backbone = self.backbone
        anchoring = Anchoring(backbone.precise_rotary, self._prefix, self.clock.next_position, backbone.moving)
        return context.compacted(anchoring, context.far_span())

    def _shifted(self, positions: Tensor, context: Context) -> Tensor:
        """Where tokens of the stream are forwarded."""
        if _is_unmoved(context):
            return positions
        return positions - self._moving * context.shift

    def _in_stream(self, keys: Tensor, context: Context) -> Tensor:
        """Keys as memories hold them, at stream positions, wherever the step was placed while it was encoded."""
        if _is_unmoved(context):
            return keys
        angles = self.backbone.precise_rotary(self._moving * context.shift)
        return rotate(keys, *angles).to(keys.dtype)

    def _coordinates_of(self, tokens: StepTokens) -> Tensor:
        """`coordinates_of`, made when a step differs in its grid or in the text around it from the last one."""
        form = (tokens.grid, tokens.visual, len(tokens.embeddings))
        if self._form != form:
            self._form, self._coordinates = form, coordinates_of(tokens)
        return self._coordinates

    def _behind(self, context: Context) -> int:
        """Position of the first token behind the video."""
        return self.clock.next_position if context.next_position is None else int(context.next_position)


def _is_unmoved(context: Context) -> bool:
    """Whether tokens are forwarded where they stand in the stream, as far as the host knows."""
    return isinstance(context.shift, int) and not context.shift


def rotary_of(backbone: Backbone, config: MemoryConfig) -> Rotary:
    """The angles by which a memory takes rotations away and puts them back.

    At stream positions those of the model, which made the keys there. Compact, the model makes keys at small positions,
    and they are turned to the stream's: by angles that add up, so that nothing of it is left when they are turned back.
    """
    return backbone.rotary if config.positions == "stream" else backbone.precise_rotary


def shape_of(backbone: Backbone) -> MemoryShape:
    """What a memory must know of a backbone."""
    return MemoryShape(
        layers=backbone.layers,
        kv_heads=backbone.kv_heads,
        head_size=backbone.head_size,
        position_components=backbone.position_components,
        sink_tokens=len(backbone.prefix_ids),
        dtype=backbone.dtype,
        device=backbone.device,
        layer_devices=backbone.layer_devices,
        frames_per_step=backbone.frames_per_step,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    """Parts behind each other; nothing is copied where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
