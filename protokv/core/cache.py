"""`MemoryCache`: a memory behind transformers' own cache, for any model of transformers.

`commit` gives what was forwarded to the memory as one step of the stream. A fork shares the memory
and keeps its own tokens, so asking changes nothing. What a model says of positions and angles is
read in `protokv.core.decoder`. Letters: T tokens since the last commit, P position components; the
others as in `protokv.core.stream_cache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor

from protokv.core.attention import ATTENTION_NAME, AttentionMasks
from protokv.core.build import build_memory
from protokv.core.context import EMPTY_BIAS, Context, KVSegment
from protokv.core.decoder import LanguageDecoder
from protokv.core.memory import Memory, SingleDeviceMemory
from protokv.core.settings import MemoryConfig
from protokv.core.step import split_steps
from protokv.core.stream_cache import (
    ATTENTION_HINT,
    CACHE_ARGUMENT,
    StreamCache,
    collect_layer_tensors,
)
from protokv.core.tensors import MemoryShape, count_bytes
from protokv.device.arrays import concat_rows
from protokv.errors import ConfigError

_STOCK: Final = ("sdpa", "eager")


@dataclass(slots=True)
class _Shared:
    """What a cache and its forks have in common: the memory, None before the first commit, and a
    count of commits.
    """

    memory: Memory | None = None
    commits: int = 0


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make no graph, and tensors that may be written to in any mode in which a user's model
    runs.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class MemoryCache(StreamCache):
    """A memory as a cache of transformers; `protokv.Cache` is the one for users, which also saves
    and loads.
    """

    steps: int  # that the memory has taken

    def __init__(self, model_or_config: Any, config: MemoryConfig, sink: int) -> None:
        """Make it empty, as `protokv.Cache`. ConfigError: no memory serves the model, or this one
        needs a session.
        """
        self.decoder = LanguageDecoder(model_or_config)
        _refuse_memory(config)
        super().__init__(self.decoder.config)
        self.config = config
        self.sink = sink
        self._check_attention()
        self.reset()

    def reset(self) -> None:
        """Forget everything: the stream begins anew."""
        super().reset()
        self._shared = _Shared()
        self._positions = []
        self._settled = {}
        self.seen = 0
        self.steps = 0
        # Positions are read from the device only when a question needs them.
        self._next_position = torch.zeros((), dtype=torch.int64)
        self._take_context(Context())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, of those since the last commit; ValueError if there are not so
        many.
        """
        super().crop(tokens_to_remove)
        if self._positions:
            self._positions = [torch.cat(self._positions)[: self.length]]

    # Positions `[T, P]` of what was forwarded since the last commit, and slots by layer, where they
    # are read as keys.
    _positions: list[Tensor]
    _slots: list[KVSegment]

    @property
    def memory(self) -> Memory | None:
        """The memory; None before the first commit."""
        return self._shared.memory

    @property
    def next_position(self) -> int:
        """One more than the highest position that was committed. This waits for the device."""
        return int(self._next_position)

    @property
    def reads_in_place(self) -> bool:  # type: ignore[override]
        """Whether the model attends with our function."""
        return bool(self.decoder.config._attn_implementation == ATTENTION_NAME)

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
        return own + (0 if self.memory is None else self.memory.bytes_held)

    @_plain_tensors()
    def commit(self, *, prefix: bool = False, coordinates: Tensor | None = None) -> None:
        """Give what was forwarded since the last commit to the memory, as one step of the stream.

        Args:
            prefix: of the first commit: all of it is kept for ever, such as a system prompt.
            coordinates: `[T, 2]` float32, (x, y) of each token in the picture, from 0 to 1; None:
                the middle.

        Raises:
            ConfigError: a prefix is not the first commit, the layers differ in size, or a fork is
                no longer current.
        """
        if not (T := self.length):
            return
        self._check_current()
        if prefix and self.memory is not None:
            raise ConfigError(
                "a prefix comes first, and the cache has steps already", hint="commit it as a step"
            )
        keys, values = self.read_all()
        # One after another where nobody noted them.
        line = torch.arange(self.seen, self.seen + T, device=keys.device)[:, None].expand(
            -1, self.decoder.components
        )
        is_known = sum(map(len, self._positions)) == T
        positions = (
            torch.cat([one.to(keys.device) for one in self._positions]) if is_known else line
        )
        if coordinates is None:
            coordinates = torch.full((T, 2), 0.5, device=keys.device)
        memory = self.memory
        first = 0
        if memory is None:
            first = T if prefix else min(self.sink, T)
            devices = [layer.device for layer in self.memory_layers]
            shape = self._shape(
                keys.shape[1], keys.shape[3], positions.shape[1], first, keys.dtype, devices
            )
            memory = build_memory(self.config, shape, self.decoder.angles)
            memory.start(keys[:, :, :first], values[:, :, :first])
        if first < T:
            places = [(positions[first:], coordinates[first:], 0)]
            memory.append(
                *split_steps(keys[:, :, first:], values[:, :, first:], places, self.steps)
            )
            self.steps += 1
        self._next_position = torch.maximum(
            self._next_position.to(positions.device), positions.max() + 1
        )
        self._positions = []
        self.settle()
        self._take_memory(memory)

    @_plain_tensors()
    def fork(self, context: Context | None = None) -> Self:
        """Return a cache for a question: it reads the same memory, and what it takes stays its own.

        The next commit ends it. A fork that commits is the one that the stream goes on with.
        """
        other = super().fork(context)
        other._positions = list(self._positions)
        if self.memory is not None:
            other._take_context(context or self.memory.recall())
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a cache with a memory of its own, which a stream may go on with; the model is not
        copied.
        """
        memo[id(self.decoder)] = self.decoder
        other = copy(self)
        memo[id(self)] = other
        for name, held in vars(self).items():
            if name not in ("context", "_slots", "masks"):
                setattr(other, name, deepcopy(held, memo))
        for layer in other.memory_layers:
            layer.owner = other
        other.masks = AttentionMasks()
        other._take_context(Context() if other.memory is None else other.memory.context())
        return other

    def step(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model for new tokens of the stream:
        `model(**cache.step(inputs))`.

        `inputs` are of the new tokens alone, as a processor gives them: `input_ids` `[1, T]`, and
        pictures.
        """
        # Without a mask all tokens are seen; a mask of the new ones alone would hide those before.
        kept = {name: value for name, value in _admit(inputs).items() if name != "attention_mask"}
        return self._continue(kept)

    def question(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for a question, with a fork:
        `model.generate(**cache.question(inputs))`.

        transformers takes ids for new tokens if the mask is longer than they are, so it has the
        whole length. Where a model has positions of several components, they follow what was
        committed. `inputs` are as for `step`.
        """
        ids: Tensor = _admit(inputs)["input_ids"]
        mask = torch.ones(
            1, self.get_seq_length() + ids.shape[1], dtype=torch.int64, device=ids.device
        )
        return self.fork()._continue(dict(inputs) | {"attention_mask": mask})

    def _continue(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(inputs) | self.decoder.step_types(inputs, self) | {CACHE_ARGUMENT: self}
        if self.decoder.components > 1 and found.get("position_ids") is None:
            start = max(
                self.next_position, 0, *(int(one.max()) + 1 for one in self._positions if len(one))
            )
            found["position_ids"] = self.decoder.position_ids(inputs) + start
        return found

    def record(self, positions: Tensor | None, T: int) -> None:
        """Note where `T` tokens are forwarded, `[T, P]`; None: one after another. The model's hook
        calls it.
        """
        if positions is None:
            start = self.get_seq_length()
            positions = torch.arange(start, start + T)[:, None].expand(-1, self.decoder.components)
        self._positions.append(positions)

    @_plain_tensors()
    def slots(self, number: int) -> KVSegment | None:
        """Return the slots in use of a layer, to be read as keys; None: there are none, or they are
        read in place.
        """
        self._check_current()
        if self.memory is None or self.reads_in_place:
            return None
        if not self._slots:
            self._slots = self._read_slots()
        return self._slots[number]

    def _read_slots(self) -> list[KVSegment]:
        """Return the slots in use of each layer; all layers have as many, for one mask serves them
        all.
        """
        # A memory that chooses by the query is refused, so none is needed.
        read = [
            self.context.at(number, torch.empty(0)) for number in range(len(self.memory_layers))
        ]
        used = [
            concat_rows([part.bias for part in parts], 1).gt(EMPTY_BIAS).any(0) for parts in read
        ]
        most = max(int(one.sum()) for one in used)
        found = []
        D = self._head_size
        for parts, one in zip(read, used, strict=True):
            some = one.int().argsort(descending=True, stable=True)[:most]
            held = ([getattr(part, name) for part in parts] for name in ("keys", "values", "bias"))
            keys, values, bias = (concat_rows(each, 1)[:, some] for each in held)
            # In half precision attention keeps columns of the bias behind keys and values.
            found.append(KVSegment(self.decoder.from_halves(keys[..., :D]), values[..., :D], bias))
        shares = "reuse" in (getattr(self.decoder.config, "kv_sharing_modes", None) or ())
        if shares and any(bool(one.bias.any()) for one in found):
            why = "this model has layers that share keys, and stock attention hands them no bias"
            raise ConfigError(why, hint=ATTENTION_HINT)
        return found

    def to_halves(self, x: Tensor) -> Tensor:
        """Return `[..., D]` with the features of rotated pairs half a key apart."""
        return self.decoder.to_halves(x)

    def _shape(
        self,
        H: int,
        D: int,
        components: int,
        sink: int,
        dtype: torch.dtype,
        devices: list[torch.device],
    ) -> MemoryShape:
        """Return what a memory must know of the model."""
        self._head_size = D
        return MemoryShape(len(devices), H, D, components, sink, dtype, devices[0], devices)

    def _take_memory(self, memory: Memory) -> None:
        """Read a memory that has changed."""
        self._shared.memory = memory
        self._shared.commits += 1
        self._take_context(memory.context())
        self._check_attention()

    def _take_context(self, context: Context) -> None:
        self.context = context
        self._commits = self._shared.commits
        self._slots = []

    def _check_current(self) -> None:
        if self._commits != self._shared.commits:
            why = "the cache that this one was forked from has taken a step since"
            raise ConfigError(why, hint="ask with a new fork")

    def _check_attention(self) -> None:
        """Refuse attention that cannot read the memory. ConfigError."""
        name = self.decoder.config._attn_implementation
        if name == ATTENTION_NAME:
            return
        if name not in _STOCK:
            raise ConfigError(
                f"the attention {name} takes no bias, so it cannot read a memory",
                hint=ATTENTION_HINT,
            )
        if CACHE_ARGUMENT != "cache":
            # Since 5.24 models hand the arguments of their attention function to the cache.
            raise ConfigError(
                f"the attention {name} takes a bias from transformers 5.24 on", hint=ATTENTION_HINT
            )
        if not self.config.memory.hides_recent:
            why = (
                f"{self.config.name} chooses by the query, which the attention {name} does not show"
            )
            raise ConfigError(why, hint=ATTENTION_HINT)


def _admit(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(inputs, Mapping) or not {"input_ids", "inputs_embeds"} & set(inputs):
        why = f"expected inputs of the model by name, with input_ids, got {type(inputs).__name__}"
        raise ConfigError(
            why, hint="give what a processor returns: processor(text=..., return_tensors='pt')"
        )
    return inputs


def _refuse_memory(config: MemoryConfig) -> None:
    """Refuse settings of a memory that needs a session, which sees more than keys and values.
    ConfigError.
    """
    by_session = "protokv.Session keeps it, and so does `protokv ingest`"
    if config.memory.select is not SingleDeviceMemory.select or config.listeners():
        raise ConfigError(
            f"the memory {config.name} reads more than keys and values", hint=by_session
        )
    for name, plain in (("positions", "stream"), ("recent_frames", 0)):
        if getattr(config, name) != plain:
            raise ConfigError(
                f"{name}: a cache has {plain} only, not {getattr(config, name)}", hint=by_session
            )
