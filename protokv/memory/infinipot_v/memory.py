"""`InfiniPotV`: exact tokens, compressed to a share of the budget whenever the next step would exceed it.

Source: InfiniPot-V (Kim et al., NeurIPS 2025) and its released code, the token-retention baseline of the ProtoKV paper.
The same: compression is continual, knows no question and no length of the video, and chooses in each layer and KV head
for itself; the recent steps stay whole; of what is kept, the share alpha (the recent steps included) goes to the tokens
least similar to the recent ones at the same place, by keys as cached, that is rotated (TaR), the rest to the largest
value norms (VaN); kept tokens stay in stream order at their positions. The pooling of value norms, which the released
script leaves off, is left out. What differs:

- The released code counts in frames of one size and compares token i of a frame with token i of the recent ones. After
  its first compression the survivors are no frames any more, and it cuts them into runs of one frame's length, so that
  places no longer match. Here places are matched by coordinates (`redundancy`), whatever has been dropped before.
- It compresses a block once it is full; here it happens when the next step would exceed the budget, so a question finds
  the memory as full as it can be. Steps may differ in length, and the budget need be no multiple of theirs.
- Ties keep the newer token. A token without a recent counterpart has similarity 0.

A step that does not fit behind |C| tokens makes the compression keep fewer. Of a step larger than the budget the last
tokens stay and everything else is forgotten, as in `near`.

Slots hold `[far | near | free]`: far are the tokens that each head chose for itself, near is whole steps, the same in
all heads. Until the first compression nothing is far. The border moves, the shape of the context does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from protokv.config import InfiniPotVConfig
from protokv.context import Context
from protokv.errors import StateCorrupt
from protokv.memory.base import Memory, MemoryShape, StepKV, require, size_of
from protokv.memory.infinipot_v.redundancy import RecentSlots
from protokv.memory.slots import Slots
from protokv.rotary import Rotary


class InfiniPotV(Memory):
    """At most M tokens a layer and KV head; a compression keeps |C| of them."""

    layer_axis: ClassVar[Mapping[str, int | None]] = {"kept.count": None}

    def __init__(self, config: InfiniPotVConfig, shape: MemoryShape, rotary: Rotary) -> None:
        self._config, self._shape = config, shape
        L, H, M, P = shape.layers, shape.kv_heads, config.budget, shape.position_components
        self._slots = Slots(shape, far=M, near=0)
        held = self._slots.far
        self._keys, self._values = self._slots.keys[:, :, held], self._slots.values[:, :, held]
        self._bias = self._slots.bias[:, :, held]
        self._positions = torch.zeros(L, H, M, P, dtype=torch.int64, device=shape.device)
        self._coordinates = torch.zeros(L, H, M, 2, device=shape.device)
        self._step = torch.full((L, H, M), -1, device=shape.device)
        self._far = 0
        # Tokens of each near step, oldest first. Mirrors `step`, so that a step asks nothing of the device.
        self._lengths: list[int] = []
        self._last_step = -1

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self._slots.start(keys, values)

    def append(self, step: StepKV) -> None:
        """Take one step; what is held is compressed first if the step would exceed the budget."""
        self._slots.check(step, self._shape, self._last_step)
        M = self._config.budget
        T = min(step.positions.shape[0], M)
        if self._held + T > M:
            self._compress(min(self._config.compressed_tokens, M - T))
        slots = slice(self._held, self._held + T)
        self._keys[:, :, slots] = step.keys[:, :, -T:]
        self._values[:, :, slots] = step.values[:, :, -T:]
        self._positions[:, :, slots] = step.positions[-T:]
        self._coordinates[:, :, slots] = step.coordinates[-T:]
        self._step[:, :, slots] = step.step
        self._bias[:, :, slots] = 0.0
        self._lengths.append(T)
        self._last_step = step.step

    @property
    def _held(self) -> int:
        return self._far + sum(self._lengths)

    def _compress(self, keep: int) -> None:
        """Keep this many tokens, fewer than are held: the recent steps, and what each head chooses of the others."""
        held, recent_steps = self._held, self._recent_steps(keep)
        recent = sum(recent_steps)
        older = held - recent
        by_norm = round((1 - self._config.redundancy_share) * keep)
        by_redundancy = max(0, keep - by_norm - recent)
        slots = RecentSlots.of(self._coordinates[0, 0, older:held])
        H, device = self._shape.kv_heads, self._step.device
        newest, heads = torch.arange(older, held, device=device).expand(H, -1), torch.arange(H, device=device)[:, None]
        parts = (self._keys, self._values, self._positions, self._coordinates, self._step)
        # Layer by layer: scores are float32, and all layers at once would take several times the bytes of the memory.
        for keys, values, positions, coordinates, step in zip(*parts, strict=True):
            cached = keys[:, :held].float()
            similarity = slots.similarity(cached[:, :older], coordinates[:, :older], cached[:, older:])
            chosen = _best(-similarity, by_redundancy)
            norm = values[:, :older].float().norm(dim=-1).masked_fill_(chosen, -torch.inf)
            chosen |= _best(norm, keep - recent - by_redundancy)
            # In stream order, as `nonzero` is.
            index = torch.cat((chosen.nonzero()[:, 1].view(H, keep - recent), newest), 1)
            for part in (keys, values, positions, coordinates, step):
                part[:, :keep] = part[heads, index]
        self._step[:, :, keep:held] = -1
        self._bias[:, :, keep:held] = -torch.inf
        self._far, self._lengths = keep - recent, recent_steps

    def _recent_steps(self, keep: int) -> list[int]:
        """Tokens of the near steps that stay whole, oldest first: the newest, and more within the recent share."""
        limit = min(keep, int(self._config.recent_share * self._held))
        recent: list[int] = []
        for tokens in reversed(self._lengths):
            if sum(recent) + tokens > (limit if recent else keep):
                break
            recent.insert(0, tokens)
        return recent

    def context(self) -> Context:
        """All slots; far are those that hold what the heads chose for themselves."""
        none = torch.zeros(0, self._shape.position_components, dtype=torch.int64, device=self._step.device)
        begin = self._slots.far.start
        context = self._slots.context(none, lambda: self._positions)
        return replace(context, far=slice(begin, begin + self._far))

    def _kept(self) -> dict[str, Tensor]:
        """What is saved of the slots, in place; `kept.count` is (far tokens, near tokens, index of the last step)."""
        return {
            "kept.keys": self._keys,
            "kept.values": self._values,
            "kept.positions": self._positions,
            "kept.coordinates": self._coordinates,
            "kept.step": self._step,
            "kept.count": torch.tensor([self._far, sum(self._lengths), self._last_step]),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The state: the prompt prefix, and what is held with the room that is left."""
        return self._slots.tensors() | {name: tensor.contiguous() for name, tensor in self._kept().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state that `tensors` gave."""
        kept = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._kept().items()}
        require(tensors, dict(self._slots.spec()) | kept)
        far, near, last_step = (int(value) for value in tensors["kept.count"].tolist())
        M = self._config.budget
        if min(far, near) < 0 or far + near > M or (near > 0) != (last_step >= 0) or near == 0 < far:
            raise StateCorrupt(f"state: tensor kept.count holds {far}, {near}, {last_step}, which no stream leaves")
        steps = tensors["kept.step"]
        chosen, whole, free = steps[:, :, :far], steps[:, :, far : far + near], steps[:, :, far + near :]
        held = steps[:, :, : far + near]
        in_order = (held >= 0).all() and (held.diff(dim=2) >= 0).all() and (chosen[..., -1:] < whole[..., :1]).all()
        shared = (whole == whole[:1, :1]).all() and (whole[..., -1:] == last_step).all()
        if not (in_order and shared and (free == -1).all()):
            raise StateCorrupt("state: tensor kept.step does not agree with kept.count")
        self._slots.load(tensors)
        self._keys[:] = tensors["kept.keys"]
        self._values[:] = tensors["kept.values"]
        self._positions[:] = tensors["kept.positions"]
        self._coordinates[:] = tensors["kept.coordinates"]
        self._step[:] = tensors["kept.step"]
        self._bias[:] = torch.where(self._step >= 0, 0.0, -torch.inf)
        self._far, self._last_step = far, last_step
        self._lengths = torch.unique_consecutive(whole[0, 0], return_counts=True)[1].tolist()

    def nbytes(self) -> dict[str, int]:
        """Bytes by part."""
        held = (self._keys, self._values, self._bias, self._positions, self._coordinates, self._step)
        return {"sink": self._slots.sink_nbytes(), "kept": size_of(*held)}

    def report(self) -> dict[str, Any]:
        """Tokens held: whole steps, and those that each layer and head chose; the oldest step any of them is from."""
        return {
            "near_tokens_in_use": sum(self._lengths),
            "far_tokens_in_use": self._far,
            "oldest_step": int(self._step[:, :, 0].min()) if self._lengths else None,
            "layers": [],
        }


def _best(score: Tensor, n: int) -> Tensor:
    """Which n of each row `[H, N]` have the highest scores, `[H, N]` bool; of equal ones the later."""
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :n]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.shape[1] - 1 - order, True)
