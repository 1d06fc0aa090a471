"""From options to the settings of a memory. Knows no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protokv.config import MemoryConfig, ProtoKVConfig, parse_budget, parse_setting
from protokv.errors import ConfigError


def memory_config(
    kind: str, preset: str | None, budget: str, settings: Sequence[str], fixed: Mapping[str, Any]
) -> MemoryConfig:
    """What `--memory`, `--preset`, `--budget`, `--set` and the options in `fixed` say; `--set` wins.

    Raises:
        ConfigError: something of it is unknown, of a wrong type or out of range.
    """
    tokens = parse_budget(budget)
    if kind == ProtoKVConfig.kind:
        base: MemoryConfig = ProtoKVConfig.preset(preset or "durable", tokens)
    elif preset is None:
        base = MemoryConfig.of(kind, budget=tokens)
    else:
        raise ConfigError(f"preset: {kind} has none, got {preset!r}", hint="presets are of --memory protokv")
    return base.with_fields({**fixed, **dict(map(parse_setting, settings))})
