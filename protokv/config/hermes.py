"""`HermesConfig`: the settings of HERMES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from protokv.config.base import MemoryConfig
from protokv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HermesConfig(MemoryConfig):
    """HERMES: what is held is compressed whenever the next step would exceed the budget.

    Attributes:
        kept_share: fraction of the budget that a compression keeps. What it frees is the room for new steps; the
            released code compresses to the whole budget after chunks of 16 frames, and holds more in between.
        shallow_share: fraction of the layers, from the first on, that rank by recency alone.
        deep_share: fraction of the layers, up to the last, that rank by attention alone and keep a summary token.
    """

    name: ClassVar[str] = "hermes"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "kept_share": (0, 1),
        "shallow_share": (0, 1),
        "deep_share": (0, 1),
    }

    kept_share: float = 0.75
    shallow_share: float = 0.1
    deep_share: float = 0.3

    def check(self) -> None:
        """Bands do not overlap."""
        if self.shallow_share + self.deep_share > 1:
            raise ConfigError(
                f"shallow_share and deep_share: expected 1 together at most, got {self.shallow_share} and "
                f"{self.deep_share}"
            )

    @property
    def compressed_tokens(self) -> int:
        """Tokens that a compression keeps in each layer; fewer if a step needs more room."""
        return int(Fraction(repr(self.kept_share)) * self.budget)
