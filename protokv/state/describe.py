"""Look at saved states: describe and verify one, compare two, write one in another form. Needs no model.

To describe a state, its memory is rebuilt from its tensors, whose shapes give the shape of the model, and reports on
itself. Two states are equal if they have the same bytes: 0.0 and -0.0 differ, and so do two NaNs with different bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protokv.core.build import declare_memory, restore_memory
from protokv.core.memory import Memory
from protokv.core.tensors import tensor_shapes
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import MemoryConfig
from protokv.state import attachments
from protokv.state.api import check_not_read, check_replaceable, load_state, moments, stored_bytes
from protokv.state.checkpoint import admit, config_of, shape_of, tensor_info_of
from protokv.state.form import StatePath
from protokv.state.snapshot import Header, State, TensorInfo
from protokv.state.thumbnails import Thumbnails
from protokv.state.watched import WallClockLog, sources_of
from protokv.state.writer import Writer
from protokv.words.transcript import Transcript


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
    thumbnails = Thumbnails.of(state.tensors)
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
        "written": written_at(path) if at_s is None else None,
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
        "thumbnails": None if thumbnails is None else thumbnails.report(),
        **memory.report(),
        **({} if verified is None else {"verified": verified}),
    }


def read_words(path: StatePath, *, at_s: float | None = None, digests: bool = True) -> tuple[State, Transcript]:
    """Return a state, and the words that it knows; arguments and errors as for `describe`."""
    state = load_state(path, verify=digests, at_s=at_s, admit=admit)
    state.clock.check()
    return state, Transcript.of(state.tensors)


def verify(state: State, config: MemoryConfig, memory: Memory) -> list[str]:
    """Verify a loaded state whose clock and memory `_restore` has checked; return a line for each check.

    Raises:
        StateCorrupt: no stream leaves such a state; the tensor or field is named.
    """
    size = sum(tensor.nbytes for tensor in state.tensors.values())
    return [
        f"bytes: the digests of the header and of {len(state.tensors)} tensors, {size} bytes",
        f"memory: names, shapes, dtypes and indices of the memory {config.name}",
        "clock: steps, tokens and stream time agree",
        *_check_budget(state, config, memory),
    ]


def check_whole(state: State) -> None:
    """Check everything that must hold in a loaded state, and in the records of its sources. Raises as `verify`."""
    sources_of(state)
    attachments.restore_attachments(state.tensors)
    verify(state, *_restore(state))


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


def written_at(path: StatePath) -> str | None:
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

    attached = {spec.name for spec in attachments.SPECS}
    own = {name: tensor for name, tensor in state.tensors.items() if name not in attached}
    return config, restore_memory(config, shape, no_rotation, own)


# Compare this many elements at a time, because they are converted to float64.
_CHUNK = 1 << 20


def compare(a: State, b: State) -> dict[str, Any]:
    """Return how two states differ, as a JSON document.

    It has `equal`, `tensors_compared` (in either state), `header` and `tensors`. An entry of `header` has the `field`,
    such as `a.b[0].c`, and its values `a` and `b`; None where a state lacks it. An entry of `tensors` has the `name`,
    dtype and shape in `a` and `b`, such as `float32 [2, 3]`, the number of `elements`, the number `differing` in any
    bit, and the `max_abs_difference`. The last three are None if dtype or shape differ; `max_abs_difference` is None as
    well if it is not finite.
    """
    ours, theirs = (dict(flatten(Header.to_json(state))) for state in (a, b))
    header = [
        {"field": name, "a": ours.get(name), "b": theirs.get(name)}
        for name in {**ours, **theirs}
        if name not in ours or name not in theirs or _typed(ours[name]) != _typed(theirs[name])
    ]
    names = sorted({*a.tensors, *b.tensors})
    found = [_compare_tensors(name, a.tensors.get(name), b.tensors.get(name)) for name in names]
    tensors = [one for one in found if one is not None]
    return {"equal": not header and not tensors, "tensors_compared": len(names), "header": header, "tensors": tensors}


def _compare_tensors(name: str, a: Tensor | None, b: Tensor | None) -> dict[str, Any] | None:
    entry = {"name": name, "a": _describe(a), "b": _describe(b)}
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return {**entry, "elements": None, "differing": None, "max_abs_difference": None}
    differing, distance = 0, 0.0
    for begin in range(0, a.numel(), _CHUNK):
        x, y = (t.reshape(-1)[begin : begin + _CHUNK] for t in (a, b))
        bits = [t.contiguous().view(torch.uint8).view(-1, t.element_size()) for t in (x, y)]
        unequal = (bits[0] != bits[1]).any(-1)
        differing += int(unequal.sum())
        if unequal.any():
            # Tensor.max keeps NaN, unlike max.
            apart = (x[unequal].double() - y[unequal].double()).abs()
            distance = float(torch.cat((apart, torch.tensor([distance], dtype=torch.float64))).max())
    if not differing:
        return None
    finite = distance == distance and distance != float("inf")
    return {
        **entry,
        "elements": a.numel(),
        "differing": differing,
        "max_abs_difference": distance if finite else None,
    }


def _describe(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the path, such as `a.b[0].c`, and the value of every field of a JSON document."""
    if isinstance(value, dict) and value:
        return [one for k, v in value.items() for one in flatten(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, (list, tuple)) and value:
        return [one for i, v in enumerate(value) for one in flatten(v, f"{path}[{i}]")]
    return [(path, value)]


def _typed(value: Any) -> Any:
    """Tell True from 1, but not 1 from 1.0, which JSON may mix up."""
    return (isinstance(value, bool), list(value) if isinstance(value, tuple) else value)


def convert(path: StatePath, target: StatePath, *, overwrite: bool = False, digests: bool = True) -> dict[str, Any]:
    """Write the same state in the form that the path `target` chooses; return paths and stored bytes.

    Args:
        path: where the state is.
        target: where it goes; a state of the same sources there is replaced.
        overwrite: replace anything there.
        digests: verify the digests of the state, and that it makes sense.

    Raises:
        ConfigError: `target` is the state itself.
        StateMismatch: something else is there.
        StateError: the state is missing or damaged, or `target` cannot be written.
        StateLocked: another writer is writing `target`.
    """
    check_not_read(target, path)
    with Writer(target) as writer:
        state = load_state(path, verify=digests, admit=admit if digests else None)
        if digests:
            check_whole(state)
        if not overwrite:
            check_replaceable(target, state)
        (written,) = writer.commit(replace(state, tensor_info=_tensor_info(state)), wait=True)
    return {"state": str(path), "output": str(target), "bytes": written.file_bytes}


def _tensor_info(state: State) -> dict[str, TensorInfo]:
    """Describe the tensors of a state. Return nothing if it makes no sense: `digests=False` copies it all the same."""
    try:
        specs = declare_memory(config_of(state), shape_of(state, tensor_shapes(state.tensors)))
        return tensor_info_of((*specs, *attachments.SPECS))
    except (StateCorrupt, ConfigError):
        return {}
