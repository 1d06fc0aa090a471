"""`Stream`: a memory, the layers of a model beside it, and a clock.

Tokens are forwarded with a fork of the layers. `commit` gives their keys and values to the memory,
moves the clock, and goes on from the fork. A question is forwarded with a fork that is dropped, so
asking changes nothing. `make_state` and `restore` are the way to a state and back. Knows no frames
and no text: `Session` and `protokv.Cache` add these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from protokv.core.attention import TokenCache
from protokv.core.backbone import StreamModel
from protokv.core.build import (
    build_memory,
    choose_rotary,
    make_memory_shape,
    restore_memory,
)
from protokv.core.context import Context
from protokv.core.layers import declare_layer_tensors
from protokv.core.memory import Memory
from protokv.core.modes import plain_tensors
from protokv.core.packing import split_tensors, trim_unused_slots
from protokv.core.parts import PositionedStep, SessionAttachment
from protokv.core.settings import MemoryConfig
from protokv.core.step import StreamClock, split_steps
from protokv.core.tensors import Specs, TensorDict, Tensors, count_bytes
from protokv.errors import StateCorrupt
from protokv.state.checkpoint import (
    ATTACHED_TENSORS,
    OUTSIDE_KIND,
    check_state_fits,
    read_attachments,
    read_state_memory_config,
    save_state,
)
from protokv.state.header import State
from protokv.state.store import StatePath
from protokv.texts import JsonObject


class Stream:
    """The engine of a session and of a cache.

    The cache has what layers of the model hold that the memory does not serve. Attachments are what
    its state has besides, such as thumbnails.
    """

    memory: Memory  # from the prompt prefix on: see `begun`
    sink_tokens: int = 0  # the prompt prefix, which the memory keeps for ever
    begun: bool = False
    # memory and clock agree about the steps seen; after an error within a step they do not: do not
    # save
    intact: bool = True
    # whether a model placed the tokens by itself, at positions that a session cannot tell
    outside: bool = False

    def __init__(
        self,
        backbone: StreamModel,
        config: MemoryConfig,
        cache: TokenCache,
        clock: StreamClock,
        attachments: Sequence[SessionAttachment] = (),
    ) -> None:
        """Join a model, settings and a clock; `begin` or `restore` makes the memory."""
        self.backbone = backbone
        self.config = config
        self.cache = cache
        self.clock = clock
        self.attachments = list(attachments)

    def begin(self, keys: Tensor, values: Tensor) -> None:
        """Make the memory, with the prompt prefix `[L, H, P0, D]` each. ConfigError: it does not
        fit the model.
        """
        self._prefix = (keys, values)
        self._take_memory(self._make_memory(self.config), keys.shape[2])

    def _take_memory(self, memory: Memory, sink_tokens: int) -> None:
        self.memory = memory
        self.sink_tokens = sink_tokens
        self.begun = True

    @plain_tensors()
    def _make_memory(self, config: MemoryConfig) -> Memory:
        keys, values = self._prefix
        shape = make_memory_shape(self.backbone, config, keys.shape[2])
        memory = build_memory(config, shape, choose_rotary(self.backbone, config))
        memory.start(keys, values)
        return memory

    def begin_again(self, config: MemoryConfig) -> None:
        """Begin under other settings: the memory, which has seen no step yet, is made anew."""
        del self.memory  # both at once take twice the bytes
        try:
            self.memory = self._make_memory(config)
            self.config = config
        except BaseException:
            self.memory = self._make_memory(self.config)
            raise

    def commit(
        self, steps: Sequence[PositionedStep], keys: Tensor, values: Tensor, cache: TokenCache
    ) -> None:
        """Give forwarded steps to the memory, and go on from the settled cache that forwarded them.

        Keys and values are `[L, H, T, D]` of all steps, at stream positions.
        """
        places = [(step.positions, step.coordinates, step.tokens.words) for step in steps]
        queries = torch.stack(cache.queries) if cache.queries else None
        parts = split_steps(keys, values, places, self.clock.steps, queries)
        self.intact = False
        for step, kv in zip(steps, parts, strict=True):
            self._announce(step)
            self.memory.append(kv)
            self._note(step, cache.context)
            self.clock = step.clock
        self.cache.take(cache)
        self.intact = True

    def _announce(self, step: PositionedStep) -> None:
        """Tell of a step that the memory is about to take."""

    def _note(self, step: PositionedStep, context: Context) -> None:
        """Take note of a step that the memory has taken, and that attended to `context`."""

    def tensors(self) -> TensorDict:
        """Return what the memory holds, and the layers beside it, by the names of a state."""
        return self.memory.tensors() | self.cache.tensors()

    def specs(self) -> Specs:
        """Return the declarations of these tensors."""
        return (*self.memory.specs(), *declare_layer_tensors(self.cache.tensors()))

    @property
    def state_bytes(self) -> int:
        """Bytes of all that is held of the stream, without attachments."""
        return self.memory.bytes_held + count_bytes(*self.cache.tensors().values())

    def make_state(self, *, source: JsonObject | None = None, complete: bool = False) -> State:
        """Return its state, without unused slots; arguments as `save`.

        The tensors may be the live ones, so save the state before the next step.
        """
        tensors = self.tensors()
        specs = self.specs()
        attached = {
            name: tensor for one in self.attachments for name, tensor in one.live_tensors().items()
        }
        outside = {"kind": OUTSIDE_KIND} if self.outside else {}
        return State(
            backbone=self.backbone.identity,
            memory=self.config.to_dict(),
            clock=self.clock,
            settings=dict(self.backbone.settings) | outside,
            source=source,
            complete=complete,
            tensors=trim_unused_slots(tensors, specs) | attached,
            specs=(*specs, *ATTACHED_TENSORS),
        )

    def save(
        self, path: StatePath, *, source: JsonObject | None = None, complete: bool = False
    ) -> int:
        """Write its state so that the path holds the old or the new one whole; return the stored
        bytes.

        The suffix of the path chooses the form. `source` is the record of the watched source, plain
        JSON; `complete` says that it has ended.

        Raises:
            StateLocked: another writer is writing the state.
            StateError: the state cannot be written; the old one is still there.
        """
        return save_state(self.make_state(source=source, complete=complete), path)

    @classmethod
    def restore(cls, state: State, backbone: Any) -> Self:
        """Return the stream of a state.

        StateMismatch: another model or dtype made it; the field is named. StateCorrupt: its memory
        or clock makes no sense.
        """
        check_state_fits(state, backbone.identity)
        config = read_state_memory_config(state)
        clock = state.clock
        attachments = read_attachments(state.tensors)
        attached = {spec.name for one in attachments for spec in one.declare()}
        kept = {name: one for name, one in state.tensors.items() if name not in attached}
        layers, recent, own = split_tensors(kept, "layers", "recent")
        sink = own.get("sink.keys")
        if sink is None or sink.ndim != 4:
            raise StateCorrupt("state: tensor sink.keys is missing, or not [layer, head, token, D]")
        P0 = sink.shape[2]
        if clock.next_position < P0 or clock.frames_per_step != backbone.frames_per_step:
            raise StateCorrupt(f"the clock of the state is impossible for this model: {clock}")
        shape = make_memory_shape(backbone, config, P0)
        rotary = choose_rotary(backbone, config)
        memory = restore_memory(config, shape, rotary, own, clock.steps)
        cache = backbone.new_cache(layers, clock.tokens_seen + P0)
        stream = cls(backbone, config, cache, clock, attachments)
        if not clock.steps:
            stream._prefix = (sink.to(shape.device), own["sink.values"].to(shape.device))
        stream._take_memory(memory, P0)
        stream._take_recent(recent)
        stream.outside = state.settings.get("kind") == OUTSIDE_KIND
        return stream

    def _take_recent(self, tensors: Tensors) -> None:
        """Take the steps that are read again from a state; a stream without frames keeps none."""
