"""`Retrieval`: what a question reads of an archive, chosen by each layer for itself at the first forward.

Owns the score of a block, the choice under a budget, and where chosen blocks are shown: at their stream positions, or
packed behind the prompt prefix. Changes nothing in the archive. Knows nothing of how the archive was filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from protokv.context import EMPTY, Anchoring, Context, Segment
from protokv.memory.rekv.archive import Archive
from protokv.rotary import Rotary, turn, unrotate


@dataclass(slots=True, kw_only=True)
class Retrieval(Context):
    """The prompt prefix and, in each layer, the blocks that the question's query fits best.

    The tokens of the first forward are the question. It stands at `next_position` and the positions that follow, the
    same in every component, so its rotation can be removed; what it chooses is kept for the answer's tokens.

    Attributes:
        archive: the blocks; must not change while this is in use.
        sink_keys, sink_values: `[L, H, P0, D]`.
        budget: tokens that the chosen blocks of a layer may have together.
        rotary: of the model.
        next_position: where the question starts.
        shift: see `Context`.
        packed: how chosen blocks are packed, so that the newest ends right below `packed_end`; None: they stay where
            they stood in the stream.
    """

    archive: Archive
    sink_keys: Tensor
    sink_values: Tensor
    budget: int
    rotary: Rotary
    next_position: int
    shift: int = 0
    packed: Anchoring | None = None
    packed_end: int = 0
    _chosen: dict[int, list[int]] = field(default_factory=dict, init=False)
    _shown: dict[int, Segment] = field(default_factory=dict, init=False)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """The prefix and the chosen blocks in stream order; slots that are left are free.

        `N = P0 + min(budget, tokens of the archive)` in every layer, however many tokens its blocks have.
        """
        if layer not in self._shown:
            self._chosen[layer] = self._choose(layer, query)
            self._shown[layer] = self._read(layer, self._chosen[layer])
        return (self._shown[layer],)

    def places(self, layer: int) -> Tensor | None:
        """Of the prefix and of the blocks that the layer chose; None before it was asked."""
        if layer not in self._shown:
            return None
        H, N, _ = self._shown[layer].keys.shape
        chosen = [self.archive.blocks[index].positions for index in self._chosen[layer]]
        P0, P = self.sink_keys.shape[2], chosen[0].shape[1] if chosen else 1
        places = torch.zeros(N, P, dtype=torch.int64)
        places[:P0] = torch.arange(P0)[:, None]
        if chosen:
            found = torch.cat(chosen)
            places[P0 : P0 + len(found)] = found
        return places.expand(H, N, P)

    def without_far(self) -> Retrieval:
        """The prompt prefix alone: no block is near."""
        return replace(self, budget=0)

    def visible_tokens(self) -> int:
        """Slots that attention can see in the layer that sees most; before a layer was asked, the most it may see."""
        counts = (sum(len(self.archive.blocks[index]) for index in chosen) for chosen in self._chosen.values())
        return self.sink_keys.shape[2] + max(counts, default=min(self.budget, self.archive.tokens))

    def far_span(self) -> int:
        """An upper bound of the times that the chosen blocks span together, whatever is chosen."""
        return self._most_positions((0,))

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> Retrieval:
        """The same with chosen blocks packed: each takes the positions that its tokens span, no more.

        Blocks keep their stream positions while all of them are shown, which is where they were encoded. Layers choose
        different blocks, but text has one position in all of them: so room is set aside for the longest choice, and
        each layer's blocks end where the room ends. Where all blocks are of one size they fill it.
        """
        if self.archive.tokens <= self.budget and not self.archive.dropped:
            return self
        moving = tuple(anchoring.moving)
        end = anchoring.origin + max(int(span), self._most_positions(moving))
        # Of what does not move, such as rows and columns, the highest stays the highest.
        highs = [max(component) for component in zip(*(block.high for block in self.archive.blocks), strict=True)]
        still = [high for component, high in enumerate(highs) if component not in moving]
        return replace(
            self,
            packed=anchoring,
            packed_end=end,
            shift=highs[0] + 1 - end,
            next_position=max([end, *(high + 1 for high in still)]),
        )

    def _choose(self, layer: int, query: Tensor) -> list[int]:
        """Indices of the best blocks, as many as fit, in stream order."""
        T, blocks, keys = query.shape[1], self.archive.blocks, self.archive.block_keys
        line = torch.arange(self.next_position, self.next_position + T, device=query.device)
        components = len(blocks[-1].high) if blocks else 1
        bare = unrotate(query.float(), *self.rotary(line[:, None].expand(T, components)))
        # Block keys repeated for every query head would give the same product as query heads added up.
        wanted = bare.mean(1).reshape(keys.shape[2], -1, keys.shape[3]).sum(1)
        scores = keys[:, layer].flatten(1) @ wanted.flatten()
        room, chosen = self.budget, []
        for index in scores.argsort(descending=True, stable=True).tolist():
            room -= len(blocks[index])
            if room < 0:
                break
            chosen.append(index)
        return sorted(chosen)

    def _read(self, layer: int, chosen: Sequence[int]) -> Segment:
        H, P0, D = self.sink_keys.shape[1:]
        blocks = [self.archive.blocks[index] for index in chosen]
        n = sum(map(len, blocks))
        keys = self.sink_keys.new_zeros((H, P0 + min(self.budget, self.archive.tokens), D))
        values, bias = torch.zeros_like(keys), keys.new_zeros(keys.shape[:2], dtype=torch.float32)
        keys[:, :P0], values[:, :P0] = self.sink_keys[layer], self.sink_values[layer]
        self.archive.read(layer, chosen, keys[:, P0:], values[:, P0:])
        bias[:, P0 + n :] = EMPTY
        if self.packed is not None and blocks:
            here = torch.cat([block.positions for block in blocks])
            there = here.clone()
            moving = tuple(self.packed.moving)
            stop, end = n, self.packed_end
            for block in reversed(blocks):
                low, high = block.reach(moving)
                there[stop - len(block) : stop, list(moving)] += end - 1 - high
                stop, end = stop - len(block), end - (high + 1 - low)
            seen = slice(P0, P0 + n)
            device = keys.device
            keys[:, seen] = turn(keys[:, seen], here.to(device), there.to(device), self.packed.rotary)
        return Segment(keys, values, bias)

    def _most_positions(self, components: Sequence[int]) -> int:
        """An upper bound of the positions that the chosen blocks take, exact where all blocks are of one size.

        No more blocks fit than the shortest do, and no token takes more positions than in the block that takes most.
        """
        lengths = [len(block) for block in self.archive.blocks]
        reaches = [block.reach(components) for block in self.archive.blocks]
        spans = [high + 1 - low for low, high in reaches]
        fitting, room = 0, self.budget
        for length in sorted(lengths):
            room -= length
            fitting += room >= 0
        most = (self.budget * span // length for span, length in zip(spans, lengths, strict=True))
        return min(sum(sorted(spans, reverse=True)[:fitting]), max(most, default=0))
