"""What must hold in every state that a stream can leave, beyond its bytes being those that were saved.

Joins `protokv.snapshot` and memories: a memory checks itself against the clock (`Memory.check`); here is what the clock
says of itself, and the budget. Needs no model.
"""

from __future__ import annotations

from collections.abc import Iterator

from protokv.config import MemoryConfig
from protokv.errors import StateCorrupt
from protokv.memory.base import Memory
from protokv.snapshot import State
from protokv.snapshot.schema import check_clock


def check_values(state: State, config: MemoryConfig, memory: Memory) -> list[str]:
    """Check a state that was loaded, and the memory that was made of it; returns what was checked, a line each.

    Raises:
        StateCorrupt: naming the tensor or field that no stream can have left so.
    """
    check_clock(state.clock)
    size = sum(tensor.nbytes for tensor in state.tensors.values())
    return [
        f"bytes: the digests of the header and of {len(state.tensors)} tensors, {size} bytes",
        f"memory: names, shapes, dtypes and invariants of the memory {config.name}",
        "clock: steps, tokens and stream time agree",
        *memory.check(state.clock),
        *_check_budget(state, config, memory),
    ]


def _check_budget(state: State, config: MemoryConfig, memory: Memory) -> Iterator[str]:
    if not memory.bounded:
        return
    shown = memory.context().visible_tokens() - state.tensors["sink.keys"].shape[2]
    if shown > config.budget:
        raise StateCorrupt(f"state: {shown} slots are in use, the budget is {config.budget}")
    yield f"budget: {shown} of {config.budget} slots in use, where most are"
