"""Describe a saved state as plain numbers and verify it: what `protokv inspect` shows. Needs no model.

The memory is rebuilt from the tensors of the state, whose shapes give the shape of the model, and reports on itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protokv.config import MemoryConfig
from protokv.core.memory import Memory
from protokv.core.snapshot import State
from protokv.core.tensors import tensor_shapes
from protokv.errors import StateCorrupt
from protokv.memories import restore_memory
from protokv.storage.api import load_state, moments, stored_bytes
from protokv.storage.checkpoint import admit, config_of, shape_of
from protokv.storage.form import StatePath
from protokv.storage.wall_clock import WallClockLog
from protokv.storage.watched import sources_of


def describe(
    path: StatePath, *, at_s: float | None = None, digests: bool = True, values: bool = False
) -> dict[str, Any]:
    """Return the JSON document of a state.

    Args:
        path: where the state is.
        at_s: describe the newest kept commit that is not after this stream time, in seconds.
        digests: verify the digests of the tensors.
        values: verify everything that must hold in a state, and list the checks under `verified`.

    Raises:
        StateError: the state is missing or damaged.
    """
    state = load_state(path, verify=digests, at_s=at_s, admit=admit)
    config, memory = _restore(state)
    verified = verify(state, config, memory) if values else None
    clock, sources = state.clock, sources_of(state)
    source, damage = sources[-1], [one["damage"]["message"] for one in sources if one["damage"]]
    parts, wall_clock = memory.nbytes(), WallClockLog.of(state.source)
    # This is the budget; the slots in use differ from head to head and are in the memory's report.
    kept = min(clock.tokens_seen, config.budget) if memory.bounded else clock.tokens_seen
    exact, exact_from_s = _exact_tokens(state, memory)
    given = config.to_dict()
    return {
        "state": str(path),
        "format_version": state.format_version,
        "created_by": state.created_by,
        "written": _written(path) if at_s is None else None,
        "digests": digests,
        "complete": state.complete,
        "backbone": asdict(state.backbone) | {"settings": dict(state.settings)},
        "memory": {
            "kind": config.name,
            "changes": config.changes(),
            "budget": config.budget,
            "near_tokens": config.near_tokens,
            "prototypes": config.prototypes,
            "pseudo_tokens": getattr(config, "pseudo_tokens", 0),
            "positions": config.positions,
            "config": given,
            # The values that settings of "auto" resolve to.
            "resolved": {name: value for name, value in config.resolve().to_dict().items() if value != given[name]},
        },
        "stream": {
            "source": source["name"],
            "decoder": source["decoder"],
            "decoders": source["decoders"],
            "sources": sources,
            "damage": "; ".join(damage) or None,
            "duration_s": clock.stream_time_s,
            "watched_s": source["end_s"],
            "commits_s": moments(path),
            "steps": clock.steps,
            "fps": clock.fps,
            "tokens_seen": clock.tokens_seen,
            "tokens_kept": kept,
            "tokens_exact": exact,
            "exact_from_s": exact_from_s,
            "live": None if wall_clock is None else wall_clock.describe(),
            "compression": clock.tokens_seen / kept if kept else 1.0,
        },
        "bytes": {"total": sum(parts.values()), **parts, "file": stored_bytes(path)},
        **memory.report(),
        **({} if verified is None else {"verified": verified}),
    }


def verify(state: State, config: MemoryConfig, memory: Memory) -> list[str]:
    """Verify a loaded state whose clock and memory `_restore` has checked; return a line for each check.

    Raises:
        StateCorrupt: no stream leaves such a state; the tensor or field is named.
    """
    size = sum(tensor.nbytes for tensor in state.tensors.values())
    return [
        f"bytes: the digests of the header and of {len(state.tensors)} tensors, {size} bytes",
        f"memory: names, shapes, dtypes and invariants of the memory {config.name}",
        "clock: steps, tokens and stream time agree",
        *memory.promises(),
        *_check_budget(state, config, memory),
    ]


def _check_budget(state: State, config: MemoryConfig, memory: Memory) -> Iterator[str]:
    if not memory.bounded:
        return
    used = memory.context().visible_tokens() - state.tensors["sink.keys"].shape[2]
    if used > config.budget:
        raise StateCorrupt(f"state: {used} slots are in use, the budget is {config.budget}")
    yield f"budget: {used} of {config.budget} slots in use, where most are"


def _exact_tokens(state: State, memory: Memory) -> tuple[int | None, float | None]:
    """Return how many of the last tokens are kept exactly, and from which stream time on; None if unknown."""
    step = state.tensors.get("near.step")
    if step is None:
        return (None, None) if memory.bounded else (state.clock.tokens_seen, 0.0)
    held = step[step >= 0]
    return len(held), float(held.min()) * state.clock.step_seconds if len(held) else state.clock.stream_time_s


def _written(path: StatePath) -> str | None:
    """Return when the state was last written, ISO 8601 with the local offset; None if the place does not tell."""
    try:
        return datetime.fromtimestamp(Path(path).stat().st_mtime).astimezone().isoformat(timespec="seconds")
    except (OSError, ValueError):
        return None


def _restore(state: State) -> tuple[MemoryConfig, Memory]:
    state.clock.check()
    config, shape = config_of(state), shape_of(state, tensor_shapes(state.tensors))

    def no_rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
        # The report does not depend on the rotation of keys, and the model's is not at hand.
        size = (*positions.shape[:-1], shape.head_size)
        return torch.ones(size), torch.zeros(size)

    return config, restore_memory(config, shape, no_rotation, state.tensors, state.clock)
