"""`MemoryConfig`: settings that every memory shares, and how settings are checked.

A setting is a field of a frozen dataclass; each memory has a dataclass of its own (`protokv.config.CONFIGS`), whose
defaults are that memory's. Owns the wording of a refused setting. Knows nothing of tensors:
sizes that depend on the model are checked when the memory is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, Self, get_args, get_origin, get_type_hints

from protokv.errors import ConfigError

NonFinite = Literal["drop", "refuse"]
Positions = Literal["stream", "compact"]

MOST_TOKENS: Final = 2**24
"""The largest budget: beyond what any device holds, and low enough that no product of settings overflows."""
MOST_FRAMES: Final = 4096
"""The most frames that a question reads afresh."""
MOST_WEIGHT: Final = 1e6
"""The largest weight or distance: its square times any finite key of a real model is a finite float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Settings that every memory has. Make one with `MemoryConfig.of`, or the dataclass of the memory.

    Attributes:
        name: of the memory, the same wherever it is named.
        ranges: least and greatest value of each numeric setting that a class declares, both included.
        budget: |M|, visual tokens that attention may read at query time. The prompt prefix is kept besides.
        positions: "stream" shows every token at the position it had in the stream, as the paper does; "compact" shows
            the tokens in memory at consecutive positions, so that a stream of any length stays inside the range that
            the model was trained on (`protokv.context`).
        recent_frames: N, the last frames whose vision features the state keeps, and that a question reads again behind
            the memory; 0: none. They count in the bytes of the state and in the tokens that an answer
            read.
        non_finite: "drop" leaves out and counts tokens whose keys or values are not finite; "refuse" stops at the step,
            and waits for the device once a step.
        seed: of all random draws.
    """

    name: ClassVar[str]
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "budget": (1, MOST_TOKENS),
        "seed": (0, 2**63 - 1),
        "recent_frames": (0, MOST_FRAMES),
    }

    budget: int = 6000
    positions: Positions = "stream"
    recent_frames: int = 0
    non_finite: NonFinite = "drop"
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            check_type(field.name, getattr(self, field.name), hints[field.name])
        for cls in reversed(type(self).__mro__):
            for name, (low, high) in vars(cls).get("ranges", {}).items():
                check_range(name, getattr(self, name), low, high)
        self.check()

    def check(self) -> None:
        """Refuse settings that contradict each other; each is of its type and within its range already.

        Raises:
            ConfigError: naming one of them.
        """

    @property
    def near_tokens(self) -> int:
        """W, exact tokens of the near window."""
        return self.budget

    @property
    def prototypes(self) -> int:
        """K, prototypes of each layer and KV head."""
        return 0

    @property
    def horizon(self) -> int | None:
        """Return how many of the last steps a question depends on; None: all."""
        return None

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults of the name, without the budget and the seed, for tables.

        Plain JSON values, in the order of the fields.
        """
        ours, defaults = self.to_dict(), type(self)(budget=self.budget, seed=self.seed).to_dict()
        return {name: value for name, value in ours.items() if value != defaults[name]}

    def resolve(self) -> Self:
        """Return this config with every "auto" resolved; configs that are equal then keep equal states."""
        return self

    @staticmethod
    def of(name: str, **settings: Any) -> MemoryConfig:
        """Return the settings of a memory by its name.

        Raises:
            ConfigError: there is no such memory, or a setting is unknown, of a wrong type or out of range.
        """
        return MemoryConfig.from_dict({"kind": name} | settings)

    def with_fields(self, changes: Mapping[str, Any]) -> Self:
        """Return this config with some fields changed, under the same checks as `from_dict`."""
        return replace(self, **known_fields(type(self), changes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the name under `kind`, and one for each field."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"kind": self.name} | values

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> MemoryConfig:
        """Return the config of plain values, the inverse of `to_dict`. A missing field has its default.

        Raises:
            ConfigError: the name or a field is unknown, of a wrong type or out of range; the message names it.
        """
        from protokv.config import CONFIGS, DEFAULT

        settings = dict(data)
        name = settings.pop("kind", DEFAULT)
        if not isinstance(name, str) or name not in CONFIGS:
            raise ConfigError(f"there is no memory {shorten(name)}", hint=f"use one of {', '.join(CONFIGS)}")
        cls = CONFIGS[name]
        return cls(**known_fields(cls, settings))


def known_fields(cls: type[MemoryConfig], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of a config class from plain values; refuse unknown names."""
    known = {field.name for field in fields(cls)}
    for name in data:
        if name not in known:
            hint = f"known settings: {', '.join(sorted(known))}"
            raise ConfigError(f"{name}: there is no such setting of {cls.name}", hint=hint)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def check_type(name: str, value: object, hint: Any) -> None:
    """Refuse a value of another type than the annotation of its field says."""
    if get_origin(hint) is Literal:
        # True is 1 to Python, never to a setting.
        if not any(type(value) is type(one) and value == one for one in get_args(hint)):
            raise ConfigError(f"{name}: expected one of {', '.join(map(str, get_args(hint)))}, got {shorten(value)}")
        return
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or len(value) != 2 or any(type(part) is not int for part in value):
            raise ConfigError(f"{name}: expected two whole numbers, got {shorten(value)}")
        return
    # A bool is an int to Python, never to a setting; a whole number may stand for a real one.
    accepted = (int, float) if hint is float else (hint,)
    if type(value) not in accepted:
        raise ConfigError(f"{name}: expected {hint.__name__}, got {type(value).__name__} {shorten(value)}")


def check_range(name: str, value: float | tuple[int, ...], low: float, high: float) -> None:
    """Refuse a number, or a tuple with a number, that is not from `low` to `high`, both included."""
    for part in value if isinstance(value, tuple) else (value,):
        # Written so that NaN is refused as well.
        if not low <= part <= high:
            raise ConfigError(f"{name}: expected {low} to {high}, got {shorten(value)}")


def shorten(value: object) -> str:
    """Return a value for an error message: as Python writes it, on one line, cut off where it is long."""
    try:
        text = ascii(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
