"""`ReKVConfig`: the settings of ReKV (arXiv 2503.00540)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from protokv.config.base import MOST_TOKENS, MemoryConfig, Positions
from protokv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReKVConfig(MemoryConfig):
    """ReKV: everything is kept outside the device, and each layer retrieves what a question is about.

    Attributes:
        positions: as for every memory; "compact", the published way, packs what was retrieved behind the prompt prefix.
        local_tokens: tokens of the window that new steps attend to, never more than the budget. 15000 is the released
            code's.
        archive_tokens: 0 keeps everything, as published. Any other number, not below the budget, is what the archive
            may hold: the oldest steps are dropped for new ones.
    """

    name: ClassVar[str] = "rekv"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "local_tokens": (1, MOST_TOKENS),
        "archive_tokens": (0, 2**40),
    }

    positions: Positions = "compact"
    local_tokens: int = 15_000
    archive_tokens: int = 0

    def check(self) -> None:
        """Refuse an archive that is smaller than what a question may read."""
        if 0 < self.archive_tokens < self.budget:
            raise ConfigError(
                f"archive_tokens: expected 0 or at least the budget of {self.budget}, got {self.archive_tokens}",
                hint="0 keeps everything",
            )

    @property
    def near_tokens(self) -> int:
        """W, tokens of the window that new steps attend to."""
        return min(self.local_tokens, self.budget)
