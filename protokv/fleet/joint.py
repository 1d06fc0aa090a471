"""One forward for several streams: their tokens are concatenated, and each attends to its own context and tokens.

Everything in a layer but attention treats every token by itself, so the streams share each product of matrices. The
results are those of single forwards up to the order of sums. Streams may have different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.core.attention import LocalKV
from protokv.core.context import Context


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream's part of a joint forward: its number of tokens, their context and their local cache."""

    tokens: int
    context: Context
    local_kv: LocalKV


class JointKV(LocalKV):
    """The local keys and values of several streams, in the order of their tokens.

    A forward with it ignores the context that it is given.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = list(streams)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, context: Context, scaling: float) -> Tensor:
        """Attend for each stream by itself; `[Hq, T, D]` of all their tokens."""
        counts = [stream.tokens for stream in self.streams]
        parts = zip(self.streams, *(torch.split(part, counts, 1) for part in (query, key, value)), strict=True)
        return torch.cat([one.local_kv.attend(layer, q, k, v, one.context, scaling) for one, q, k, v in parts], 1)
