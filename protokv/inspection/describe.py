"""What a saved state holds, as plain numbers, and what must hold in it: what `protokv inspect` shows. Needs no model.

The memory is rebuilt from its tensors alone (their shapes tell those of the model) and asked for its report. Knows
no tables and no terminals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protokv import storage
from protokv.config import MemoryConfig
from protokv.core.memory import Memory
from protokv.core.snapshot import State, TensorInfo
from protokv.core.tensors import shapes_of
from protokv.errors import ConfigError, StateCorrupt
from protokv.inspection.compare import compare
from protokv.memories import declare_state, restore_memory
from protokv.storage.checkpoint import admit, config_of, legends_of, shape_of
from protokv.storage.form import StatePath
from protokv.storage.overwriting import check_not_read, check_replaceable
from protokv.storage.wall_clock import WallClockLog
from protokv.storage.watched import sources_of
from protokv.storage.writer import Writer


def describe(
    path: StatePath, *, at_s: float | None = None, digests: bool = True, values: bool = False
) -> dict[str, Any]:
    """The whole document of a state.

    Args:
        path: where the state is.
        at_s: take the newest commit that is not after this stream time, of those that are kept.
        digests: check that every byte is the one that was saved.
        values: check all that must hold in a state, and tell under `verified` what that was.

    Raises:
        StateError: the state is missing or damaged.
    """
    state = storage.load_state(path, verify=digests, at_s=at_s, admit=admit)
    config, memory = _memory(state)
    verified = verify(state, config, memory) if values else None
    clock, sources = state.clock, sources_of(state)
    source, damage = sources[-1], [one["damage"]["message"] for one in sources if one["damage"]]
    parts, chronicle = memory.nbytes(), WallClockLog.of(state.source)
    # The budget is what may be kept; how many slots are in use differs from head to head and is in the report.
    kept = min(clock.tokens_seen, config.budget) if memory.bounded else clock.tokens_seen
    exact, exact_from_s = _exact(state, memory)
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
            "config": config.to_dict(),
            "resolved": _resolved(config),
        },
        "stream": {
            "source": source["name"],
            "decoder": source["decoder"],
            "decoders": source["decoders"],
            "sources": sources,
            "damage": "; ".join(damage) or None,
            "duration_s": clock.stream_time_s,
            "watched_s": source["end_s"],
            "commits_s": storage.moments(path),
            "steps": clock.steps,
            "fps": clock.fps,
            "tokens_seen": clock.tokens_seen,
            "tokens_kept": kept,
            "tokens_exact": exact,
            "exact_from_s": exact_from_s,
            "live": None if chronicle is None else chronicle.describe(),
            "compression": clock.tokens_seen / kept if kept else 1.0,
        },
        "bytes": {"total": sum(parts.values()), **parts, "file": storage.stored_bytes(path)},
        **memory.report(),
        **({} if verified is None else {"verified": verified}),
    }


def _resolved(config: MemoryConfig) -> dict[str, Any]:
    """What the settings that are "auto" stand for."""
    given = config.to_dict()
    return {name: value for name, value in config.resolve().to_dict().items() if value != given[name]}


def verify(state: State, config: MemoryConfig, memory: Memory) -> list[str]:
    """Check a state that was loaded, whose memory was restored and so checked; returns what was, a line each.

    Raises:
        StateCorrupt: naming the tensor or field that no stream can have left so.
    """
    state.clock.check()
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
    shown = memory.context().visible_tokens() - state.tensors["sink.keys"].shape[2]
    if shown > config.budget:
        raise StateCorrupt(f"state: {shown} slots are in use, the budget is {config.budget}")
    yield f"budget: {shown} of {config.budget} slots in use, where most are"


def convert(path: StatePath, target: StatePath, *, overwrite: bool = False, digests: bool = True) -> dict[str, Any]:
    """Write the same state in the form that the suffix of `target` names.

    Args:
        path: where the state is.
        target: where it goes; a state of the same sources that stands there is replaced.
        overwrite: replace whatever stands there.
        digests: check that every byte is the one that was saved.

    Raises:
        ConfigError: `target` is the state itself.
        StateMismatch: something else stands there.
        StateError: the state is missing or damaged, or `target` cannot be written.
        StateLocked: somebody else is writing `target`.
    """
    check_not_read(target, path)
    with Writer(target) as writer:
        state = storage.load_state(path, verify=digests)
        if not overwrite:
            check_replaceable(target, state)
        (written,) = writer.commit(replace(state, legends=_legends(state)), wait=True)
    return {"state": str(path), "output": str(target), "bytes": written.file_bytes}


def differences(a: StatePath, b: StatePath, *, digests: bool = True) -> dict[str, Any]:
    """How two states differ, as one document; `equal` says whether they do.

    Raises:
        StateError: one of them is missing or damaged.
    """
    found = compare(storage.load_state(a, verify=digests), storage.load_state(b, verify=digests))
    return {
        "states": [str(a), str(b)],
        "equal": found.equal,
        "tensors_compared": found.tensors_compared,
        "header": [asdict(one) for one in found.fields],
        "tensors": [asdict(one) for one in found.tensors],
    }


def _exact(state: State, memory: Memory) -> tuple[int | None, float | None]:
    """How many of the last tokens are kept as the model made them, and since when; None where that is not known."""
    step = state.tensors.get("near.step")
    if step is None:
        return (None, None) if memory.bounded else (state.clock.tokens_seen, 0.0)
    held = step[step >= 0]
    return len(held), float(held.min()) * state.clock.step_seconds if len(held) else state.clock.stream_time_s


def _written(path: StatePath) -> str | None:
    """When the state was last written, ISO 8601 with the local offset; None where the place does not tell."""
    try:
        return datetime.fromtimestamp(Path(path).stat().st_mtime).astimezone().isoformat(timespec="seconds")
    except (OSError, ValueError):
        return None


def _legends(state: State) -> dict[str, TensorInfo]:
    """What the tensors of a state are; nothing where it makes no sense, which is no reason not to copy it."""
    try:
        config = config_of(state)
        shape = shape_of(state, shapes_of(state.tensors))
        return legends_of(declare_state(config, shape))
    except (StateCorrupt, ConfigError):
        return {}


def _memory(state: State) -> tuple[MemoryConfig, Memory]:
    state.clock.check()
    config, shape = config_of(state), shape_of(state, shapes_of(state.tensors))

    def unturned(positions: Tensor) -> tuple[Tensor, Tensor]:
        # Nothing of the report depends on how keys are turned, and the model's own rotation is not at hand.
        size = (*positions.shape[:-1], shape.head_size)
        return torch.ones(size), torch.zeros(size)

    return config, restore_memory(config, shape, unturned, state.tensors, state.clock)
