"""`HybridState`: what sliding and linear layers keep from token to token, besides the memory of the budget.

Layers come in three kinds, and each holds what its attention calls for. Full attention reads the memory. Sliding
attention reads the last W tokens: the W - 1 before the present one are kept, exactly, in the order of the stream.
Linear attention has a recurrent state, and the last inputs of its convolution. A layer may read the tokens of an
earlier layer of its kind, and then holds nothing.

A forward advances what is carried. Its tensors are replaced and never written to, so a fork is free: a step forwards
with a fork, which the memory keeps; a question forwards with a fork that is dropped, so asking changes nothing.
Letters: M layers of the model, Ls sliding, Ll linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from protokv.core.layers import LayerKind, LayerSlot
from protokv.core.sanitize import LARGEST
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec
from protokv.errors import StateCorrupt


class HybridState(StatePart):
    """What the layers of one stream carry.

    Attributes:
        places: of the M layers; empty if only its state knows them.
    """

    def __init__(self, shape: MemoryShape) -> None:
        assert shape.hybrid is not None
        own, device = shape.hybrid, shape.device
        self._shape, self.places, self._device = own, own.places or (), device
        on = {kind: [device] * own.layers for kind in LayerKind}
        if own.devices is not None:
            held = [place for place in self.places if not place.shared]
            where = [one for one, place in zip(own.devices, self.places, strict=True) if not place.shared]
            on = {kind: [at for at, one in zip(where, held, strict=True) if one.kind == kind] for kind in LayerKind}
        allocated = {spec.name: spec for spec in self.declare(shape) if spec.name != "layers.places"}

        def each(name: str, kind: LayerKind) -> list[Tensor]:
            whole = allocated[name].allocate(device) if name in allocated else ()
            return [one.to(at) for one, at in zip(whole, on[kind], strict=False)]

        # Of each layer of its kind: keys and values `[H, W - 1, D]`, and which of them are tokens.
        names = ("sliding.keys", "sliding.values", "sliding.usable")
        self._windows = list(zip(*(each(name, LayerKind.SLIDING) for name in names), strict=True))
        self._recurrent = each("linear.recurrent", LayerKind.LINEAR)
        self._convolution = each("linear.convolution", LayerKind.LINEAR)
        # What the sliding layers of the present forward read, for those that share it.
        self._read: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the places of layers, and the tensors of the kinds that the model has."""
        assert shape.hybrid is not None
        own, f32 = shape.hybrid, torch.float32
        found = [
            TensorSpec(
                "layers.places", ("model_layer", "field"), (own.layers, 2), torch.int32,
                "of each layer of the model: its kind (0 full, 1 sliding, 2 linear), which one of that kind it reads",
            )
        ]  # fmt: skip
        if own.sliding is not None:
            dims = ("sliding_layer", "sliding_head", "sliding_token")
            found += [
                TensorSpec("sliding.keys", (*dims, "sliding_feature"), own.sliding, shape.dtype, "last keys, rotated"),
                TensorSpec("sliding.values", (*dims, "sliding_feature"), own.sliding, shape.dtype, "last values"),
                TensorSpec(
                    "sliding.usable", (dims[0], dims[2]), own.sliding[::2], torch.bool,
                    "False for slots before the stream, and tokens dropped as not finite",
                ),
            ]  # fmt: skip
        if own.recurrent is not None and own.convolution is not None:
            heads = ("linear_layer", "linear_head", "linear_key", "linear_value")
            inputs = ("linear_layer", "channel", "input")
            found += [
                TensorSpec("linear.recurrent", heads, own.recurrent, f32, "recurrent states of linear attention"),
                TensorSpec(
                    "linear.convolution", inputs, own.convolution, shape.dtype, "last inputs of their convolutions"
                ),
            ]
        return tuple(found)

    def fork(self) -> HybridState:
        """Return what a forward may advance without touching this one."""
        other = copy(self)
        other._windows, other._read = list(self._windows), {}
        other._recurrent, other._convolution = list(self._recurrent), list(self._convolution)
        return other

    def window(
        self, place: LayerSlot, key: Tensor, value: Tensor, blocks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let a sliding layer take `T` tokens; return what they attend to, each to itself and the W - 1 before it.

        Args:
            place: of the layer; one that shares takes nothing and reads what its owner read in this forward.
            key: `[H, T, D]`, rotated.
            value: `[H, T, D]`.
            blocks: `[T]` int64; tokens of one block that is not -1 see each other both ways. None: none do.

        Returns:
            Keys and values `[H, W - 1 + T, D]`, and their mask `[T, W - 1 + T]` float32 (`window_mask`).
        """
        T = key.shape[1]
        if not place.shared:
            # Tokens that are not finite are 0, and a window drops them as a memory does.
            sound = torch.maximum(key.abs(), value.abs()).amax((0, 2)) <= LARGEST
            key, value = key.masked_fill(~sound[:, None], 0), value.masked_fill(~sound[:, None], 0)
            held_keys, held_values, usable = self._windows[place.number]
            keys, values = torch.cat((held_keys, key), 1), torch.cat((held_values, value), 1)
            # A query sees its own token in any case.
            self._read[place.number] = keys, values, torch.cat((usable, torch.ones_like(sound)))
            self._windows[place.number] = keys[:, T:], values[:, T:], torch.cat((usable, sound))[T:]
        keys, values, usable = self._read[place.number]
        return keys, values, window_mask(T, usable, blocks)

    def convolution(self, index: int) -> Tensor:
        """Return the last inputs of a linear layer's convolution, `[1, C, k]`."""
        return self._convolution[index][None]

    def recurrent(self, index: int) -> Tensor:
        """Return the recurrent state of a linear layer, `[1, Hv, Dk, Dv]` float32."""
        return self._recurrent[index][None]

    def convolve(self, index: int, inputs: Tensor) -> Tensor:
        """Take `[1, C, T]` inputs of a convolution; return them after those kept, `[1, C, k + T]`."""
        whole = torch.cat((self.convolution(index), inputs), 2)
        self._convolution[index] = whole[0, :, inputs.shape[2] :]
        return whole

    def recur(self, index: int, state: Tensor) -> None:
        """Take the recurrent state `[1, Hv, Dk, Dv]` after the last token."""
        self._recurrent[index] = state[0].float()

    def settle(self, before: HybridState) -> None:
        """Leave recurrent states as they were before a forward that made them not finite; nothing waits for the device.

        A state cannot drop single tokens, as a window does.
        """
        pairs = zip(self._recurrent, self._convolution, before._recurrent, before._convolution, strict=True)
        for index, (state, inputs, old_state, old_inputs) in enumerate(pairs):
            sound = _is_sound(state) & _is_sound(inputs)
            self._recurrent[index] = torch.where(sound, state, old_state)
            self._convolution[index] = torch.where(sound, inputs, old_inputs)
        self._read = {}

    def live_tensors(self) -> dict[str, Tensor]:
        """Return all of it, on one device."""
        found = {"layers.places": torch.tensor([place[:2] for place in self.places], dtype=torch.int32)}
        for name, parts in zip(("keys", "values", "usable"), zip(*self._windows, strict=True), strict=False):
            found[f"sliding.{name}"] = torch.stack([one.to(self._device) for one in parts])
        if self._recurrent:
            found["linear.recurrent"] = torch.stack([one.to(self._device) for one in self._recurrent])
            found["linear.convolution"] = torch.stack([one.to(self._device) for one in self._convolution])
        return found

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that every layer reads one that there is, and as this model says."""
        places = tensors["layers.places"].tolist()
        if self.places and places != [list(place[:2]) for place in self.places]:
            raise StateCorrupt("state: tensor layers.places is not that of this model")
        for kind, sizes in ((LayerKind.SLIDING, self._shape.sliding), (LayerKind.LINEAR, self._shape.recurrent)):
            found = [index for of_kind, index in places if of_kind == kind]
            if sorted(set(found)) != list(range(sizes[0] if sizes else 0)):
                raise StateCorrupt("state: tensor layers.places does not agree with the layers that are held")
        if any(kind not in iter(LayerKind) or index < 0 for kind, index in places):
            raise StateCorrupt("state: tensor layers.places names a kind of layer that there is not")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        if not self.places:
            rows = [(kind, number) for kind, number in tensors["layers.places"].tolist()]
            first = {row: i for i, row in reversed(list(enumerate(rows)))}
            self.places = tuple(LayerSlot(LayerKind(row[0]), row[1], first[row] < i) for i, row in enumerate(rows))

        def copies(name: str, index: int, like: Tensor) -> Tensor:
            return tensors[name][index].to(like.device, copy=True)

        for i, window in enumerate(self._windows):
            names = ("sliding.keys", "sliding.values", "sliding.usable")
            keys, values, usable = (copies(name, i, like) for name, like in zip(names, window, strict=True))
            self._windows[i] = keys, values, usable
        self._recurrent = [copies("linear.recurrent", i, like) for i, like in enumerate(self._recurrent)]
        self._convolution = [copies("linear.convolution", i, like) for i, like in enumerate(self._convolution)]

    def report(self) -> dict[str, Any]:
        """Return the kind of every layer of the model, and what its kind holds."""
        own = self._shape
        rows = [
            {"kind": place.kind.name.lower(), "number": place.number, "shared": place.shared} for place in self.places
        ]
        return {"layer_kinds": rows, "sliding_window": own.sliding[2] + 1 if own.sliding else None}


def _is_sound(numbers: Tensor) -> Tensor:
    """Return `[]` bool, True if all numbers can be used."""
    low, high = numbers.aminmax()
    # A comparison with NaN is false.
    return (low >= -LARGEST) & (high <= LARGEST)


def window_mask(queries: int, usable: Tensor, blocks: Tensor | None = None) -> Tensor:
    """Return the mask of the last tokens of a window and of those before them, `[T, n]` float32, 0 or `-inf`.

    Query `i` of `T` is token `n - T + i`, and sees the `n - T` tokens before it.

    Args:
        queries: T.
        usable: `[n]` bool, False for tokens that nobody sees.
        blocks: `[T]`, as of `HybridState.window`.
    """
    n = len(usable)
    seen = torch.ones(queries, n, dtype=torch.bool, device=usable.device).tril(n - queries)
    if blocks is not None:
        blocks = blocks.to(usable.device)
        seen[:, n - queries :] |= (blocks[:, None] == blocks) & (blocks >= 0)
    return torch.zeros(queries, n, device=usable.device).masked_fill(~(seen.triu() & usable), -torch.inf)
