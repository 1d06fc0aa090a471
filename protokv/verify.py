"""What must hold in every state that a stream can leave, beyond its bytes being those that were saved.

Joins `protokv.snapshot` and memories: a memory's own `load` has already refused what breaks its invariants; here is
what takes the clock, the budget or all tensors to see. Needs no model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from protokv.config import MemoryConfig
from protokv.errors import StateCorrupt
from protokv.memory.base import Memory
from protokv.snapshot import State


def check_values(state: State, config: MemoryConfig, memory: Memory) -> list[str]:
    """Check a state that was loaded, and the memory that was made of it; returns what was checked, a line each.

    Raises:
        StateCorrupt: naming the tensor or field that no stream can have left so.
    """
    size = sum(tensor.nbytes for tensor in state.tensors.values())
    return [
        f"bytes: the digests of the header and of {len(state.tensors)} tensors, {size} bytes",
        f"memory: names, shapes, dtypes and invariants of the memory {config.name}",
        *_check_clock(state),
        *_check_finite(state),
        *_check_positions(state),
        *_check_order(state),
        *_check_bank(state),
        *_check_budget(state, config, memory),
    ]


def _check_clock(state: State) -> Iterator[str]:
    clock = state.clock
    if (clock.tokens_seen > 0) != (clock.steps > 0) or (clock.stream_time_s > 0) != (clock.steps > 0):
        raise StateCorrupt(
            f"clock: {clock.steps} steps, {clock.tokens_seen} tokens and {clock.stream_time_s} s contradict each other"
        )
    if clock.tokens_seen < clock.steps:
        raise StateCorrupt(f"clock.tokens_seen: {clock.tokens_seen} tokens in {clock.steps} steps")
    yield "clock: steps, tokens and stream time agree"


def _check_finite(state: State) -> Iterator[str]:
    names = [name for name, tensor in state.tensors.items() if tensor.is_floating_point()]
    for name in names:
        if not torch.isfinite(state.tensors[name]).all():
            raise StateCorrupt(f"state: tensor {name} holds a number that is not finite")
    yield f"values: finite in all {len(names)} tensors of floating-point numbers"


def _check_positions(state: State) -> Iterator[str]:
    clock, found = state.clock, []
    for name, tensor in state.tensors.items():
        kind, limit = name.rpartition(".")[2], None
        if kind in ("positions", "position"):
            limit = (0, clock.next_position)
        elif kind in ("step", "last_step"):
            limit = (-1, clock.steps)
        elif kind in ("coordinates", "mean"):
            limit = (0, 2)
        if limit is None or not tensor.numel():
            continue
        found.append(name)
        low, high = float(tensor.min()), float(tensor.max())
        # A coordinate may be 1; a position or a step of the stream is below where the stream stands.
        last = 1.0 if limit == (0, 2) else limit[1] - 1
        if low < limit[0] or high > last + 1e-6:
            raise StateCorrupt(
                f"state: tensor {name} holds {low:g} to {high:g}, the stream allows {limit[0]} to {last:g}"
            )
    yield f"places: {', '.join(found) or 'none'} within the stream"


def _check_order(state: State) -> Iterator[str]:
    tensors = state.tensors
    if "near.ring" not in tensors:
        return
    start, count, last_step = (int(value) for value in tensors["near.ring"])
    W = tensors["near.step"].shape[0]
    ring = (start + torch.arange(count)) % max(W, 1)
    if (tensors["near.positions"][ring, :1].diff(dim=0) < 0).any():
        raise StateCorrupt("state: tensor near.positions is not in the order of the stream")
    if last_step != state.clock.steps - 1:
        raise StateCorrupt(f"state: tensor near.ring ends at step {last_step}, the clock at {state.clock.steps - 1}")
    if count > state.clock.tokens_seen:
        raise StateCorrupt(f"state: tensor near.ring holds {count} tokens of {state.clock.tokens_seen} seen")
    yield f"near window: {count} tokens in the order of the stream, up to the last step"


def _check_bank(state: State) -> Iterator[str]:
    tensors = state.tensors
    if "bank.mass" not in tensors:
        return
    came = tensors["bank.opened"] + tensors["bank.absorbed"]
    if (tensors["bank.mass"].double().sum(-1) > (came + tensors["bank.recycled"]).double()).any():
        raise StateCorrupt("state: tensor bank.mass sums to more tokens than ever came into the bank")
    left = state.clock.tokens_seen - (int(tensors["near.ring"][1]) if "near.ring" in tensors else 0)
    if (came != (left if tensors["bank.mass"].numel() else 0)).any():
        raise StateCorrupt(f"state: tensors bank.opened and bank.absorbed do not sum to the {left} tokens that left")
    yield "bank: masses and counters agree with the tokens that left the near window"


def _check_budget(state: State, config: MemoryConfig, memory: Memory) -> Iterator[str]:
    if not memory.bounded:
        return
    shown = memory.context().visible_tokens() - state.tensors["sink.keys"].shape[2]
    if shown > config.budget:
        raise StateCorrupt(f"state: {shown} slots are in use, the budget is {config.budget}")
    yield f"budget: {shown} of {config.budget} slots in use, where most are"
