"""Describe and verify a saved state, compare two, and write one in another form. Needs no model.

The memory is rebuilt from its tensors, whose shapes give the shape of the model, and reports on
itself.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protokv.core.build import restore_memory
from protokv.core.layers import declare_layer_tensors, read_layer_kinds
from protokv.core.memory import Memory
from protokv.core.packing import split_tensors
from protokv.core.recent import RecentSteps
from protokv.core.rotary import Angles
from protokv.core.tensors import MemoryShape, Specs, count_bytes
from protokv.errors import StateCorrupt
from protokv.memories import MemoryConfig
from protokv.state.checkpoint import ATTACHED_TENSORS, read_state_memory_config
from protokv.state.header import State, StateHeader
from protokv.state.reader import StateReader
from protokv.state.sources import WallClockLog, describe_standing_answers, describe_state_sources
from protokv.state.store import (
    StatePath,
    check_state_replaceable,
    find_store,
    refuse_input_as_target,
)
from protokv.state.thumbnails import Thumbnails
from protokv.texts import JsonObject
from protokv.words.transcript import Transcript


def describe_state(
    path: StatePath, *, at_s: float | None = None, digests: bool = True
) -> JsonObject:
    """Return the JSON document of a state, or of its newest kept commit not after `at_s`.
    StateError.

    `digests` verifies the digests of the tensors.
    """
    reader = StateReader.open(path, at_s=at_s, verify=digests)
    state = reader.state
    config, memory, _ = _restore(state)
    found = Thumbnails.read(state.tensors)
    wall_clock = WallClockLog.read(state.source)
    pictures = [] if found is None else found.all()
    layers, recent, _ = split_tensors(state.tensors, "layers", "recent")
    besides = {"layers": layers, "recent": recent}
    parts = memory.nbytes() | {
        name: count_bytes(*held.values()) for name, held in besides.items() if held
    }
    clock = state.clock
    sources = describe_state_sources(state)
    source = sources[-1]
    report = memory.report()
    exact, exact_from_s = _exact_tokens(state, memory)
    kept = min(clock.tokens_seen, config.budget) if memory.bounded else clock.tokens_seen
    if exact is not None and config.prototypes:
        # The slots in use differ from head to head and are in the memory's report.
        words = report.get("words_tokens_in_use", 0)
        older = min(config.prototypes, clock.tokens_seen - exact - words)
        older *= getattr(config, "pseudo_tokens", 1)
        kept = exact + older + words + report.get("words_prototypes", 0)
    written = None
    with suppress(OSError, ValueError):
        at = datetime.fromtimestamp(Path(reader.place or os.fspath(path)).stat().st_mtime)
        written = at.astimezone().isoformat(timespec="seconds")
    return {
        "state": str(path),
        "format_version": state.format_version,
        "created_by": state.created_by,
        "written": written,
        "digests": digests,
        "complete": state.complete,
        "backbone": asdict(state.backbone) | {"settings": dict(state.settings)},
        "memory": {
            "kind": config.name,
            "changes": config.changes(),
            **{
                name: getattr(config, name)
                for name in ("budget", "near_tokens", "prototypes", "positions")
            },
            "pseudo_tokens": getattr(config, "pseudo_tokens", 0),
            "config": config.to_dict(),
        },
        "stream": {
            "source": source["name"],
            "decoder": source["decoder"],
            "decoders": source["decoders"],
            "sources": sources,
            "damage": "; ".join(one["damage"]["message"] for one in sources if one["damage"])
            or None,
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
            "answers": describe_standing_answers(state),
            "compression": clock.tokens_seen / kept if kept else 1.0,
        },
        "bytes": {"total": sum(parts.values()), **parts, "file": reader.stored_bytes},
        "thumbnails": {
            "times_s": [one.time_s for one in pictures],
            "bytes": sum(len(one.jpeg) for one in pictures),
        }
        if pictures
        else None,
        **report,
        **read_layer_kinds(layers),
    }


def _exact_tokens(state: State, memory: Memory) -> tuple[int | None, float | None]:
    """Return how many of the last tokens are kept exactly, and from which stream time on; None if
    unknown.
    """
    step = state.tensors.get("near.step")
    clock = state.clock
    if step is None:
        return (None, None) if memory.bounded else (clock.tokens_seen, 0.0)
    exact = step[step >= 0]
    # Counted from the end: there may be gaps before.
    steps = clock.steps - int(exact.min()) if len(exact) else 0
    return len(exact), clock.stream_time_s - steps * clock.step_seconds


def _restore(state: State) -> tuple[MemoryConfig, Memory, Specs]:
    """Return the memory of a state, without a model, and all declarations. StateCorrupt, naming
    what makes no sense.
    """
    Transcript.of(state.tensors)
    config = read_state_memory_config(state)
    shape = _read_shape(state)

    def no_rotation(positions: Tensor) -> Angles:
        # The report does not depend on the rotation of keys, and the model's is not at hand.
        size = (*positions.shape[:-1], shape.head_size)
        return torch.ones(size), torch.zeros(size)

    attached = {spec.name for spec in ATTACHED_TENSORS}
    kept = {name: one for name, one in state.tensors.items() if name not in attached}
    layers, recent, own = split_tensors(kept, "layers", "recent")
    recent_steps = RecentSteps(config, shape)
    recent_steps.load(recent)
    read_layer_kinds(layers)
    memory = restore_memory(config, shape, no_rotation, own, state.clock.steps)
    return (
        config,
        memory,
        (*memory.specs(), *declare_layer_tensors(layers), *recent_steps.specs(), *ATTACHED_TENSORS),
    )


def _read_shape(state: State) -> MemoryShape:
    """Return the shape of the memory that left these tensors, on the CPU. StateCorrupt if they do
    not tell it.
    """
    try:
        L, H, P0, D = state.tensors["sink.keys"].shape
        # Every memory holds positions of something, and their components are the last axis.
        components = next(
            one.shape[-1] for name, one in state.tensors.items() if name.endswith(".positions")
        )
    except (KeyError, ValueError, IndexError, StopIteration) as error:
        raise StateCorrupt("the state lacks sink.keys or positions in their form") from error
    frames = state.clock.frames_per_step
    cpu = torch.device("cpu")
    dtype = state.tensors["sink.keys"].dtype
    return MemoryShape(L, H, D, components, P0, dtype, cpu, frames_per_step=frames)


def convert_state(
    path: StatePath, target: StatePath, *, overwrite: bool = False, digests: bool = True
) -> JsonObject:
    """Write the same state in the form that the path `target` chooses; return paths and stored
    bytes.

    A state of the same sources at `target` is replaced, with `overwrite` anything. `digests`
    verifies the state.

    Raises:
        ConfigError: `target` is the state itself.
        StateError: the state is damaged, something else is at `target`, or it cannot be written.
    """
    refuse_input_as_target(target, path)
    with find_store(target) as store:
        state = StateReader.open(path, verify=digests).state
        Thumbnails.read(state.tensors)
        _, _, specs = _restore(state)
        if not overwrite:
            check_state_replaceable(target, state)
        written = store.commit(replace(state, specs=specs))
    return {"state": str(path), "output": str(target), "bytes": written}


def compare_states(a: State, b: State) -> JsonObject:
    """Return how two states differ, as a JSON document: bit for bit, so 0.0 and -0.0 differ, and
    NaNs of other bits.

    An entry of `header` has the `field`, such as `a.b[0].c`, and its values `a` and `b`; None where
    a state lacks it. An entry of `tensors` has dtype and shape in `a` and `b`; the rest is None if
    they differ, and `max_abs_difference` also if it is not finite.
    """
    ours, theirs = (dict(_flatten(StateHeader.to_json(state))) for state in (a, b))
    header = [
        {"field": name, "a": ours.get(name), "b": theirs.get(name)}
        for name in {**ours, **theirs}
        # In Python 0 equals False.
        if repr(ours.get(name, ...)) != repr(theirs.get(name, ...))
    ]
    names = sorted({*a.tensors, *b.tensors})
    found = [_compare_tensors(name, a.tensors.get(name), b.tensors.get(name)) for name in names]
    tensors = [one for one in found if one is not None]
    return {
        "equal": not header and not tensors,
        "tensors_compared": len(names),
        "header": header,
        "tensors": tensors,
    }


def _compare_tensors(name: str, a: Tensor | None, b: Tensor | None) -> JsonObject | None:
    forms = [
        one if one is None else f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
        for one in (a, b)
    ]
    entry = {"name": name, "a": forms[0], "b": forms[1]}
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return {**entry, "elements": None, "differing": None, "max_abs_difference": None}
    flat = [tensor.reshape(-1) for tensor in (a, b)]
    ours, theirs = (one.view(torch.uint8).view(-1, one.element_size()) for one in flat)
    unequal = (ours != theirs).any(-1)
    if not unequal.any():
        return None
    x, y = (one[unequal].double() for one in flat)
    most = float((x - y).abs().max())
    counts = {"elements": a.numel(), "differing": len(x)}
    return {**entry, **counts, "max_abs_difference": most if math.isfinite(most) else None}


def _flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the path, such as `a.b[0].c`, and the value of every field of a JSON document."""
    if isinstance(value, dict) and value:
        return [
            one for k, v in value.items() for one in _flatten(v, f"{path}.{k}" if path else str(k))
        ]
    if isinstance(value, (list, tuple)) and value:
        return [one for i, v in enumerate(value) for one in _flatten(v, f"{path}[{i}]")]
    return [(path, value)]
