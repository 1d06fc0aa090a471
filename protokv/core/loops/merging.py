"""Which prototypes are close, and who merges with whom: pair by pair, each compared as far as it can still be close.

The passes are those of `policies.merging`. Knows nothing of what is written then.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.core.loops.compiling import compiled_in_any_order

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]
Whole = NDArray[np.int64]

# Components that are added up before it is asked whether two centres can still be close.
_COMPONENTS = 16


def mark_close_(
    asked: Tensor,
    products: Tensor,
    bounds: Tensor,
    some: Tensor,
    centers: tuple[Tensor, Tensor],
    radii: tuple[float, float],
) -> None:
    """Mark all that have a close one.

    Args:
        asked: `[B, K]` bool.
        products: `[B, m, K]` float32 of each of `some` with all: at least its bound where they may be close.
        bounds: `[B, m]` float32.
        some: `[B, m]` int64, who asks; whose bound is infinity does not.
        centers: keys and values `[B, K, D]` float32.
        radii: squared distances of keys and of values below which two are close.
    """
    # Where none is close, as in most steps, one maximum tells.
    if not (products.amax(2) >= bounds).any():
        return
    near = np.flatnonzero(products.numpy() >= bounds.numpy()[:, :, None])
    held = tuple(part.contiguous().numpy() for part in centers)
    _mark_close_(asked.numpy(), near, some.numpy(), held, np.array(radii) * (1 + 1e-9))


@compiled_in_any_order
def _mark_close_(asked: Flags, near: Whole, some: Whole, centers: tuple[Floats, ...], radii: Doubles) -> None:
    K, D = asked.shape[1], centers[0].shape[2]
    for place in near:
        b, m, other = place // (K * some.shape[1]), place // K % some.shape[1], place % K
        one = some[b, m]
        if asked[b, one] and asked[b, other]:
            continue
        is_close = True
        for which in range(2):
            square, start = 0.0, 0
            while start < D and square < radii[which]:
                stop = min(start + _COMPONENTS, D)
                for d in range(start, stop):
                    apart = np.float64(centers[which][b, one, d]) - np.float64(centers[which][b, other, d])
                    square += apart * apart
                start = stop
            if not square < radii[which]:
                is_close = False
                break
        if is_close:
            asked[b, one] = asked[b, other] = True


def plan(
    centers: tuple[Tensor, Tensor], mass: Tensor, radii: tuple[float, float], passes: int
) -> tuple[Tensor, Tensor]:
    """Who goes into whom, as `policies.merging` has it.

    Args:
        centers: keys and values of those in question, in order, `[B, V, D]` float32.
        mass: `[B, V]` float64, used up; who has none is nobody.
        radii: squared distances below which two are close.
        passes: how many at most.

    Returns:
        The place of the one that each is part of then, `[B, V]` int64; and who had a close one at first, `[B, V]` bool.
    """
    owner = torch.arange(mass.shape[1]).repeat(len(mass), 1)
    again = torch.zeros_like(mass, dtype=torch.bool)
    held = torch.stack(centers, 1).numpy()
    _plan_(held, mass.numpy(), owner.numpy(), again.numpy(), np.array(radii), passes)
    return owner, again


@compiled_in_any_order
def _plan_(centers: Floats, mass: Doubles, owner: Whole, again: Flags, radii: Doubles, passes: int) -> None:
    B, _, V, D = centers.shape
    sums, means = np.empty((2, V, D)), np.empty((2, V, D))
    left, stays, into = np.empty(V, np.bool_), np.empty(V, np.bool_), np.empty(V, np.int64)
    for b in range(B):
        for which in range(2):
            for v in range(V):
                for d in range(D):
                    means[which, v, d] = centers[b, which, v, d]
                    sums[which, v, d] = means[which, v, d] * mass[b, v]
        for v in range(V):
            left[v] = mass[b, v] > 0
        for turn in range(passes):
            many = 0
            for v in range(V):
                stays[v], into[v] = left[v], v
            for later in range(V):
                if not left[later]:
                    continue
                for earlier in range(later):
                    if not left[earlier]:
                        continue
                    is_close = True
                    for which in range(2):
                        square, start = 0.0, 0
                        while start < D and square < radii[which]:
                            stop = min(start + _COMPONENTS, D)
                            for d in range(start, stop):
                                apart = means[which, earlier, d] - means[which, later, d]
                                square += apart * apart
                            start = stop
                        if not square < radii[which]:
                            is_close = False
                            break
                    if not is_close:
                        continue
                    stays[later] = False
                    if turn == 0:
                        again[b, earlier] = again[b, later] = True
                    if stays[earlier] and into[later] == later:
                        into[later] = earlier
                        many += 1
                        # Only the first pass asks who has any close one.
                        if turn > 0:
                            break
            for v in range(V):
                left[v] = left[v] and (turn > 0 or again[b, v]) and into[v] == v
            if many == 0:
                break
            for v in range(V):
                if into[v] == v:
                    continue
                mass[b, into[v]] += mass[b, v]
                for which in range(2):
                    for d in range(D):
                        sums[which, into[v], d] += sums[which, v, d]
                        means[which, into[v], d] = sums[which, into[v], d] / mass[b, into[v]]
            for v in range(V):
                owner[b, v] = into[owner[b, v]]
