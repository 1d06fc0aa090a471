"""For a model of transformers that you hold: `protokv.Cache` and `protokv.watching`.

The one is a memory as a cache, which saves itself as a state; the other makes a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from protokv.backbones.files import hash_config
from protokv.backbones.loading import digest_model_parameters
from protokv.backbones.registry import wrap_model
from protokv.core.attention import ATTENTION_NAME
from protokv.core.backbone import BackboneIdentity
from protokv.core.build import restore_memory
from protokv.core.cache import MemoryCache
from protokv.core.layers import declare_layer_tensors
from protokv.core.packing import split_tensors, trim_unused_slots
from protokv.core.session import Session
from protokv.core.step import StreamClock
from protokv.core.stream_cache import StreamCacheLayer
from protokv.errors import ConfigError, StateCorrupt, StateMismatch
from protokv.memories import DEFAULT_MEMORY, MemoryConfig
from protokv.state.checkpoint import (
    CACHE_STATE_KIND,
    check_state_fits,
    read_state_memory_config,
    save_state,
)
from protokv.state.header import State
from protokv.state.reader import load, load_state
from protokv.state.store import StatePath


class Cache(MemoryCache):
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

        model(**inputs, past_key_values=cache) model.generate(**inputs, attention_mask=torch.ones(1,
        cache.seen + n), past_key_values=cache.fork())
    """

    def __init__(
        self,
        model_or_config: Any,
        budget: int | str = "6k",
        memory: str | MemoryConfig = DEFAULT_MEMORY,
        *,
        sink: int = 4,
        **settings: Any,
    ) -> None:
        """Make an empty cache; the memory is made at the first commit.

        Args:
            model_or_config: a model of transformers, or its config. Positions come from a model;
                with a config they are taken to be consecutive.
            budget: tokens kept, such as 6000 or "6k".
            memory: which memory (`protokv.memories`), or its settings with its budget.
            sink: how many of the first tokens are kept for ever, unless the first commit is a
                prefix.
            settings: of the memory.

        Raises:
            ConfigError: a setting is wrong, or the model has layers or attention that no memory
                serves.
        """
        if not isinstance(memory, MemoryConfig):
            memory = MemoryConfig.of(memory, budget=budget, **settings)
        super().__init__(model_or_config, memory, sink)

    def save(self, path: StatePath) -> None:
        """Write it as a state; the suffix chooses the form: `.safetensors`, `.zarr` or `.pt`.
        StateError if it cannot.

        ConfigError if tokens were forwarded since the last commit, or nothing was committed.
        """
        if self.memory is None or self.length:
            raise ConfigError(
                "only committed tokens are saved",
                hint="call commit() first, and save before a question",
            )
        own = self.memory.tensors()
        specs = self.memory.specs()
        others = {name: held.contiguous() for name, held in self.tensors().items()}
        sink = own["sink.keys"].shape[2]
        state = State(
            backbone=self._identify(own["sink.keys"].dtype),
            memory=self.config.to_dict(),
            # A cache knows steps, not seconds. As everywhere, the prompt prefix is not counted.
            clock=StreamClock(
                self.steps, float(self.steps), self.next_position, self.seen - sink, 1.0, 1
            ),
            settings={"kind": CACHE_STATE_KIND},
            tensors=trim_unused_slots(own, specs) | others,
            specs=(*specs, *declare_layer_tensors(others)),
        )
        save_state(state, path)

    @classmethod
    def load(cls, path: StatePath, model: Any) -> Self:
        """Return a cache that goes on where `save` left it, with the same model in the same dtype
        on any device.

        StateError if nothing is there, it is damaged, or another model made it.
        """
        state = load_state(path)
        if state.settings.get("kind") != CACHE_STATE_KIND:
            raise StateMismatch(
                f"{path} is the state of a session", hint="open it with protokv.load"
            )
        cache = cls(model, memory=read_state_memory_config(state))
        if "sink.keys" not in state.tensors or state.tensors["sink.keys"].ndim != 4:
            raise StateCorrupt(f"{path}: tensor sink.keys is missing")
        check_state_fits(state, cache._identify(state.tensors["sink.keys"].dtype))
        cache._restore(state)
        return cache

    def _restore(self, state: State) -> None:
        layers, own = split_tensors(state.tensors, "layers")
        devices, (L, H, sink, D) = self.decoder.layer_devices(), own["sink.keys"].shape
        if len(self.memory_layers) != L:
            raise StateCorrupt(f"the state has {L} layers, the model has {len(self.memory_layers)}")
        on = [
            devices[i] for i, layer in enumerate(self.layers) if isinstance(layer, StreamCacheLayer)
        ]
        shape = self._shape(H, D, self.decoder.components, sink, own["sink.keys"].dtype, on)
        memory = restore_memory(self.config, shape, self.decoder.angles, own, state.clock.steps)
        self.steps = state.clock.steps
        self._next_position = torch.tensor(state.clock.next_position)
        self.load_layers(layers, devices, state.clock.tokens_seen + sink)
        self._take_memory(memory)

    def _identify(self, dtype: torch.dtype) -> BackboneIdentity:
        """Return which model this is; its weights by a sample of each."""
        model = self.decoder.model
        config = self.decoder.config
        return BackboneIdentity(
            name=str(
                getattr(config if model is None else model.config, "name_or_path", "")
                or config.model_type
            ),
            family=config.model_type,
            config_hash=hash_config(config.to_dict()),
            dtype=str(dtype).removeprefix("torch."),
            weights_digest="" if model is None else digest_model_parameters(model),
        )


@contextmanager
def watching(
    model: Any,
    processor: Any,
    budget: int | str = "6k",
    memory: str | MemoryConfig = DEFAULT_MEMORY,
    *,
    fps: float | None = None,
    state: StatePath | None = None,
    **settings: Any,
) -> Iterator[Session]:
    """Watch with a model of transformers that you hold. Its attention is ours inside, and what it
    was afterwards.

    Args:
        model: of pictures and text, on any device.
        processor: of the model; its tokenizer will do if the files of the model are here.
        budget: as of `Cache`.
        memory: as of `Cache`.
        fps: sampled frames a second; None: the rate that the model was trained at.
        state: saved with the same model, goes on with its own memory and rate; None: a new stream.
        settings: of the memory.

    Raises:
        ConfigError: a setting is wrong, the model is being trained, or no memory serves its
            attention.
        ModelError, StateError: as `load_backbone` and `load`.
    """
    config = (
        memory
        if isinstance(memory, MemoryConfig)
        else MemoryConfig.of(memory, budget=budget, **settings)
    )
    backbone = wrap_model(model, processor)
    text = model.config.get_text_config(decoder=True)
    before = text._attn_implementation
    try:
        model.set_attn_implementation({"text_config": ATTENTION_NAME})
        yield Session.start(backbone, config, fps=fps) if state is None else load(state, backbone)
    finally:
        model.set_attn_implementation({"text_config": before})
