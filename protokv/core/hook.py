"""One forward for several streams: their tokens behind one another, attention of each over its own context and tail.

Everything in a layer but attention treats every token by itself, so the streams share each product of matrices, and
the results are those of single forwards up to the order of sums, which kernels choose by the number of rows. Tokens
need not be equally many. Knows nothing of models.

The form in which transformers calls this attention.

Owns the name under which it is registered. Knows nothing of a model but the number of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from protokv.core.attention import LocalKV, attend
from protokv.core.context import Context


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream's part of a joint forward: `tokens` of its own, and what they attend to."""

    tokens: int
    context: Context
    tail: LocalKV


class Joint:
    """Stands for the context and the tail of a forward of several streams; `attend_to` takes it apart."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        """Args: `streams`: in the order of their tokens."""
        self.streams = list(streams)

    @property
    def as_context(self) -> Context:
        """For a model, which hands it on unseen."""
        return cast("Context", self)

    @property
    def as_tail(self) -> LocalKV:
        """For a model, which hands it on unseen."""
        return cast("LocalKV", self)


def attend_to(
    layer: int, query: Tensor, key: Tensor, value: Tensor, context: Context, tail: LocalKV, scaling: float
) -> Tensor:
    """Add keys and values of one layer to a tail, and attend to it and to a context.

    Args:
        layer: which one.
        query: `[Hq, T, D]`, rotated.
        key: `[H, T, D]`, rotated.
        value: `[H, T, D]`.
        context: what they attend to besides; a `Joint` where they are of several streams.
        tail: of their stream; the same `Joint`.
        scaling: the factor on the logits.

    Returns:
        `[Hq, T, D]`.
    """
    if isinstance(tail, Joint):
        counts = [stream.tokens for stream in tail.streams]
        parts = zip(tail.streams, *(torch.split(part, counts, 1) for part in (query, key, value)), strict=True)
        return torch.cat(
            [attend_to(layer, q, k, v, stream.context, stream.tail, scaling) for stream, q, k, v in parts], 1
        )
    keys, values = tail.append(layer, key, value)
    causal = tail.mask(query.shape[1], keys.shape[1], query.shape[0] // keys.shape[0], query.device)
    return attend(query, context.at(layer, query), (keys, values), scaling, causal)


NAME = "protokv"


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    protokv_context: Context,
    protokv_tail: LocalKV,
    **_: Any,
) -> tuple[Tensor, None]:
    """The form transformers calls: query `[1, Hq, T, D]`, key and value `[1, H, T, D]`, returns `[1, T, Hq, D]`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = attend_to(layer, query[0], key[0], value[0], protokv_context, protokv_tail, scaling)
    return out.transpose(0, 1).unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation="protokv"` known to transformers. No mask function goes with it: none is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
