"""Of codes: the nearest codeword of each vector, and the likeliest tuples of codes of each histogram (Algorithm 3).

The same as `quantizer`'s, one vector and one histogram after the other; knows nothing of codewords themselves.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.core.loops.compiling import compiled

Whole = NDArray[np.int64]

# Counts below this have their score looked up: most histograms hold the same few numbers.
_KNOWN = 64


def find_nearest(distances: Tensor) -> Tensor:
    """The first of the least of `[B, C, T]` along C: `[B, T]` int64."""
    B, _, T = distances.shape
    found = torch.empty(B, T, dtype=torch.int64)
    _find_nearest_(distances.numpy(), found.numpy())
    return found


@compiled
def _find_nearest_(distances: NDArray[np.float32], found: Whole) -> None:
    for b in range(distances.shape[0]):
        for t in range(distances.shape[2]):
            nearest, least = 0, distances[b, 0, t]
            for c in range(1, distances.shape[1]):
                if distances[b, c, t] < least:
                    nearest, least = c, distances[b, c, t]
            found[b, t] = nearest


def find_modes(counts: Tensor, modes: int, smoothing: float, unit: float, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """The S likeliest code tuples of histograms `[n, G, C]` int32, best first: `[n, S, G]` int64.

    Args:
        counts: the histograms.
        modes: S.
        smoothing: added to each count.
        unit: scores are whole numbers of 1 / `unit`.
        pairs: which prefix and which code, best first, can make one of the S best together, `[p]` int64 each.
    """
    n, G, _ = counts.shape
    found = torch.empty(n, modes, G, dtype=torch.int64)
    _find_modes_(counts.contiguous().numpy(), smoothing, unit, pairs[0].numpy(), pairs[1].numpy(), found.numpy())
    return found


@compiled
def _find_modes_(
    counts: NDArray[np.int32], smoothing: float, unit: float, prefix: Whole, code: Whole, found: Whole
) -> None:
    n, G, C = counts.shape
    S = found.shape[1]
    M = min(S, C)
    # Each subspace takes two turns: its codes are put in order, then what they make of the prefixes before them.
    best, names = np.empty(S, np.int64), np.empty((2 * G, S), np.int64)
    beam, scores, known = np.empty(S, np.int64), np.empty(M, np.int64), np.empty(_KNOWN, np.int64)
    for row in range(n):
        last_total, size = -1, 1
        beam[0] = 0
        for turn in range(2 * G):
            total, few, extends = 0, 0, turn % 2 == 1
            for x in range(len(prefix) if extends else C):
                if not extends:
                    number = int(counts[row, turn // 2, x])
                    total += number
                elif prefix[x] < size:
                    number = beam[prefix[x]] + scores[code[x]]
                else:
                    continue
                # Behind all that are as great: ties go to the better prefix, then to the lower code.
                place = few
                if few < (S if extends else M):
                    few += 1
                elif number > best[few - 1]:
                    place = few - 1
                else:
                    continue
                while place > 0 and best[place - 1] < number:
                    best[place], names[turn, place] = best[place - 1], names[turn, place - 1]
                    place -= 1
                best[place], names[turn, place] = number, x
            if extends:
                size = few
                beam[:size] = best[:size]
                continue
            # Equal counts of one total have one score, which is at most 0; 1 is that of none.
            if total != last_total:
                known[:] = 1
                last_total = total
            for m in range(M):
                count = best[m]
                if count < _KNOWN and known[count] <= 0:
                    scores[m] = known[count]
                    continue
                scores[m] = int(np.rint(math.log((count + smoothing) / (total + C * smoothing)) * unit))
                if count < _KNOWN:
                    known[count] = scores[m]
        for s in range(S):
            at = s % size
            for g in range(G - 1, -1, -1):
                pair = names[2 * g + 1, at]
                found[row, s, g] = names[2 * g, code[pair]]
                at = prefix[pair]
