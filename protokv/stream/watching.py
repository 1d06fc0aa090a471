"""`protokv.watching`: a session around a model and a processor that somebody holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from protokv.backbones.decoder import require_model_object
from protokv.backbones.registry import wrap_model
from protokv.core.attention import ATTENTION_NAME
from protokv.core.settings import choose_memory
from protokv.errors import ConfigError
from protokv.memories import DEFAULT_MEMORY, MemoryConfig
from protokv.state.store import StatePath
from protokv.stream.opening import load
from protokv.stream.session import Session


def _refuse_outside(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "this session of protokv.watching has ended with its `with` block",
        hint="ask inside of it, or save the session there and go on with state=PATH",
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
    was afterwards; the session ends with the block. ConfigError if it is used later.

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
    config = choose_memory(memory, budget, settings)
    require_model_object(model)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    try:
        # A model without a class of ours gets our attention here already.
        backbone = wrap_model(model, processor)
        model.set_attn_implementation({"text_config": ATTENTION_NAME})
        session = (
            Session.start(backbone, config, fps=fps) if state is None else load(state, backbone)
        )
        try:
            yield session
        finally:
            # Under the model's own attention it would answer something else.
            for name in ("forward", "embed_text", "prepare"):
                setattr(session.backbone, name, _refuse_outside)
    finally:
        model.set_attn_implementation({"text_config": before})
