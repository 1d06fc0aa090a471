"""Describe and verify a saved state, and write one in another form. Needs no model.

The memory is rebuilt from its tensors, whose shapes give the shape of the model, and reports on itself.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from protokv.core.build import restore_memory
from protokv.core.memory import Memory
from protokv.errors import StateCorrupt
from protokv.memories import MemoryConfig
from protokv.state.checkpoint import (
    ATTACHED,
    name_specs,
    read_config,
    read_shape,
    restore_attachments,
)
from protokv.state.form import StatePath
from protokv.state.header import State
from protokv.state.reader import Reader
from protokv.state.sources import describe_sources
from protokv.state.thumbnails import Thumbnails
from protokv.state.wall_clock import WallClockLog
from protokv.state.writer import Writer, check_not_read, check_replaceable


def describe(
    path: StatePath, *, at_s: float | None = None, digests: bool = True, values: bool = False
) -> dict[str, Any]:
    """Return the JSON document of a state.

    Args:
        path: where the state is.
        at_s: describe the newest kept commit that is not after this stream time, in seconds.
        digests: verify the digests of the tensors.
        values: list the checks under `verified`, and check the budget.

    Raises:
        StateError: the state is missing or damaged.
    """
    reader = Reader.open(path, at_s=at_s, verify=digests)
    state = reader.state
    config, memory = restore(state)
    found, wall_clock = Thumbnails.read(state.tensors), WallClockLog.read(state.source)
    pictures = [] if found is None else found.all()
    clock, sources, parts = state.clock, describe_sources(state), memory.nbytes()
    source, damage = sources[-1], [one["damage"]["message"] for one in sources if one["damage"]]
    # This is the budget; the slots in use differ from head to head and are in the memory's report.
    kept = min(clock.tokens_seen, config.budget) if memory.bounded else clock.tokens_seen
    exact, exact_from_s = _exact_tokens(state, memory)
    return {
        "state": str(path),
        "format_version": state.format_version,
        "created_by": state.created_by,
        "written": _format_date(reader.committed_at) if at_s is None else None,
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
        },
        "stream": {
            "source": source["name"],
            "decoder": source["decoder"],
            "decoders": source["decoders"],
            "sources": sources,
            "damage": "; ".join(damage) or None,
            "duration_s": clock.stream_time_s,
            "watched_s": source["end_s"],
            "commits_s": reader.commits_s,
            "steps": clock.steps,
            "fps": clock.fps,
            "tokens_seen": clock.tokens_seen,
            "tokens_kept": kept,
            "tokens_exact": exact,
            "exact_from_s": exact_from_s,
            "live": None if wall_clock is None else wall_clock.describe(),
            "compression": clock.tokens_seen / kept if kept else 1.0,
        },
        "bytes": {"total": sum(parts.values()), **parts, "file": reader.file_bytes},
        "thumbnails": {"times_s": [one.time_s for one in pictures], "bytes": sum(len(one.jpeg) for one in pictures)}
        if pictures
        else None,
        **memory.report(),
        **({"verified": _list_checks(state, config, memory)} if values else {}),
    }


def _list_checks(state: State, config: MemoryConfig, memory: Memory) -> list[str]:
    """Return a line for each check that a loaded state has passed. StateCorrupt if it uses more than its budget."""
    size = sum(tensor.nbytes for tensor in state.tensors.values())
    lines = [
        f"bytes: the digests of the header and of {len(state.tensors)} tensors, {size} bytes",
        f"memory: names, shapes, dtypes and indices of the memory {config.name}",
        "clock: steps, tokens and stream time agree",
    ]
    if memory.bounded:
        used = memory.context().visible_tokens() - state.tensors["sink.keys"].shape[2]
        if used > config.budget:
            raise StateCorrupt(f"state: {used} slots are in use, the budget is {config.budget}")
        lines.append(f"budget: {used} of {config.budget} slots in use, where most are")
    return lines


def _exact_tokens(state: State, memory: Memory) -> tuple[int | None, float | None]:
    """Return how many of the last tokens are kept exactly, and from which stream time on; None if unknown."""
    step = state.tensors.get("near.step")
    if step is None:
        return (None, None) if memory.bounded else (state.clock.tokens_seen, 0.0)
    exact = step[step >= 0]
    return len(exact), float(exact.min()) * state.clock.step_seconds if len(exact) else state.clock.stream_time_s


def _format_date(real_s: float | None) -> str | None:
    """Return a time as ISO 8601 with the local offset."""
    return None if real_s is None else datetime.fromtimestamp(real_s).astimezone().isoformat(timespec="seconds")


def restore(state: State) -> tuple[MemoryConfig, Memory]:
    """Return the memory of a state, without a model.

    Raises:
        StateCorrupt: no stream leaves such a state; the tensor or field is named.
    """
    state.clock.check()
    config, shape = read_config(state), read_shape(state)

    def no_rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
        # The report does not depend on the rotation of keys, and the model's is not at hand.
        size = (*positions.shape[:-1], shape.head_size)
        return torch.ones(size), torch.zeros(size)

    attached = {spec.name for spec in ATTACHED}
    own = {name: tensor for name, tensor in state.tensors.items() if name not in attached}
    return config, restore_memory(config, shape, no_rotation, own)


def convert(path: StatePath, target: StatePath, *, overwrite: bool = False, digests: bool = True) -> dict[str, Any]:
    """Write the same state in the form that the path `target` chooses; return paths and stored bytes.

    A state of the same sources at `target` is replaced, with `overwrite` anything. `digests` verifies the state.

    Raises:
        ConfigError: `target` is the state itself.
        StateMismatch: something else is there.
        StateError: the state is missing or damaged, or `target` cannot be written.
        StateLocked: another writer is writing `target`.
    """
    check_not_read(target, path)
    with Writer(target) as writer:
        state = Reader.open(path, verify=digests).state
        restore_attachments(state.tensors)
        _, memory = restore(state)
        if not overwrite:
            check_replaceable(target, state)
        info = name_specs((*memory.specs(), *ATTACHED))
        (written,) = writer.commit(replace(state, tensor_info=info), wait=True)
    return {"state": str(path), "output": str(target), "bytes": written.file_bytes}
