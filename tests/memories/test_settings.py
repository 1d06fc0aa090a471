"""Settings of baselines: impossible ones are refused by name, and defaults are those of the sources."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from protokv.core import settings as core_settings
from protokv.errors import ConfigError
from protokv.memories import (
    HermesConfig,
    InfiniPotVConfig,
    LastFramesConfig,
    MemoryConfig,
    ReKVConfig,
    SlidingWindowConfig,
)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("dycoke", {"merge_share": 1.1}, "merge_share"),
        ("dycoke-decode", {"prune_share": -0.1}, "prune_share"),
        ("dycoke-decode", {"first_pruned_layer": 0}, "first_pruned_layer"),
        ("hermes", {"shallow_share": -0.1}, "shallow_share"),
        ("hermes", {"deep_share": 1.1}, "deep_share"),
        ("hermes", {"shallow_share": 0.8, "deep_share": 0.3}, "together"),
        ("infinipot-v", {"kept_share": -0.1}, "kept_share"),
        ("infinipot-v", {"redundancy_share": 1.01}, "redundancy_share"),
        ("infinipot-v", {"recent_share": float("nan")}, "recent_share"),
        ("last-frames", {"last_steps": 0}, "last_steps"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(kind: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MemoryConfig.of(kind, **settings)


def test_constants_are_those_of_the_sources() -> None:
    config = InfiniPotVConfig(budget=24_000)
    assert (config.compressed_tokens, config.redundancy_share, config.recent_share) == (18_000, 0.5, 0.25)
    # 0.29 * 100 is less than 29 to a float.
    assert InfiniPotVConfig(budget=100, kept_share=0.29).compressed_tokens == 29
    assert LastFramesConfig().last_steps == 4
    assert (HermesConfig().shallow_share, HermesConfig().deep_share) == (0.1, 0.3)
    assert ReKVConfig(budget=6000).near_tokens == 6000
    assert ReKVConfig(budget=24_000).near_tokens == 15_000


def test_a_memory_of_another_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("my-window", "protokv.memories.window:SlidingWindowConfig", "protokv.memories")
    monkeypatch.setattr(core_settings, "entry_points", lambda group: [entry] if group == entry.group else [])
    found = core_settings.Configs()
    assert list(found) == ["my-window"]
    assert found["my-window"] is SlidingWindowConfig
