"""`protokv.watching`: a session of a model of transformers that you hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protokv.backbones.registry import wrap_model
from protokv.core.attention import ATTENTION_NAME
from protokv.core.session import Session
from protokv.memories import DEFAULT_MEMORY, MemoryConfig
from protokv.state.reader import load
from protokv.state.store import StatePath


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
    """Watch with a model of transformers that you hold. Its attention is ours inside, and what it was afterwards.

    Args:
        model: of pictures and text, on any device.
        processor: of the model; its tokenizer will do if the files of the model are here.
        budget: as of `Cache`.
        memory: as of `Cache`.
        fps: sampled frames a second; None: the rate that the model was trained at.
        state: saved with the same model, goes on with its own memory and rate; None: a new stream.
        settings: of the memory.

    Raises:
        ConfigError: a setting is wrong, the model is being trained, or no memory serves its attention.
        ModelError, StateError: as `load_backbone` and `load`.
    """
    config = memory if isinstance(memory, MemoryConfig) else MemoryConfig.of(memory, budget=budget, **settings)
    backbone, text = wrap_model(model, processor), model.config.get_text_config(decoder=True)
    before = text._attn_implementation
    try:
        model.set_attn_implementation({"text_config": ATTENTION_NAME})
        yield Session.start(backbone, config, fps=fps) if state is None else load(state, backbone)
    finally:
        model.set_attn_implementation({"text_config": before})
