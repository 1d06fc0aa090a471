"""A session: a stream of frames that is watched step by step, and asked at any time.

Watching: a step attends to the memory and to itself; then the memory takes its keys and values. The
way of a step: `watch` -> `watch_prepared` (`seeing`, the vision tower) -> `take` (`taking`) ->
`position_steps` -> `forward_steps` (`taking`, the language model) -> `commit` -> `Memory.append`.
Asking is in `protokv.stream.asking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from protokv.core.attention import TokenCache
from protokv.core.backbone import Backbone
from protokv.core.build import make_memory_shape
from protokv.core.context import Context
from protokv.core.memory import Memory
from protokv.core.parts import (
    PositionedStep,
    SessionAttachment,
    SessionListener,
    TokenPlacement,
)
from protokv.core.recent import RecentSteps
from protokv.core.settings import MemoryConfig, check_sampled_fps
from protokv.core.step import Grid, Images, StepTokens, StreamClock
from protokv.core.tensors import Specs, TensorDict, Tensors, count_bytes
from protokv.device.runs import Runs
from protokv.errors import ConfigError, ProtoKVError, StateCorrupt
from protokv.state.checkpoint import check_state_fits
from protokv.state.header import State
from protokv.stream.answer import Answer
from protokv.stream.pushed import PushedFrameBuffer
from protokv.stream.reading import QuestionForwarder
from protokv.stream.seeing import PictureTaker, StepsToWatch

__all__ = ["Answer", "Session"]


class Session(PictureTaker):
    """Watch a stream step by step, ask at any time.

    It is a stream with frames, words and attachments; the attachments listen to it. `start` and
    `restore` make one.
    """

    def __init__(
        self,
        backbone: Backbone,
        config: MemoryConfig,
        cache: TokenCache,
        clock: StreamClock,
        attachments: Sequence[SessionAttachment] = (),
    ) -> None:
        """Join a backbone, settings and a clock, as `Stream`."""
        super().__init__(backbone, config, cache, clock, attachments)
        self._memory_listeners = config.listeners()
        self.words_end = None if self.transcript is None else self.transcript.words_end(clock)
        self._pushed = PushedFrameBuffer(clock.stream_time_s)
        self._layout: tuple[Grid, slice | None, int] | None = None

    @classmethod
    def start(
        cls,
        backbone: Backbone,
        config: MemoryConfig,
        *,
        fps: float | None = None,
        attachments: Sequence[SessionAttachment] = (),
    ) -> Self:
        """Start an empty stream: the prompt prefix is forwarded and becomes the sink of the memory.

        `fps` are sampled frames a second, above 0 and at most 240; None: the rate that the model
        was trained at. A stream with words needs a `protokv.words.transcript.Transcript` among its
        attachments. ConfigError: the rate is out of range, or the memory does not fit the model.
        """
        rate = backbone.default_fps if fps is None else fps
        check_sampled_fps(rate)
        prefix = len(backbone.prefix_ids)
        clock = StreamClock(0, 0.0, prefix, 0, fps=rate, frames_per_step=backbone.frames_per_step)
        cache = backbone.new_cache()
        session = cls(backbone, config, cache, clock, attachments)
        with torch.inference_mode():
            embedded = backbone.embed_text(backbone.prefix_ids)
            backbone.forward(embedded, backbone.text_positions(0, prefix), cache)
            keys, values = cache.read_all()
            cache.settle()
        session.begin(keys, values)
        return session

    @classmethod
    def restore(cls, state: State, backbone: Backbone) -> Self:
        """Return the session of a state; its model gets the system prompt that the state was made
        with.
        """
        check_state_fits(state, backbone.identity)
        system = state.settings.get("system")
        if system != backbone.settings.get("system"):
            try:
                backbone = backbone.with_system(system if system is None else str(system))
            except ProtoKVError as error:
                raise StateCorrupt(f"the system prompt of the state: {error.message}") from error
        session = super().restore(state, backbone)
        if system is not None and session.sink_tokens != len(backbone.prefix_ids):
            raise StateCorrupt("the system prompt of the state is not the one it was made with")
        return session

    def _take_memory(self, memory: Memory, sink_tokens: int) -> None:
        super()._take_memory(memory, sink_tokens)
        compact = self.config.positions == "compact"
        self.placement = TokenPlacement(self.backbone, compact, sink_tokens)
        shape = make_memory_shape(self.backbone, self.config, sink_tokens)
        self.recent = RecentSteps(self.config, shape)
        self._renew_runs()

    def _take_recent(self, tensors: Tensors) -> None:
        self.recent.load(tensors)

    def begin_again(self, config: MemoryConfig) -> None:
        """Begin under other settings, as `Stream`."""
        if config != self.config:
            super().begin_again(config)
            self._renew_runs()

    @property
    def listeners(self) -> list[SessionListener]:
        """All who listen, in the order in which they are told."""
        return [*self.attachments, *self._memory_listeners]

    @torch.inference_mode()
    def watch(self, images: Images, time_s: float | None = None, words: Sequence[str] = ()) -> None:
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
        start_s = self.clock.next_start_s if time_s is None else time_s
        self.watch_prepared([self.backbone.prepare(images)], [start_s], [words])

    def push(self, frame: Any, time_s: float, *, bgr: bool = False) -> bool:
        """Take one frame of a stream as it comes; return True if it completed a watched step.

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
        due = self.begin_push(frame, time_s, bgr=bgr)
        if due is not None:
            self.watch_prepared(due.steps, due.starts_s)
        return due is not None

    def begin_push(self, frame: Any, time_s: float, *, bgr: bool = False) -> StepsToWatch | None:
        """Take one frame as `push`, but return the step that it completed; it is to be watched
        before the next frame.
        """
        step = self._pushed.add(frame, time_s, self.clock, bgr=bgr)
        if step is None:
            return None
        images, start_s = step
        return StepsToWatch(self, [self.backbone.prepare(images)], [start_s])

    @torch.inference_mode()
    def embed(self, images: Images, start_s: float, words: Sequence[str] = ()) -> StepTokens:
        """Return a step of images, and its words, at stream time `start_s`, for `take`."""
        return self.backbone.add_words(
            self.backbone.embed_step(images, self.clock.mean_time(start_s)), words
        )

    def _renew_runs(self) -> None:
        self.runs = Runs(self.backbone.device, self.backbone.why_eager)
        self._reader = QuestionForwarder(self.backbone)

    def _note_runs(self) -> None:
        if self.timings is not None and self.backbone.device.type != "cpu":
            for one in (self.backbone.runs, self.runs, self.memory.runs, self._reader.runs):
                self.timings.graphs |= {} if one is None else one.how

    def position_steps(
        self, steps: Sequence[StepTokens], starts_s: Sequence[float]
    ) -> list[PositionedStep]:
        """Give steps their positions: the part of `take` before the forward, all in
        `torch.inference_mode()`.
        """
        if self.outside:
            why = "a protokv.Cache placed the tokens of this state, and a session cannot go on"
            raise ConfigError(why, hint="protokv.Cache.load(path, model) does, or make a new state")
        # Only the first step tells how many tokens a step has. Settings that depend on it, such as
        # the near window of `durable`, are known from here on, and the memory is made with them.
        if not self.clock.steps:
            self.begin_again(self.config.for_step(len(steps[0]) - steps[0].words))
        clock = self.clock
        words_end = self.words_end
        positioned = list[PositionedStep]()
        for one, start_s in zip(steps, starts_s, strict=True):
            positioned.append(self._position(one, start_s, clock, words_end))
            clock = positioned[-1].clock
            words_end = positioned[-1].words_end
        return positioned

    def commit(
        self, steps: Sequence[PositionedStep], keys: Tensor, values: Tensor, cache: TokenCache
    ) -> None:
        """Give forwarded steps to the memory: the part of `take` after the forward."""
        if any(step.tokens.words for step in steps) and self.transcript is None:
            raise ConfigError(
                "words: this session has no transcript",
                hint="start it with attachments=[Transcript()]",
            )
        super().commit(steps, keys, values, cache)

    def _announce(self, step: PositionedStep) -> None:
        for listener in self.listeners:
            listener.before_append(self, step)

    def _note(self, step: PositionedStep, context: Context) -> None:
        self.recent.steps.append((step.tokens, step.positions))
        self.placement.check_limit(step, context)
        for listener in self.listeners:
            listener.after_append(self, step, context)
        self.words_end = step.words_end

    def _position(
        self, tokens: StepTokens, start_s: float, clock: StreamClock, words_end: StreamClock | None
    ) -> PositionedStep:
        """Return the positions of a step that follows `clock`, and the tokens that the memory
        selects of it.
        """
        # Words end a video, as in a prompt of several videos: the steps after them are a video of
        # its own.
        origin = self.sink_tokens
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
        clock = clock.after(start_s, len(placed.positions), max(placed.highest))
        # Made anew only if its grid or its text differs from the last step's.
        if self._layout != (form := (tokens.grid, tokens.visual, len(tokens))):
            self._layout = form
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

    def tensors(self) -> TensorDict:
        """Return what the stream holds, and the recent steps, by the names of a state."""
        return super().tensors() | self.recent.tensors()

    def specs(self) -> Specs:
        """Return the declarations of these tensors."""
        return (*super().specs(), *self.recent.specs())

    @property
    def state_bytes(self) -> int:
        """Bytes of all that is held of the stream, without attachments."""
        return super().state_bytes + count_bytes(*self.recent.tensors().values())
