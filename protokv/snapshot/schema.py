"""What a saved state is: a header of plain values, and tensors by name.

The header says which model made the state, how its memory is configured, where the stream stands and what was
watched. It goes to JSON and back with every field checked: a state is untrusted input. Knows nothing of models
or of what the tensors mean, and nothing of files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from torch import Tensor

from protokv.errors import StateCorrupt, StateMismatch
from protokv.records import BackboneIdentity, StreamClock
from protokv.snapshot.text import shown
from protokv.version import __version__

# 1: as 2, and the state of a random generator, `bank.generator`, which recycling drew from. Since 2 what is drawn at a
#    step follows from the seed and the step: a stream begun with 1 goes on, with other draws than it would have.
# 2: as 3, with SHA-256 as the digest of tensors.
# 3: XXH3 as the digest of tensors; a .zarr is a hierarchy of named arrays.
FORMAT_VERSION = 3

# A tensor's name is a path of names, which is how the forms with groups lay it out: `bank.key_center`.
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")

# Deeper than this no configuration of ours nests.
_DEEPEST = 8

# Far beyond any stream, and low enough that what is computed from it stays in 64 bits.
_MOST = 2**48


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything of a state but its tensors. `memory`, `source` and `settings` are plain JSON objects."""

    backbone: BackboneIdentity
    memory: Mapping[str, Any]  # MemoryConfig.to_dict()
    clock: StreamClock
    source: Mapping[str, Any] | None = None  # SourceInfo.to_dict(), or whatever tells one source from another
    settings: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False  # the source was read to its end
    format_version: int = FORMAT_VERSION
    created_by: str = f"protokv {__version__}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, one a field."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(Header)}

    @classmethod
    def from_json(cls, data: object) -> Header:
        """The inverse of `to_json`.

        Raises:
            StateMismatch: The format is newer than this version reads.
            StateCorrupt: A field is missing, unknown or of a wrong type; the message names it.
        """
        if not isinstance(data, dict):
            raise StateCorrupt(f"header: expected an object, got {_kind(data)}")
        version = _count(data.get("format_version"), "format_version")
        if version > FORMAT_VERSION:
            raise StateMismatch(
                f"format_version: this version reads {FORMAT_VERSION}, the state has {version}",
                hint=f"upgrade protokv; the state was written by {shown(data.get('created_by'))}",
            )
        values = _object(data, "header", [f.name for f in fields(Header)])
        if version < 1:
            raise StateCorrupt(f"format_version: expected 1 to {FORMAT_VERSION}, got {version}")
        if not isinstance(values["complete"], bool):
            raise StateCorrupt(f"complete: expected true or false, got {_kind(values['complete'])}")
        return Header(
            backbone=_identity(values["backbone"]),
            memory=_dict(values["memory"], "memory"),
            clock=_clock(values["clock"]),
            source=None if values["source"] is None else _dict(values["source"], "source"),
            settings=_dict(values["settings"], "settings"),
            complete=values["complete"],
            format_version=version,
            created_by=_text(values["created_by"], "created_by"),
        )


class Legend(Protocol):
    """What a tensor is, for whoever opens a state without this library; it decides nothing."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of its axes."""

    @property
    def meaning(self) -> str:
        """What it holds; may be empty."""

    @property
    def unit(self) -> str:
        """Of its elements; may be empty."""


@dataclass(frozen=True, kw_only=True)
class State(Header):
    """A header and the tensors, by name. Tensors may be on any device; after loading they are on the CPU.

    `legends` say what they are, to the forms that can tell it; nothing reads them back.
    """

    tensors: Mapping[str, Tensor]
    legends: Mapping[str, Legend] = field(default_factory=dict)

    @classmethod
    def of(cls, header: Header, tensors: Mapping[str, Tensor]) -> State:
        """A header with its tensors as they were read; those of an older version in the form of the newest."""
        values = {f.name: getattr(header, f.name) for f in fields(Header)}
        if header.format_version < 2:
            tensors = {name: tensor for name, tensor in tensors.items() if name != "bank.generator"}
        return cls(**values | {"format_version": FORMAT_VERSION}, tensors=tensors)


def check_tensor_names(names: Iterable[str]) -> None:
    """Whether these can be the names of a state's tensors: plain words joined by dots, none of them a group of others.

    Raises:
        StateCorrupt: the name that cannot be.
    """
    groups: set[str] = set()
    found: set[str] = set()
    for name in names:
        # Not every file system tells upper from lower case.
        folded = name.lower()
        if not _TENSOR_NAME.fullmatch(name) or folded in found:
            raise StateCorrupt(f"tensor {shown(name)}: not a name that a tensor can have here")
        parts = folded.split(".")
        found.add(folded)
        groups |= {".".join(parts[:n]) for n in range(1, len(parts))}
    for name in found & groups:
        raise StateCorrupt(f"tensor {shown(name)}: its name is also that of a group")


def check_clock(clock: StreamClock) -> None:
    """Whether a stream can stand like this.

    Raises:
        StateCorrupt: its fields contradict each other.
    """
    if (clock.tokens_seen > 0) != (clock.steps > 0) or (clock.stream_time_s > 0) != (clock.steps > 0):
        raise StateCorrupt(
            f"clock: {clock.steps} steps, {clock.tokens_seen} tokens and {clock.stream_time_s} s contradict each other"
        )
    if clock.tokens_seen < clock.steps:
        raise StateCorrupt(f"clock.tokens_seen: {clock.tokens_seen} tokens in {clock.steps} steps")


def _identity(data: object) -> BackboneIdentity:
    values = _object(data, "backbone", [f.name for f in fields(BackboneIdentity)])
    return BackboneIdentity(**{name: _text(value, f"backbone.{name}") for name, value in values.items()})


def _clock(data: object) -> StreamClock:
    values = _object(data, "clock", [f.name for f in fields(StreamClock)])
    for name, least, most in (("fps", 1e-6, 1e6), ("frames_per_step", 1, 1000)):
        if not least <= _number(values[name], f"clock.{name}") <= most:
            raise StateCorrupt(f"clock.{name}: expected {least:g} to {most:g}, got {_kind(values[name])}")
    return StreamClock(
        steps=_count(values["steps"], "clock.steps"),
        stream_time_s=_number(values["stream_time_s"], "clock.stream_time_s"),
        next_position=_count(values["next_position"], "clock.next_position"),
        tokens_seen=_count(values["tokens_seen"], "clock.tokens_seen"),
        fps=_number(values["fps"], "clock.fps"),
        frames_per_step=_count(values["frames_per_step"], "clock.frames_per_step"),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (BackboneIdentity, StreamClock)):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def _object(data: object, name: str, expected: list[str]) -> dict[str, Any]:
    found = _dict(data, name)
    prefix = "" if name == "header" else f"{name}."
    for key in expected:
        if key not in found:
            raise StateCorrupt(f"{prefix}{key}: the field is missing")
    for key in found:
        if key not in expected:
            raise StateCorrupt(f"{prefix}{shown(key)}: unknown field")
    return found


def _dict(data: object, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise StateCorrupt(f"{name}: expected an object, got {_kind(data)}")
    _check_depth(data, name)
    return data


def _check_depth(data: object, name: str, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise StateCorrupt(f"{name}: nested more than {_DEEPEST} levels deep")
    if isinstance(data, dict):
        for key, value in data.items():
            _check_depth(value, f"{name}.{shown(key)}" if depth == 0 else name, depth + 1)
    elif isinstance(data, list):
        for value in data:
            _check_depth(value, name, depth + 1)
    elif isinstance(data, float) and not math.isfinite(data):
        raise StateCorrupt(f"{name}: expected a finite number, got {data}")


def _count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise StateCorrupt(f"{name}: expected a whole number from 0 to {_MOST}, got {_kind(value)}")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST:
        raise StateCorrupt(f"{name}: expected a number from 0 to {_MOST}, got {_kind(value)}")
    return float(value)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise StateCorrupt(f"{name}: expected text, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)[:40] if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    names = {"str": "text", "list": "a list", "dict": "an object"}
    return names.get(type(value).__name__, type(value).__name__)
