"""`MemoryConfig`: the budget arithmetic, and wrong settings that are refused."""

import json
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.core import settings as core_settings
from protokv.errors import ConfigError
from protokv.memories import (
    MEMORIES,
    InfiniPotVConfig,
    MemoryConfig,
    PaperConfig,
    ReKVConfig,
    SlidingWindowConfig,
)
from protokv.texts import Keywords


@given(
    st.integers(17, 100_000),
    st.integers(1, 16),
    st.sampled_from([(1, 5), (1, 3), (1, 2), (3, 1), (1, 0), (0, 1)]),
)
def test_near_and_far_together_are_the_budget(
    budget: int, modes: int, split: tuple[int, int]
) -> None:
    config = PaperConfig(budget=budget, pseudo_tokens=modes, split=split)
    assert config.near_tokens + config.prototypes * modes == budget
    assert config.near_tokens >= (split[0] > 0)
    assert (config.prototypes > 0) == (split[1] > 0)


def test_shares_of_a_budget_are_exact_as_written() -> None:
    paper = PaperConfig(budget=24_000)
    assert (paper.prototypes, paper.near_tokens) == (2250, 6000)
    # 0.29 * 100 is less than 29 to a float.
    assert InfiniPotVConfig(budget=100, kept_share=0.29).compressed_tokens == 29
    assert [ReKVConfig(budget=budget).near_tokens for budget in (6000, 24_000)] == [6000, 15_000]


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_keeps_its_name_whatever_its_settings(name: str) -> None:
    config = MemoryConfig.of(name, budget=777)
    assert MEMORIES[name].name == config.name == config.to_dict()["kind"] == name
    assert config.changes() == {}
    other = {
        "recent_frames": 5,
        "positions": "stream" if config.positions == "compact" else "compact",
    }
    changed = config.with_fields({"seed": 2**63 - 1} | other)
    assert (changed.name, changed.changes()) == (name, other)
    assert MemoryConfig.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", 0),
        ("budget", 8),
        ("budget", True),
        ("budget", 2**24 + 1),
        ("pseudo_tokens", 0),
        ("split", (1, 2, 3)),
        ("spatial_weight", -0.1),
        ("merge", 1),
        ("spatial_weight", float("nan")),
        ("spatial_weight", 10**400),
        ("key_rate", 1.01),
        ("decay", "sometimes"),
        ("warmup_residuals", 15),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        MemoryConfig.from_dict({"kind": "paper", field: value})
    assert field in refused.value.message
    assert len(str(refused.value.message)) < 200
    assert (isinstance(value, int) and value > 10**80) or repr(value) in refused.value.message


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("paper", {"split": (0, 0)}, "split: "),
        ("hermes", {"shallow_share": 0.8, "deep_share": 0.3}, "together"),
        *(
            ("durable", {"center_bits": bits}, "center_bits: expected one of 8, 32, got")
            for bits in (16, 8.0, "8")
        ),
    ],
)
def test_an_impossible_setting_is_refused_by_name(kind: str, settings: Keywords, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MemoryConfig.of(kind, **settings)


def test_a_memory_of_another_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(
        "my-window", "protokv.memories.window:SlidingWindowConfig", "protokv.memories"
    )
    monkeypatch.setattr(
        core_settings, "entry_points", lambda group: [entry] if group == entry.group else []
    )
    found = core_settings.MemoryRegistry()
    assert list(found) == ["my-window"]
    assert found["my-window"] is SlidingWindowConfig


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kmax"):
        MemoryConfig.from_dict({"kmax": 3})
    with pytest.raises(ConfigError, match="decay: there is no such setting of durable"):
        MemoryConfig.of("durable", decay="off")


@pytest.mark.parametrize("name", ["lasting", "", 3, None, ["durable"], "x" * 10_000])
def test_an_unknown_memory_is_refused_with_those_that_there_are(name: object) -> None:
    with pytest.raises(ConfigError, match="there is no memory") as refused:
        MemoryConfig.from_dict({"kind": name})
    assert len(refused.value.message) < 200
    assert "durable, paper, continuity" in str(refused.value.hint)


@pytest.mark.parametrize("cls", MEMORIES.values())
def test_every_number_has_a_least_and_a_greatest_value_that_keeps_squares_finite(
    cls: type[MemoryConfig],
) -> None:
    read: Any = core_settings.read_field_types
    types = read(cls)
    assert all(span for kind, span in types.values() if kind in (int, float))
    for low, high in [span for _, span in types.values() if span]:
        assert -1 <= low < high <= 2**63
        assert low**2 < float("inf") > float(high) ** 2
