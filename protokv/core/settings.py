"""`MemoryConfig`: settings that every memory shares, how they are checked, and `MEMORIES`, which
finds them by name.

A setting is a field of a frozen dataclass, annotated with its type and the least and greatest value
of a number: `Annotated[int, 1, 1024]`. Sizes that depend on the model are checked when the memory
is built.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import ValidationError, convert

from protokv.errors import ConfigError, suggest_name
from protokv.texts import JsonObject, JsonRecord

if TYPE_CHECKING:
    # The command line checks settings before anything heavy is imported.
    from protokv.core.memory import SingleDeviceMemory
    from protokv.core.parts import SessionListener

# the largest budget: more than any device holds, and no product of settings overflows
MOST_BUDGET = 2**24

PositionMode = Literal["stream", "compact"]
ShareSetting = Annotated[float, 0, 1]
# its square times any key of a real model is a finite float32
WeightSetting = Annotated[float, 0, 1e6]

DEFAULT_MEMORY = "durable"  # the memory that is used where none is named
_ENTRY_POINTS = "protokv.memories"
MEMORY_VARIABLE = "PROTOKV_MEMORY"
"""The variable of `--memory`. If it is `MODULE:CLASS`, states of that memory can be read."""

_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_MULTIPLES = {"": 1, "k": 1_000, "m": 1_000_000}

_MOST_FPS = 240
"""The most sampled frames a second: no camera is faster, and a step stays longer than the rounding
of time stamps.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Settings that every memory has. Use `MemoryConfig.of` or the memory's own dataclass to make
    one.

    Attributes:
        name: the memory's one name: on the command line, in states, in tables and in JSON.
        memory: the class of the memory.
        budget: |M|, visual tokens that attention may read at query time, without the prompt prefix.
        positions: "stream" shows every token at its position in the stream, as the paper does.
            "compact" shows the tokens in memory at consecutive positions, so that a stream of any
            length stays inside the range that the model was trained on (`protokv.core.context`).
        recent_frames: N, the last frames whose vision features the state keeps. A question reads
            them again after the memory. They count in the bytes of the state and in the tokens of
            an answer. 0: none.
        seed: seed of all random draws.
    """

    name: ClassVar[str]
    memory: ClassVar[type[SingleDeviceMemory[Any]]]

    budget: Annotated[int, 1, MOST_BUDGET] = 6000
    positions: PositionMode = "stream"
    recent_frames: Annotated[int, 0, 4096] = 0
    seed: Annotated[int, 0, 2**63 - 1] = 0

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, (kind, span) in read_field_types(cls).items():
            _check_value(name, getattr(self, name), kind, span)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if settings contradict each other, naming one. Types and ranges are
        checked before.
        """

    @property
    def near_tokens(self) -> int:
        """W, exact tokens of the near window."""
        return self.budget

    @property
    def prototypes(self) -> int:
        """K, prototypes of each layer and KV head."""
        return 0

    def listeners(self) -> Sequence[SessionListener]:
        """Return what listens to a session for this memory."""
        return ()

    def changes(self) -> JsonObject:
        """Return JSON values that differ from this memory's defaults, but for budget, seed, words
        and size of steps.
        """
        defaults = type(self)(budget=self.budget, seed=self.seed).for_step(
            getattr(self, "step_tokens", 0)
        )
        ours = self.to_dict()
        theirs = defaults.with_words(True).to_dict()
        return {name: value for name, value in ours.items() if value != theirs.get(name)}

    def with_words(self, words: bool) -> Self:
        """Return this config for a stream with words, or without; itself if they are tokens like
        any other.
        """
        return self

    def for_step(self, tokens: int) -> Self:
        """Return this config for a stream whose first step has so many tokens; itself if that does
        not matter.
        """
        return self

    @staticmethod
    def of(name: str, **settings: Any) -> MemoryConfig:
        """Return the settings of a memory by its name; a budget may be written as "6k". ConfigError
        as `from_dict`.
        """
        if isinstance(budget := settings.get("budget"), str):
            settings["budget"] = parse_budget(budget)
        return MemoryConfig.from_dict(
            {"kind": MEMORIES.load(name) if ":" in name else name} | settings
        )

    def with_fields(self, changes: JsonRecord) -> Self:
        """Return this config with some fields changed; the checks of `from_dict` apply."""
        return replace(self, **_known_fields(type(self), changes))

    def to_dict(self) -> JsonObject:
        """Return plain JSON values: the name under `kind`, and each field."""
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        return {"kind": self.name} | values

    @staticmethod
    def from_dict(data: JsonRecord) -> MemoryConfig:
        """Return the config of plain values, the inverse of `to_dict`. A missing field has its
        default.

        ConfigError: the name or a field is unknown, of a wrong type or out of range; the message
        names it.
        """
        settings = dict(data)
        name = settings.pop("kind", DEFAULT_MEMORY)
        known = isinstance(name, str) and name in MEMORIES
        if not known and ":" in (own := os.environ.get(MEMORY_VARIABLE, "")):
            known = MEMORIES.load(own) == name
        if not known:
            raise ConfigError(
                f"there is no memory {format_setting_value(name)}",
                hint=suggest_name(name, MEMORIES),
            )
        return MEMORIES[name](**_known_fields(MEMORIES[name], settings))


class MemoryRegistry(Mapping[str, type[MemoryConfig]]):
    """The settings of each memory by its name; a class is imported when it is asked for first.

    `protokv.memories` adds its own, an installed package others by an entry point: `NAME =
    "MODULE:CLASS"`.
    """

    def __init__(self) -> None:
        self._entries = {entry.name: entry for entry in entry_points(group=_ENTRY_POINTS)}

    def add(self, name: str, where: str) -> None:
        """Add settings under a name, `where` as in an entry point."""
        self._entries[name] = EntryPoint(name, where, _ENTRY_POINTS)

    def load(self, where: str) -> str:
        """Add the settings at `MODULE:CLASS`; return their name. The module is installed, or in the
        current folder.

        A state never calls this: what it names is no reason to run code. ConfigError: there is no
        such module or class, or it has no settings of a memory.
        """
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        try:
            cls = EntryPoint("", where, _ENTRY_POINTS).load()
            if not issubclass(cls, MemoryConfig) or not hasattr(cls, "memory"):
                raise TypeError("it is no MemoryConfig with a memory")
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"memory {where}: {error}",
                hint="name it MODULE:CLASS, with a module that is installed or in this folder, "
                "such as protokv.memories.window:SlidingWindowConfig",
            ) from error
        self.add(cls.name, where)
        return str(cls.name)

    def __getitem__(self, name: str) -> type[MemoryConfig]:
        found: type[MemoryConfig] = self._entries[name].load()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


MEMORIES = MemoryRegistry()


def choose_memory(
    memory: str | MemoryConfig, budget: int | str, settings: Mapping[str, Any]
) -> MemoryConfig:
    """Return the settings of a memory by its name, or as they are."""
    if isinstance(memory, MemoryConfig):
        return memory
    return MemoryConfig.of(memory, budget=budget, **settings)


@cache
def read_field_types(cls: Any) -> dict[str, tuple[Any, tuple[float, float] | None]]:
    """Return of each field of a config class its type, and the least and greatest value of a
    number.
    """
    # Any class with a parameter stands for the class of the memory, which is heavy to import.
    hints = get_type_hints(cls, localns={"SingleDeviceMemory": list}, include_extras=True)
    found = {}
    for field in fields(cls):
        kind, *span = (
            get_args(hints[field.name])
            if get_origin(hints[field.name]) is Annotated
            else [hints[field.name]]
        )
        found[field.name] = kind, tuple(span) or None
    return found


def _known_fields(cls: type[MemoryConfig], data: JsonRecord) -> JsonObject:
    """Return keyword arguments for a config class from plain values; refuse unknown names."""
    known = sorted(field.name for field in fields(cls))
    for name in data:
        if name not in known:
            raise ConfigError(
                f"{name}: there is no such setting of {cls.name}", hint=suggest_name(name, known)
            )
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }


def _check_value(name: str, value: Any, kind: Any, span: tuple[float, float] | None) -> None:
    """Refuse a value of another type than `kind`, or a number outside of a span. In Python True
    equals 1; here not.
    """
    try:
        convert(value, kind)
        right = True
    except ValidationError:
        right = False
    if get_origin(kind) is Literal:
        expected = f"one of {', '.join(map(str, get_args(kind)))}"
    else:
        expected = _KINDS.get(kind, "two whole numbers, such as 1:3")
    if right and span:
        low, high = span
        # Written so that NaN is refused as well.
        right = all(
            low <= part <= high for part in (value if isinstance(value, tuple) else (value,))
        )
        expected = f"{low} to {high}"
    if not right:
        raise ConfigError(f"{name}: expected {expected}, got {format_setting_value(value)}")


def parse_budget(text: str) -> int:
    """Return the tokens of "512", "6k" or "1.5k" (thousands) or "1m" (millions)."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([km]?)", text.strip().lower(), re.ASCII)
    tokens = Fraction(match[1]) * _MULTIPLES[match[2]] if match else Fraction(0)
    if tokens < 1 or tokens.denominator != 1:
        raise ConfigError(
            f"budget: expected a positive number of tokens such as 512, 6k or 24k, got {text!r}",
            hint="k stands for 1000 tokens, m for 1000000",
        )
    return int(tokens)


def check_sampled_fps(fps: float) -> None:
    """Refuse a number of sampled frames a second that is not above 0 and at most `_MOST_FPS`; NaN
    too.
    """
    if not 0 < fps <= _MOST_FPS:
        raise ConfigError(
            f"fps is {fps:g}",
            hint=f"use a number of frames per second above 0, at most {_MOST_FPS}",
        )


def format_setting_value(value: object) -> str:
    """Return a value as Python writes it, on one line of at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
