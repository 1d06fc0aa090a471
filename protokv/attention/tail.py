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
    the answer so far, and is dropped afterwards: this is why asking changes nothing. The buffers are allocated once
    for `capacity` tokens; each layer appends to them in turn, and `length` moves when the last layer has. Where the
    layers of a model stand on several devices, each has its keys and values on its own.
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
            device: of `keys` and `values`, and of all layers unless they have their own.
            layer_devices: device of each layer.
        """
        runs = runs_of(layer_devices or [device] * layers)
        self._device, self._layers, self._capacity = device, layers, capacity
        sizes = [((len(run), kv_heads, capacity, head_size), run.device) for run in runs]
        self._keys = [torch.zeros(size, dtype=dtype, device=where) for size, where in sizes]
        self._values = [torch.zeros_like(part) for part in self._keys]
        # Of each layer: its run, and its place in it.
        self._place = [(index, place) for index, run in enumerate(runs) for place in range(len(run))]
        self._masks: dict[tuple[int, int, int, torch.device], Tensor] = {}
        self.length = 0

    @property
    def keys(self) -> Tensor:
        """`[L, H, n, D]`, rotated as the model made them; joined on one device."""
        return self._joined(self._keys)

    @property
    def values(self) -> Tensor:
        """`[L, H, n, D]`; joined on one device."""
        return self._joined(self._values)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[H, T, D]` of one layer; return all of that layer, `[H, n + T, D]`, on its device."""
        start, stop = self.length, self.length + keys.shape[1]
        if stop > self._capacity:
            raise ValueError(f"a tail of {self._capacity} tokens cannot take {stop}")
        run, place = self._place[layer]
        held_keys, held_values = self._keys[run][place], self._values[run][place]
        held_keys[:, start:stop] = keys
        held_values[:, start:stop] = values
        if layer == self._layers - 1:
            self.length = stop
        return held_keys[:, :stop], held_values[:, :stop]

    def mask(self, queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
        """`causal_mask` of a forward, made once for all of its layers on a device."""
        wanted = (queries, tokens, groups, device)
        if queries > 1 and wanted not in self._masks:
            mask = causal_mask(*wanted)
            assert mask is not None
            # Another forward has another length: what was made for the last one is of no use.
            self._masks = {key: held for key, held in self._masks.items() if key[:3] == wanted[:3]} | {wanted: mask}
        return self._masks.get(wanted)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        here = [part[:, :, : self.length] for part in parts]
        return here[0] if len(here) == 1 else torch.cat([part.to(self._device) for part in here])


def causal_mask(queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
    """What the `T` last of `n` tokens see of these, for the query heads of a KV head one below the other.

    Returns:
        `[1, groups * T, n]` float32, 0 or `-inf`; None where one token sees everything.
    """
    if queries == 1:
        return None
    line = torch.arange(tokens, device=device)
    future = line > line[tokens - queries :, None]
    mask = torch.zeros(groups, queries, tokens, device=device).masked_fill_(future, -torch.inf)
    return mask.view(1, groups * queries, tokens)
