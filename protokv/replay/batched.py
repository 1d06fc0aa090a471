"""Several streams in one batch: sessions of one model and one kind of memory that share forwards and a memory.

A memory treats every KV head by itself, so one memory can hold the heads of all streams, one stream behind the other.
Its operations are then paid once a step instead of once a stream, which is most of the cost with a small model. Each
stream reads its own heads, and its results do not depend on the others, up to the order of sums. All streams take a
step at the same time, and their steps are of one size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Never

import torch
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.context import Context, EmptyContext, SlotContext
from protokv.core.memory import Memory
from protokv.core.session import Session
from protokv.core.step import StepKV, StepTokens
from protokv.fleet.joint import JointKV, Stream
from protokv.memories import DurableConfig, MemoryConfig
from protokv.memories.assembly import build_memory, rotary_of, shape_of
from protokv.memories.durable.repeats import Repeats

SHARED: Final = frozenset({"durable", "continuity", "paper", "infinipot-v", "sliding-window", "last-frames"})
"""Memories that several streams can share: bounded, with equally many tokens in every stream, and independent of
features and questions. `durable` is not in a deep model: what repeats in one stream does not in another."""


class BatchedStreams:
    """Streams under one kind of memory.

    Attributes:
        sessions: one a stream. Ask them as any session; they watch through `take` alone.
    """

    def __init__(self, backbone: Backbone, config: MemoryConfig, streams: int, *, fps: float | None = None) -> None:
        """Start all of them.

        Args:
            backbone: the model.
            config: the memory; if it cannot be shared (`SHARED`), each stream has its own.
            streams: the number of streams.
            fps: as of `Session.start`.

        Raises:
            ConfigError: as `Session.start`.
        """
        self._backbone = backbone
        self.sessions = [Session.start(backbone, config, fps=fps) for _ in range(streams)]
        self._alone = self.sessions[0].memory.bytes_held
        self._whole: _Whole | None = None
        alone = config.recent_frames or backbone.layer_devices is not None or backbone.carried is not None
        shape = shape_of(backbone)
        alone = alone or (isinstance(config, DurableConfig) and Repeats.acts(config, shape))
        if config.name in SHARED and streams > 1 and not alone:
            joint = replace(shape, kv_heads=streams * shape.kv_heads, streams=streams)
            memory = build_memory(config, joint, rotary_of(backbone, config))
            self._whole, self._together = _Whole(memory, streams, shape.kv_heads), memory.bytes_held
            self._whole.start([session.memory.tensors() for session in self.sessions])
            for stream, session in enumerate(self.sessions):
                session.memory = _Part(self._whole, stream)

    @torch.inference_mode()
    def take(self, steps: Sequence[StepTokens], start_s: float) -> None:
        """Take the next step of each stream at one stream time; see `Session.take`."""
        if self._whole is None:
            for session, step in zip(self.sessions, steps, strict=True):
                session.take([step], [start_s])
            return
        batches = [
            session.position_steps([step], [start_s]) for session, step in zip(self.sessions, steps, strict=True)
        ]
        joint = JointKV([Stream(len(one.forward_positions), one.context, one.local_kv) for one in batches])
        self._backbone.forward(
            torch.cat([one.embeddings for one in batches]),
            torch.cat([one.forward_positions for one in batches]),
            EmptyContext(),
            joint,
            steps=[tokens for one in batches for tokens in one.tokens],
        )
        for session, one in zip(self.sessions, batches, strict=True):
            session.append(one)

    def skip(self, steps: Sequence[StepTokens], start_s: float) -> None:
        """Skip a step of each stream; see `Session.skip`."""
        for session, step in zip(self.sessions, steps, strict=True):
            session.skip(step, start_s)

    def bytes_held(self, stream: int) -> int:
        """Return the bytes of one stream's memory, as if it were alone."""
        if self._whole is None:
            return self.sessions[stream].memory.bytes_held
        # Bytes that change later (residuals are released once codebooks are fitted) belong to the heads.
        since = self._whole.memory.bytes_held - self._together
        return self._alone + since // len(self.sessions)


class _Whole:
    """A memory with the heads of all streams."""

    def __init__(self, memory: Memory, streams: int, heads: int) -> None:
        self.memory, self._streams, self._heads = memory, streams, heads
        self._came: list[StepKV] = []
        self._shown: dict[str, Context] = {}

    def start(self, prefixes: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the prompt prefix of each stream from its own memory."""
        keys, values = (torch.cat([one[name] for one in prefixes], 1) for name in ("sink.keys", "sink.values"))
        self.memory.start(keys, values)

    def append(self, step: StepKV) -> None:
        """Collect the steps of all streams, in their order, and append them with the last one."""
        self._came.append(step)
        self._shown.clear()
        if len(self._came) == self._streams:
            keys, values = (torch.cat([getattr(one, name) for one in self._came], 1) for name in ("keys", "values"))
            self._came.clear()
            self.memory.append(replace(step, keys=keys, values=values))

    def show(self, kind: str, stream: int) -> Context:
        """Return the part of one stream of `context` or `recall`, computed once for all."""
        if kind not in self._shown:
            self._shown[kind] = self.memory.context() if kind == "context" else self.memory.recall()
        shown = self._shown[kind]
        assert isinstance(shown, SlotContext)
        return shown.of_heads(slice(stream * self._heads, (stream + 1) * self._heads))


class _Part(Memory):
    """The heads of one stream, as a memory that a session reads and appends to."""

    def __init__(self, whole: _Whole, stream: int) -> None:
        self._whole, self._stream = whole, stream
        self.joins_steps = whole.memory.joins_steps

    def append(self, step: StepKV) -> None:
        self._whole.append(step)

    def context(self) -> Context:
        return self._whole.show("context", self._stream)

    def recall(self) -> Context:
        return self._whole.show("recall", self._stream)

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise RuntimeError("a stream among several has no state of its own; ask BatchedStreams")

    start = specs = tensors = load = check = promises = nbytes = report = _refuse
