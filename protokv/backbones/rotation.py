"""The rotation of queries and keys in three operations of torch in place of five.

A model of transformers rotates by a function of its module, which other models call, too. So each
layer of attention gets a forward of its own, in which that name means another function.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

_NAME = "apply_rotary_pos_emb"  # transformers' function

Rotated = tuple[Tensor, Tensor]


def speed_rotation(model: Module) -> None:
    """Let the layers of attention of a model rotate in fewer operations, in place.

    Results differ by rounding alone. Left alone are layers whose `forward` somebody has replaced,
    and functions that compute something else.
    """
    made = dict[Any, _Rotation]()
    for module in model.modules():
        # Without what warns of old names of arguments.
        forward: Any = unwrap(type(module).forward)
        theirs = getattr(forward, "__globals__", {}).get(_NAME)
        if theirs is None or "forward" in vars(module) or _NAME not in forward.__code__.co_names:
            continue
        if theirs not in made:
            made[theirs] = _Rotation(theirs)
        rotation = made[theirs]
        if rotation.agrees:
            names = forward.__globals__ | {_NAME: rotation}
            own = FunctionType(
                forward.__code__,
                names,
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(own, module)


class _Rotation:
    """Rotates as a function of transformers does."""

    def __init__(self, theirs: Callable[..., Rotated]) -> None:
        self._theirs = theirs
        # The sines of the last forward, and the same with the sign of the other half. Both change
        # at once, as several threads may call a model.
        self._signed: tuple[Tensor | None, Tensor | None] = (None, None)
        self.agrees = self._agrees()

    def _agrees(self) -> bool:
        """Return whether both functions compute the same of numbers that are no angles."""
        some = torch.linspace(-2, 3, 48).view(4, 1, 2, 6)
        q, k, cos, sin = some[0, None], some[1, None], some[2], some[3]
        try:
            expected = self._theirs(q, k, cos, sin)
        # It takes something else.
        except (TypeError, RuntimeError):
            return False
        found = self(q, k, cos, sin)
        return all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        """Return queries and keys `[B, H, T, D]`, rotated by the angles of cos and sin `[B, T,
        D]`.
        """
        if cos.shape[-1] != q.shape[-1] or cos.dtype != q.dtype:
            return self._theirs(q, k, cos, sin, unsqueeze_dim)
        half = q.shape[-1] // 2
        known, signed = self._signed
        if known is not sin or signed is None:
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self._signed = sin, signed
        cos = cos.unsqueeze(unsqueeze_dim)
        signed = signed.unsqueeze(unsqueeze_dim)
        first, second = (torch.addcmul(x * cos, x.roll(half, -1), signed) for x in (q, k))
        return first, second
