"""The published models: what each takes, which are in the local cache, and which fit into the free memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from protokv.backbones.hub import cached_models
from protokv.backbones.sizes import DTYPES_OF_WEIGHTS, KNOWN_MODELS, KnownModel
from protokv.core.build import declare_memory
from protokv.core.hybrid import CarriedShape
from protokv.core.tensors import MemoryShape
from protokv.memories import MemoryConfig
from protokv.state.setup import list_devices

# About what the chat templates have in front of a video.
_PROMPT_TOKENS = 16


def describe_models() -> Iterator[dict[str, Any]]:
    """Yield a row per published model, plain JSON."""
    return rows_of(list_devices([]), cached_models())


def rows_of(devices: Sequence[Mapping[str, Any]], cached: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield a row per published model for these devices and these bytes in the cache by name."""
    room = {one["name"]: one["free_bytes"] for one in devices if one["free_bytes"] is not None}
    for model in KNOWN_MODELS:
        needed = {dtype: model.needed_bytes(dtype) for dtype in DTYPES_OF_WEIGHTS}
        yield {
            "name": model.name,
            "family": model.family,
            "parameters": model.parameters,
            "download_bytes": model.download_bytes,
            "cached_bytes": cached.get(model.name, 0),
            "weight_bytes": {dtype: model.weight_bytes(dtype) for dtype in DTYPES_OF_WEIGHTS},
            "memory_bytes": needed,
            "fits": {dtype: [one for one, free in room.items() if size <= free] for dtype, size in needed.items()},
            "frames_per_step": model.frames_per_step,
            "visual_tokens": model.tokens,
            "state_bytes": state_bytes(model, MemoryConfig.of("durable")),
        }


def state_bytes(model: KnownModel, config: MemoryConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of the tensors of a full state without thumbnails, as a dry run says them.

    The prompt has a usual length.
    """
    held = model.sliding, model.recurrent, model.convolution
    shape = MemoryShape(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        position_components=model.position_components,
        sink_tokens=_PROMPT_TOKENS,
        dtype=dtype,
        device=torch.device("cpu"),
        frames_per_step=model.frames_per_step,
        # A few bytes a layer say which is of which kind.
        carried=CarriedShape(model.layers, *held) if any(held) else None,
    )
    return sum(spec.nbytes for spec in declare_memory(config, shape) if not spec.optional)
