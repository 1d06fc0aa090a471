"""Product quantiser of residuals: fit codebooks, encode, and find the likeliest code tuples (Algorithm 3).

A vector of size D is cut into G parts; each part is named by the nearest of its C codewords. Pure functions
over batches; which residual belongs to which prototype is known to `residual` alone. Everything is
deterministic: ties go to the lowest code, and scores of code tuples are whole numbers, so that equal sums are
equal.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from protokv.core.arrays import sorted_from

# Log probabilities in units of 2**-32: sums are then exact in any order, on any device.
_SCORE_UNIT = 2.0**32
_GOLDEN = (5**0.5 - 1) / 2


def fit(samples: Tensor, subquantizers: int, codewords: int, iterations: int) -> Tensor:
    """Codebook `[G, C, D / G]` of samples `[n, D]`, `n >= C`: Lloyd's k-means in each subspace.

    A codeword that no sample chooses moves to the sample that is served worst: the farthest from its
    codeword, then the next farthest.
    """
    n, G, C = samples.shape[0], subquantizers, codewords
    parts = samples.view(n, G, -1).transpose(0, 1).contiguous()
    codebook = _spread_out(parts, C)
    squares = parts.square().sum(2)
    for _ in range(iterations):
        distance = codebook.square().sum(2)[:, None] - 2 * torch.bmm(parts, codebook.transpose(1, 2))
        nearest, code = distance.min(2)
        member = torch.nn.functional.one_hot(code, C).to(parts.dtype)
        size = member.sum(1)
        means = torch.bmm(member.transpose(1, 2), parts) / size.clamp(min=1)[..., None]
        empty = size == 0
        # A sample alone in its cluster becomes a codeword as it is, so a second one there would be lost.
        alone = size.gather(1, code) == 1
        farthest = (nearest + squares).masked_fill(alone, -torch.inf).topk(C, dim=1).indices
        farthest = farthest.gather(1, (empty.cumsum(1) - 1).clamp(min=0))
        worst_served = parts.gather(1, farthest[..., None].expand_as(means))
        codebook = torch.where(empty[..., None], worst_served, means)
    return codebook


def _spread_out(parts: Tensor, codewords: int) -> Tensor:
    """First codewords `[G, C, d]` among samples `[G, n, d]`: k-means++ (Arthur and Vassilvitskii, 2007).

    Each is drawn with a chance that grows with the squared distance to those already drawn, so that residuals
    which occur many times (a recycled token meets its own copy: exactly 0) take one codeword. The golden
    ratio's multiples stand in for random numbers.
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
    """Codes `[B, T, G]` int64 of vectors `[B, T, D]` under one codebook each, `[B, G, C, D / G]`."""
    B, G, C, d = codebook.shape
    T = vectors.shape[1]
    parts = vectors.view(B, T, G, d).transpose(1, 2).reshape(B * G, T, d)
    words = codebook.reshape(B * G, C, d)
    distance = torch.baddbmm(words.square().sum(2)[:, :, None], words, parts.transpose(1, 2), alpha=-2)
    # The first of the nearest: whole columns are compared, where an indexed minimum goes from number to number.
    nearest = distance == distance.amin(1, keepdim=True)
    code = torch.arange(C, dtype=torch.int32, device=words.device)[:, None]
    return torch.where(nearest, code, C - 1).amin(1).long().view(B, G, T).transpose(1, 2)


def top_modes(counts: Tensor, modes: int, smoothing: float) -> Tensor:
    """The S likeliest code tuples of histograms `[n, G, C]`, best first: codes `[n, S, G]` int64.

    This is Algorithm 3 with a beam of S instead of B >= S. The beam is as good: the score of a tuple is a sum
    over subspaces, so a prefix that S other prefixes beat loses to those, whatever comes after. By the same
    argument only pairs (i-th best prefix, j-th best code) with i * j <= S can be among the S best. Ties go to
    the better prefix, then to the lower code. Where there are fewer than S tuples in all, they are repeated
    in order.

    What is sorted has its place in the lowest bits, so that no two numbers are equal. Scores of 128 subspaces sum to
    45 bits, which leaves 18 for the places of pairs.
    """
    (n, G, _), S, device = counts.shape, modes, counts.device
    scores, codes = _likeliest(counts, S, smoothing)
    M = scores.shape[1]
    # The better, the lower, with its place below the score.
    bits = len(_pairs(S, M, S, device)[0]).bit_length()
    scores = scores.neg_() << bits
    beam, made = scores[0], []
    for g in range(1, G):
        prefix, code = _pairs(len(beam), M, S, device)
        total = beam.index_select(0, prefix).add_(scores[g].index_select(0, code))
        best = sorted_from(total.add_(torch.arange(len(prefix), device=device)[:, None]), 0)[:S]
        place = best.bitwise_and((1 << bits) - 1)
        beam = best - place
        made.append((codes[g], place, prefix, code))
    at = (torch.arange(S, device=device) % len(beam))[:, None].expand(S, n)
    found = []
    for named, place, prefix, code in reversed(made):
        pair = place.gather(0, at).view(-1)
        found.append(named.gather(0, code.index_select(0, pair).view(S, n)))
        at = prefix.index_select(0, pair).view(S, n)
    found.append(codes[0].gather(0, at))
    return torch.stack(found[::-1]).permute(2, 1, 0).contiguous()


@lru_cache(maxsize=32)
def _pairs(prefixes: int, codes: int, modes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The i-th of some prefixes and the j-th of some codes with i * j <= S, counted from 0."""
    pairs = [(i, j) for i in range(prefixes) for j in range(min(codes, modes // (i + 1)))]
    prefix, code = torch.tensor(pairs, device=device).t().contiguous()
    return prefix, code


def _likeliest(counts: Tensor, modes: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Of histograms `[n, G, C]` the first S codes and their scores, best first, `[G, min(S, C), n]` int64 each.

    A score is the log of the smoothed probability (equation 4). More counts are a higher one: of two histograms of
    2**31 these are at least two units apart.
    """
    C = counts.shape[2]
    bits = (C - 1).bit_length()
    ordered = sorted_from(torch.arange(C, device=counts.device).sub(counts, alpha=1 << bits))[:, :, :modes]
    ordered = ordered.permute(1, 2, 0).contiguous()
    codes = ordered.bitwise_and((1 << bits) - 1)
    total = counts.sum(2).double().t()[:, None] + C * smoothing
    held = ((codes - ordered) >> bits).double()
    return held.add_(smoothing).div_(total).log_().mul_(_SCORE_UNIT).round_().long(), codes


def rows_of(heads: Tensor, codes: Tensor, codewords: int) -> Tensor:
    """Where the codewords of codes `[n, S, G]` of heads `[n]` are among all rows of codebooks `[B, G, C, d]`."""
    G = codes.shape[2]
    first = (heads[:, None] * G + torch.arange(G, device=codes.device)) * codewords
    return codes + first[:, None]
