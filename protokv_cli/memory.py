"""From options to the settings of a memory. Knows no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protokv.config import MemoryConfig
from protokv_cli.parsing import parse_budget, parse_setting


def memory_config(name: str, budget: str, settings: Sequence[str], fixed: Mapping[str, Any]) -> MemoryConfig:
    """What `--memory`, `--budget`, `--set` and the options in `fixed` say; `--set` wins.

    Raises:
        ConfigError: something of it is unknown, of a wrong type or out of range.
    """
    base = MemoryConfig.of(name, budget=parse_budget(budget))
    return base.with_fields({**fixed, **dict(map(parse_setting, settings))})
