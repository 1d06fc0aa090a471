"""`Tail`: the keys and values of the tokens being forwarded now, which no memory has seen yet.

Owns its buffers, and the mask that makes it causal. Knows no model and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.layers import runs_of


class Tail:
    """Keys and values `[L, H, n, D]` of the tokens forwarded since the context was taken, each seen causally.

    While watching, the tail is one step and becomes what the memory appends. While asking, it is the question and
    the answer so far, and is dropped afterwards: this is why asking changes nothing. Each layer appends in turn, and
    `length` moves when the last layer has. What fills the tail at once is kept as the model made it; otherwise there
    are buffers for `capacity` tokens, allocated once. Where the layers of a model stand on several devices, each has
    its keys and values on its own.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        capacity: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        """An empty tail.

        Args:
            layers: L.
            kv_heads: H.
            capacity: tokens that it has room for.
            head_size: D.
            dtype: of keys and values.
            device: where all is read together, and of all layers unless they have their own.
            layer_devices: device of each layer.
        """
        self._runs = runs_of(layer_devices or [device] * layers)
        self._device, self._layers, self._capacity, self._dtype = device, layers, capacity, dtype
        self._size = (kv_heads, capacity, head_size)
        # Of each layer: keys and values.
        self._held: list[tuple[Tensor, Tensor]] = []
        self._masks: dict[tuple[int, int, int, torch.device], Tensor] = {}
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[H, T, D]` of one layer; return all of that layer, `[H, n + T, D]`, on its device."""
        start, stop = self.length, self.length + keys.shape[1]
        if stop > self._capacity:
            raise ValueError(f"a tail of {self._capacity} tokens cannot take {stop}")
        if layer == self._layers - 1:
            self.length = stop
        if not start and stop == self._capacity:
            self._held.append((keys, values))
            return keys, values
        if not self._held:
            self._allocate()
        held_keys, held_values = self._held[layer]
        held_keys[:, start:stop] = keys
        held_values[:, start:stop] = values
        return held_keys[:, :stop], held_values[:, :stop]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, D]` of one layer, on its device; between forwards."""
        keys, values = self._held[layer]
        return keys[:, : self.length], values[:, : self.length]

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Keys, rotated as the model made them, and values of all layers, `[L, H, n, D]` each, in one place."""
        H, _, D = self._size
        if not self.length:
            keys, values = torch.empty(2, self._layers, H, 0, D, dtype=self._dtype, device=self._device)
        else:
            parts = [held[:, : self.length].to(self._device) for pair in zip(*self._held, strict=True) for held in pair]
            keys, values = torch.stack(parts).view(2, self._layers, H, self.length, D)
        return keys, values

    def mask(self, queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
        """`causal_mask` of a forward, made once for all of its layers on a device."""
        wanted = (queries, tokens, groups, device)
        if queries > 1 and wanted not in self._masks:
            mask = causal_mask(*wanted)
            assert mask is not None
            # Another forward has another length: what was made for the last one is of no use.
            self._masks = {key: held for key, held in self._masks.items() if key[:3] == wanted[:3]} | {wanted: mask}
        return self._masks.get(wanted)

    def _allocate(self) -> None:
        for run in self._runs:
            keys, values = torch.empty(2, len(run), *self._size, dtype=self._dtype, device=run.device)
            self._held.extend(zip(keys, values, strict=True))


def causal_mask(queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
    """What the `T` last of `n` tokens see of these, for the query heads of a KV head one below the other.

    Returns:
        `[1, groups * T, n]` float32, 0 or `-inf`; None where one token sees everything.
    """
    if queries == 1:
        return None
    mask = torch.full((groups, queries, tokens), -torch.inf, device=device).triu_(tokens - queries + 1)
    return mask.view(1, groups * queries, tokens)
