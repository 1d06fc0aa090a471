"""Product quantizer of residuals: fit codebooks, encode, and find the likeliest tuples of codes (Algorithm 3).

A vector of size D is split into G parts; each part is named by the nearest of its C codewords. Pure functions over
batches. Everything is deterministic: ties go to the lowest code, and scores of tuples are whole numbers, so that equal
sums are equal.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# Log probabilities in units of 2**-32: sums are then exact in any order, on any device.
_SCORE_UNIT = 2.0**32
_GOLDEN = (5**0.5 - 1) / 2
ITERATIONS = 10
"""Lloyd iterations of a fit."""
SMOOTHING = 1e-5
"""epsilon of the histogram probabilities. The paper leaves it open; this is its first author's value."""
BEAM_PER_MODE = 4
"""The paper's beam is B = 4 S. `naive` keeps so many; `top_modes` needs only S."""


def fit(samples: Tensor, subquantizers: int, codewords: int) -> Tensor:
    """Return the codebook `[G, C, D / G]` of samples `[n, D]`, `n >= C`, by Lloyd's k-means in each subspace.

    A codeword that no sample chooses moves to the sample that is farthest from its own codeword, the next one to the
    next.
    """
    n, G, C = samples.shape[0], subquantizers, codewords
    parts = samples.view(n, G, -1).transpose(0, 1).contiguous()
    codebook = _spread_out(parts, C)
    squares = parts.square().sum(2)
    for _ in range(ITERATIONS):
        distance = codebook.square().sum(2)[:, None] - 2 * torch.bmm(parts, codebook.transpose(1, 2))
        nearest, code = distance.min(2)
        member = torch.nn.functional.one_hot(code, C).to(parts.dtype)
        size = member.sum(1)
        means = torch.bmm(member.transpose(1, 2), parts) / size.clamp(min=1)[..., None]
        empty = size == 0
        # A sample alone in its cluster becomes a codeword by itself; a second one there would be lost.
        alone = size.gather(1, code) == 1
        farthest = (nearest + squares).masked_fill(alone, -torch.inf).topk(C, dim=1).indices
        farthest = farthest.gather(1, (empty.cumsum(1) - 1).clamp(min=0))
        worst_served = parts.gather(1, farthest[..., None].expand_as(means))
        codebook = torch.where(empty[..., None], worst_served, means)
    return codebook


def _spread_out(parts: Tensor, codewords: int) -> Tensor:
    """Choose first codewords `[G, C, d]` among samples `[G, n, d]`: k-means++ (Arthur and Vassilvitskii, 2007).

    Each is drawn with a chance that grows with the squared distance to those already drawn, so that residuals which
    occur many times (a recycled token meets its own copy: exactly 0) take one codeword. Multiples of the golden ratio
    stand in for random numbers.
    """
    n = parts.shape[1]
    chosen = [parts[:, 0]]
    distance = torch.full(parts.shape[:2], torch.inf, device=parts.device)
    for c in range(1, codewords):
        distance = torch.minimum(distance, (parts - chosen[-1][:, None]).square().sum(2))
        below = distance.double().cumsum(1)
        pick = (below <= below[:, -1:] * (c * _GOLDEN % 1.0)).sum(1).clamp(max=n - 1)
        chosen.append(parts.gather(1, pick[:, None, None].expand(-1, 1, parts.shape[2])).squeeze(1))
    return torch.stack(chosen, 1)


def encode(codebook: Tensor, vectors: Tensor) -> Tensor:
    """Return codes `[B, T, G]` int64 of vectors `[B, T, D]` under one codebook each, `[B, G, C, D / G]`."""
    B, G, C, d = codebook.shape
    parts = vectors.view(B, -1, G, d).transpose(1, 2).reshape(B * G, -1, d)
    words = codebook.reshape(B * G, C, d)
    distance = torch.baddbmm(words.square().sum(2)[:, None], parts, words.transpose(1, 2), alpha=-2)
    return distance.argmin(2).view(B, G, -1).transpose(1, 2)


def decode(codebook: Tensor, heads: Tensor, codes: Tensor) -> Tensor:
    """Return vectors `[n, S, D]` of codes `[n, S, G]` under the codebooks `[B, G, C, D / G]` of `heads` `[n]`."""
    part = torch.arange(codebook.shape[1], device=codes.device)
    return codebook[heads[:, None, None], part, codes].flatten(2)


def top_modes(counts: Tensor, modes: int) -> Tensor:
    """Return the S likeliest tuples of codes of histograms `[n, G, C]`, best first: `[n, S, G]` int64.

    This is Algorithm 3 with a beam of S instead of B >= S, which is as good: the score of a tuple is a sum over
    subspaces, so a prefix that S other prefixes beat loses to those, whatever comes after. For the same reason only
    pairs (i-th best prefix, j-th best code) with i * j <= S can be among the S best. Ties go to the better prefix, then
    to the lower code. Where there are fewer than S tuples in all, they are repeated in order.
    """
    G, C = counts.shape[1:]
    total = counts.sum(2, keepdim=True).double() + C * SMOOTHING
    scores = ((counts.double() + SMOOTHING) / total).log().mul_(_SCORE_UNIT).round_().long()
    scores, codes = (part[:, :, :modes] for part in scores.sort(dim=2, descending=True, stable=True))
    beam, chosen = scores[:, 0], codes[:, 0, :, None]
    for g in range(1, G):
        prefix, code = _pairs(beam.shape[1], codes.shape[2], modes, counts.device)
        sums = beam[:, prefix] + scores[:, g, code]
        best = sums.sort(dim=1, descending=True, stable=True).indices[:, :modes]
        beam = sums.gather(1, best)
        last = codes[:, g].gather(1, code[best])[..., None]
        chosen = torch.cat((chosen.gather(1, prefix[best][..., None].expand(-1, -1, g)), last), 2)
    return chosen[:, torch.arange(modes, device=counts.device) % chosen.shape[1]]


@lru_cache(maxsize=32)
def _pairs(prefixes: int, codes: int, modes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the pairs of the i-th of some prefixes and the j-th of some codes with i * j <= S, counted from 0."""
    pairs = [(i, j) for i in range(prefixes) for j in range(min(codes, modes // (i + 1)))]
    prefix, code = torch.tensor(pairs, device=device).t().contiguous()
    return prefix, code
