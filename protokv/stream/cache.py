"""`protokv.Cache`: a stream in the shape that transformers calls, for any model that you hold.

`commit` gives what was forwarded to the stream as one step. A fork shares the stream and keeps its
own tokens, so asking changes nothing. What a model says of positions and angles is read in
`protokv.backbones.decoder`. Letters: T tokens since the last commit, P position components; the
others as in `protokv.backbones.stream_cache`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from protokv.backbones.adapter import TransformersBackbone
from protokv.backbones.held import HeldModel
from protokv.backbones.stream_cache import (
    CACHE_ARGUMENT,
    StreamCache,
    StreamCacheLayer,
    collect_layer_tensors,
)
from protokv.core.context import Context
from protokv.core.memory import Memory, SingleDeviceMemory
from protokv.core.modes import plain_tensors
from protokv.core.parts import PositionedStep
from protokv.core.settings import check_sampled_fps, choose_memory
from protokv.core.step import StepTokens, StreamClock
from protokv.core.tensors import count_bytes
from protokv.errors import ConfigError
from protokv.memories import DEFAULT_MEMORY, MemoryConfig
from protokv.state.reader import load_state
from protokv.state.store import StatePath
from protokv.stream.steps import make_ids, make_steps, read_prompt
from protokv.stream.stream import Stream
from protokv.texts import Keywords


class Cache(StreamCache):
    """The memory of a stream, in place of the cache of a model of transformers that you hold.

    It holds `budget` tokens, whatever was seen. Layers with full attention read it; sliding, linear
    and shared layers are transformers' own.

    Example:
        >>> import protokv
        >>> cache = protokv.Cache(model, budget="6k")
        >>> for step in steps:
        ...     _ = model(**cache.step(step))
        ...     cache.commit()
        >>> answer = model.generate(**cache.question(question), max_new_tokens=8)

        Asking changes nothing. The cache can be saved, and continues elsewhere to the same bytes:

        >>> cache.save("talk.safetensors")
        >>> again = protokv.Cache.load("talk.safetensors", model)
        >>> again.seen == cache.seen
        True

    `cache.step(inputs)` adds the cache, a mask of the whole length and, for M-RoPE, positions to
    what a processor returned; `cache.question(inputs)` does so with a fork. Both are what you would
    write by hand:

        model(**inputs, past_key_values=cache)
        mask = torch.ones(1, cache.seen + n)
        model.generate(**inputs, attention_mask=mask, past_key_values=cache.fork())
    """

    # Positions `[T, P]` of what was forwarded since the last commit.
    _positions: list[Tensor]
    _expected: Tensor | None  # of the tokens that are being forwarded
    _mask: Tensor | None  # of these and all before, `[1, n]`
    # how many tokens there were when the forward began that has not ended; None: it has
    _began: int | None
    _called: bool  # whether that forward is of the whole model
    # of a fork for a question: its ids, and how many tokens there were before; else None
    _asked: tuple[Tensor, int] | None
    # what wrote the prompt of `watch`; None: nothing was watched
    _backbone: TransformersBackbone | None
    decoder: HeldModel
    stream: Stream

    def __init__(
        self,
        model: Any,
        budget: int | str = "6k",
        memory: str | MemoryConfig = DEFAULT_MEMORY,
        *,
        sink: int = 4,
        fps: float | None = None,
        **settings: Any,
    ) -> None:
        """Make an empty cache; the memory is made at the first commit.

        Args:
            model: a model of transformers, on any device. The attention of its decoder is
                `protokv` from here on; it works as before where there is no cache of ours.
            budget: tokens kept, such as 6000 or "6k".
            memory: which memory (`protokv.memories`), or its settings with its budget.
            sink: how many of the first tokens are kept for ever, unless the first commit is a
                prefix.
            fps: sampled frames a second; None: the rate that the model was trained at.
            settings: of the memory.

        Raises:
            ConfigError: a setting is wrong, or the model has layers or attention that no memory
                serves.
        """
        held = HeldModel(model)
        self._rate = held.default_fps if fps is None else fps
        check_sampled_fps(self._rate)
        self._sink = sink
        config = choose_memory(memory, budget, settings)
        self._start(held, config)

    def _start(self, held: HeldModel, config: MemoryConfig) -> None:
        clock = StreamClock(0, 0.0, 0, 0, self._rate, held.frames_per_step)
        self._open(Stream(held, config, held.new_cache(), clock))

    def _open(self, stream: Stream) -> None:
        """Hold the layers of a stream. ConfigError: no cache serves its memory or its attention."""
        assert isinstance(stream.backbone, HeldModel)
        _refuse_memory(stream.config)
        super().__init__(stream.backbone)
        self.stream = stream
        self._positions = []
        self._expected = None
        self._mask = None
        self._began = None
        self._called = False
        self._asked = None
        self._backbone = None
        assert isinstance(stream.cache, StreamCache)
        self.take(stream.cache)
        self._read_memory()

    def reset(self) -> None:
        """Forget everything: the stream begins anew."""
        self._start(self.decoder, self.config)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, of those since the last commit; ValueError if there are not so
        many.
        """
        super().crop(tokens_to_remove)
        if self._positions:
            self._positions = [torch.cat(self._positions)[: self.length]]

    @property
    def config(self) -> MemoryConfig:
        """The settings of the memory."""
        return self.stream.config

    @property
    def memory(self) -> Memory | None:
        """The memory; None before the first commit."""
        return self.stream.memory if self.stream.begun else None

    @property
    def steps(self) -> int:
        """How many steps the memory has taken."""
        return self.stream.clock.steps

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        local = [
            held
            for layer in self.memory_layers
            for held in (layer.keys, layer.values)
            if held is not None
        ]
        own = count_bytes(*local, *collect_layer_tensors(self.layers).values())
        return own + (self.stream.state_bytes if self.stream.begun else 0)

    @plain_tensors()
    def commit(
        self,
        *,
        prefix: bool = False,
        coordinates: Tensor | None = None,
        time_s: float | None = None,
    ) -> None:
        """Give what was forwarded since the last commit to the memory, as one step of the stream.

        Args:
            prefix: of the first commit: all of it is kept for ever, such as a system prompt.
            coordinates: `[T, 2]` float32, (x, y) of each token in the picture, from 0 to 1; None:
                the middle.
            time_s: stream time of its first frame; None: the step follows the last one without a
                gap.

        Raises:
            ConfigError: a prefix is not the first commit, the layers differ in size, or a fork is
                no longer current.
        """
        if self.roll_back():
            why = "the last forward failed, so there is nothing to commit of it"
            raise ConfigError(why, hint="forward the step again")
        if not (T := self.length):
            return
        self._check_current()
        self.check_read()
        stream = self.stream
        if prefix and stream.begun:
            raise ConfigError(
                "a prefix comes first, and the cache has steps already", hint="commit it as a step"
            )
        keys, values = self.read_all()
        positions = torch.cat([one.to(keys.device) for one in self._positions])
        highest = int(positions.max())
        if coordinates is None:
            coordinates = torch.full((T, 2), 0.5, device=keys.device)
        first = 0
        clock = stream.clock
        if not stream.begun:
            first = T if prefix else min(self._sink, T)
            stream.begin(keys[:, :, :first], values[:, :, :first])
            sunk = int(positions[:first].max()) + 1 if first else 0
            clock = stream.clock = replace(clock, next_position=sunk)
        steps = []
        if first < T:
            start_s = clock.next_start_s if time_s is None else time_s
            tokens = StepTokens(keys.new_empty(T - first, 0), (1, T - first))
            after = clock.after(start_s, T - first, highest)
            steps = [
                PositionedStep(tokens, positions[first:], coordinates[first:], (highest,), after)
            ]
        self.settle()
        stream.outside |= self.decoder.position_components > 1
        stream.commit(steps, keys[:, :, first:], values[:, :, first:], self)
        self._positions = []
        self._read_memory()

    @plain_tensors()
    def fork(self, context: Context | None = None) -> Self:
        """Return a cache for a question: it reads the same memory, and what it takes stays its own.

        The next commit ends it. A fork that commits is the one that the stream goes on with.
        """
        self.roll_back()
        other = super().fork(context)
        other._asked = None
        other._positions = list(self._positions)
        if self.memory is not None:
            other._take_context(context or self.memory.recall())
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a cache with a memory of its own, which a stream may go on with; the model is not
        copied.
        """
        other = self.fork()
        other.stream = deepcopy(self.stream, memo)
        other._read_memory()
        return other

    def save(self, path: StatePath) -> None:
        """Write it as a state; the suffix chooses the form: `.safetensors`, `.zarr` or `.pt`.
        StateError if it cannot.

        ConfigError if tokens were forwarded since the last commit, or nothing was committed.
        """
        if not self.stream.begun or self.length:
            raise ConfigError(
                "only committed tokens are saved",
                hint="call commit() first, and save before a question",
            )
        self._check_current()
        self.decoder.identify()
        self.stream.save(path)

    @classmethod
    def load(cls, path: StatePath, model: Any, processor: Any = None) -> Self:
        """Return a cache that goes on with a state, whether `save` or a session left it, with the
        same model in the same dtype on any device.

        With a processor, as of `watch`, a question may be its text alone. StateError if nothing is
        there, it is damaged, or another model made it.
        """
        state = load_state(path)
        held = HeldModel(model)
        held.identify()
        held.settings = {name: one for name, one in state.settings.items() if name != "kind"}
        cache = cls.__new__(cls)
        cache._rate = state.clock.fps
        cache._sink = 0
        cache._open(Stream.restore(state, held))
        if processor is not None:
            cache._backbone = read_prompt(model, processor)
        return cache

    def step(self, inputs: Mapping[str, Any]) -> Keywords:
        """Return the arguments of the model for new tokens of the stream:
        `model(**cache.step(inputs))`.

        `inputs` are of the new tokens alone, as a processor gives them: `input_ids` `[1, T]`, and
        pictures.
        """
        self.roll_back()
        if self.length > self.config.budget:
            why = f"{self.length} tokens wait for a commit, more than the budget"
            raise ConfigError(why, hint="call cache.commit() after each step")
        # Without a mask all tokens are seen; a mask of the new ones alone would hide those before.
        kept = {name: value for name, value in _admit(inputs).items() if name != "attention_mask"}
        return self._continue(kept)

    def watch(
        self, processor: Any, frames: Iterable[Any], times: Iterable[float]
    ) -> Iterator[Keywords]:
        """Yield the arguments of the model for each step of a video, in the prompt that it was
        trained on: `model(**inputs)`. The loop commits each step.

        Args:
            processor: of the model, or its tokenizer if the files of the model are here.
            frames: pictures of PIL, or `[height, width, 3]` uint8 RGB. They are sampled at the rate
                of the cache.
            times: stream time of each frame, in seconds.

        Raises:
            ConfigError: the model tells its steps no times, a step was not forwarded, or
                `make_steps` says why.
        """
        self._backbone = read_prompt(self.decoder.model, processor)
        return self._walk(make_steps(self.stream, self._backbone, frames, times))

    def _walk(self, steps: Iterator[tuple[Keywords, Keywords]]) -> Iterator[Keywords]:
        for inputs, how in steps:
            yield self.step(inputs)
            if not self.length:
                why = "the inputs of a step were not forwarded"
                raise ConfigError(why, hint="call model(**inputs), and leave commit() to the loop")
            self.commit(**how)

    def question(self, inputs: Mapping[str, Any] | str) -> Keywords:
        """Return the arguments for a question, with a fork:
        `model.generate(**cache.question(inputs))`.

        transformers takes ids for new tokens if the mask is longer than they are, so it has the
        whole length. Where a model has positions of several components, they follow what was
        committed. `inputs` are as for `step`, or the text of a question after `watch`.
        """
        if isinstance(inputs, str):
            if self._backbone is None:
                raise ConfigError(
                    "the cache has not watched, so it knows no prompt for a text",
                    hint="protokv.Cache.load(path, model, processor) does, or give inputs of ids",
                )
            inputs = {"input_ids": make_ids(self._backbone, self._backbone.suffix_ids(inputs))}
        ids = _admit(inputs).get("input_ids")
        if ids is None:
            raise ConfigError("a question has input_ids", hint="give what a processor returns")
        mask = torch.ones(
            1, self.get_seq_length() + ids.shape[1], dtype=torch.int64, device=ids.device
        )
        fork = self.fork()
        fork._asked = (ids, fork.length)
        found = dict(inputs) | {"attention_mask": mask}
        if not getattr(self.decoder.model.generation_config, "use_cache", True):
            found["use_cache"] = True
        return fork._continue(found)

    def refuse_again(self, ids: Tensor | None) -> None:
        """Refuse the tokens of a question that this cache has read already. ConfigError."""
        if self._asked is None or ids is None:
            return
        known, begin = self._asked
        if self.length > begin and ids.shape == known.shape and bool((ids == known).all()):
            why = "this question was asked, and the cache has its answer"
            raise ConfigError(why, hint="ask each with its own cache.question(inputs)")

    def _continue(self, inputs: Mapping[str, Any]) -> Keywords:
        found = dict(inputs) | self.decoder.step_types(inputs, self) | {CACHE_ARGUMENT: self}
        if self.decoder.position_components > 1 and found.get("position_ids") is None:
            ends = (int(one.max()) + 1 for one in self._positions if len(one))
            start = max(self.stream.clock.next_position, *ends, 0)
            found["position_ids"] = self.decoder.position_ids(inputs) + start
        return found

    def begin(
        self, positions: Tensor | None = None, mask: Any = None, *, called: bool = False
    ) -> None:
        """Hear that tokens are about to be forwarded, `[T, P]`; None: one after another.

        The hooks of a model call it when the model is called, and again when its decoder is.
        """
        if called or not self._called:
            self.roll_back()
            self._began = self.length
            self._called = called
        self._expected = positions
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def end(self, *, called: bool = False) -> None:
        """Hear that they have been forwarded."""
        if called == self._called:
            self._began = None
            self._called = False

    @plain_tensors()
    def roll_back(self) -> bool:
        """Forget the tokens of a forward that failed; return whether one did."""
        if self._began is None:
            return False
        kept = self._began
        self._began = None
        self._called = False
        for layer in self.memory_layers:
            layer.crop(layer.length - kept)
            layer.is_read = True
        self._positions = [torch.cat(self._positions)[:kept]] if kept else []
        if len(self.memory_layers) < len(self.layers):
            held = self.stream.cache.layers
            for i, layer in enumerate(self.layers):
                if not isinstance(layer, StreamCacheLayer):
                    self.layers[i] = self._fork_layer(held[i])
            if kept:
                super().reset()
                self._positions = []
                raise ConfigError(
                    "a forward failed, and other layers cannot forget a part of a step",
                    hint="forward all of the step again",
                )
        return True

    def note(self, T: int) -> None:
        """Take note of where `T` tokens stand that the first layer is about to store.

        ConfigError: the cache is a fork that is no longer current, or a mask hides tokens, or is
        that of a question which has been asked.
        """
        self._check_current()
        start = self.seen + self.memory_layers[0].length
        mask = self._mask
        if mask is not None and mask.shape[1] != start + T:
            raise ConfigError(
                "the attention_mask is not of all tokens so far and the new ones",
                hint="ask each question with its own cache.question(inputs)",
            )
        if mask is not None and T > 1:
            _refuse_hidden(mask)
        positions = self._expected
        if positions is None or len(positions) != T:
            line = torch.arange(start, start + T)
            positions = line[:, None].expand(-1, self.decoder.position_components)
        self._positions.append(positions)
        self._expected = None

    def _read_memory(self) -> None:
        """Read a memory that has changed."""
        memory = self.memory
        self._take_context(Context() if memory is None else memory.context())

    def _take_context(self, context: Context) -> None:
        self.context = context
        self._clock = self.stream.clock

    def _check_current(self) -> None:
        if not self.stream.intact:
            why = "an error came while the memory took a step, so it is of no use"
            raise ConfigError(why, hint="go on from the last state: protokv.Cache.load")
        if self._clock is not self.stream.clock:
            why = "the cache that this one was forked from has taken a step since"
            raise ConfigError(why, hint="ask with a new fork")


def _admit(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(inputs, Mapping) or not {"input_ids", "inputs_embeds"} & set(inputs):
        raise ConfigError(
            f"expected inputs of the model by name, with input_ids, got {type(inputs).__name__}",
            hint="give what a processor returns: processor(text=..., return_tensors='pt')",
        )
    if isinstance(mask := inputs.get("attention_mask"), Tensor):
        _refuse_hidden(mask)
    return inputs


def _refuse_hidden(mask: Tensor) -> None:
    """Refuse a mask that hides tokens, such as padded ones. ConfigError."""
    if not bool(mask.all()):
        why = "the attention_mask hides tokens, and a memory would keep them"
        raise ConfigError(why, hint="leave out padded tokens")


def _refuse_memory(config: MemoryConfig) -> None:
    """Refuse settings of a memory that needs a session, which sees more than keys and values.
    ConfigError.
    """
    memory = config.memory
    selects = memory.select is not SingleDeviceMemory.select
    moves = config.positions != "stream" or config.recent_frames
    if selects or memory.reads_queries or config.listeners() or moves:
        raise ConfigError(
            f"the memory {config.name} reads more than keys and values at stream positions",
            hint="protokv.Session keeps it, and so does `protokv ingest`",
        )
