"""`MemoryConfig`: the paper's table, the budget arithmetic, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.config import CONFIGS, PRESETS, MemoryConfig, ProtoKVConfig, parse_budget
from protokv.errors import ConfigError

PAPER_TABLE = {
    "split": (1, 3),
    "pseudo_tokens": 8,
    "spatial_weight": 0.1,
    "idle_weight": 0.01,
    "idle_steps": 120,
    "key_rate": 0.05,
    "value_rate": 0.05,
    "spatial_rate": 0.05,
    "decay_rate": 0.05,
    "merge_key_distance": 0.20,
    "merge_value_distance": 0.25,
    "subquantizers": 8,
    "codewords": 16,
}


def test_the_paper_preset_is_the_paper_s_table_to_the_letter() -> None:
    config = ProtoKVConfig.paper(24_000)
    assert {name: getattr(config, name) for name in PAPER_TABLE} == PAPER_TABLE
    assert config.beam_per_mode * config.pseudo_tokens == 32
    assert (config.decay, config.merge, config.recycle, config.residual) == ("floor", True, True, True)
    assert (config.mass_bias, config.anchor, config.encode_with) == ("log_n", "recent", "all")


@pytest.mark.parametrize(("budget", "prototypes", "near"), [(24_000, 2250, 6000), (6000, 562, 1504), (512, 48, 128)])
def test_a_budget_is_split_one_to_three_between_near_and_far(budget: int, prototypes: int, near: int) -> None:
    config = ProtoKVConfig.paper(budget)
    assert (config.prototypes, config.near_tokens) == (prototypes, near)


@given(st.integers(17, 100_000), st.integers(1, 16), st.sampled_from([(1, 5), (1, 3), (1, 2), (3, 1), (1, 0), (0, 1)]))
def test_near_and_far_together_are_the_budget(budget: int, modes: int, split: tuple[int, int]) -> None:
    config = ProtoKVConfig(budget=budget, pseudo_tokens=modes, split=split)
    assert config.near_tokens + config.prototypes * modes == budget
    assert config.near_tokens >= (split[0] > 0)
    assert (config.prototypes > 0) == (split[1] > 0)


@pytest.mark.parametrize(("name", "policy"), [("durable", "agglomerative"), ("continuity", "continuity")])
def test_lasting_presets_forget_nothing_by_age_and_count_no_token_twice(name: str, policy: str) -> None:
    config = ProtoKVConfig.preset(name, 512)
    assert config.policy == policy
    assert (config.pseudo_tokens, config.decay, config.recycle, config.residual) == (1, "off", False, False)
    assert (config.prototypes, config.near_tokens) == (384, 128)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_knows_its_name_at_any_budget(name: str) -> None:
    config = ProtoKVConfig.preset(name, 777)
    assert config.name == name
    assert dataclasses.replace(config, seed=3).name == name
    assert dataclasses.replace(config, idle_steps=121).name == "custom"
    assert MemoryConfig.of(kind="full").name == "full"


def test_a_config_survives_json() -> None:
    config = ProtoKVConfig(budget=999, split=(1, 5), decay="off", decay_rate=0.125, merge=False)
    assert MemoryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert MemoryConfig.from_dict({"budget": 100}) == ProtoKVConfig(budget=100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", 0),
        ("budget", 8),
        ("budget", "6k"),
        ("budget", True),
        ("budget", 6000.0),
        ("split", (1, 2, 3)),
        ("split", "1:3"),
        ("pseudo_tokens", 0),
        ("spatial_weight", -0.1),
        ("spatial_weight", float("nan")),
        ("idle_weight", float("inf")),
        ("idle_steps", -1),
        ("key_rate", 1.01),
        ("decay_rate", -0.01),
        ("decay", "sometimes"),
        ("anchor", None),
        ("mass_bias", "log"),
        ("encode_with", "far"),
        ("merge", 1),
        ("codewords", 1),
        ("warmup_residuals", 15),
        ("smoothing", 0.0),
        ("kind", 3),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        MemoryConfig.from_dict({field: value})
    assert field in refused.value.message
    assert str(value) in refused.value.message


@pytest.mark.parametrize("split", [(0, 0), (-1, 3), (3, -1)])
def test_a_split_that_leaves_nothing_is_refused(split: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"split: .* got {split[0]}:{split[1]}"):
        ProtoKVConfig(split=split)


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kmax"):
        MemoryConfig.from_dict({"kmax": 3})
    with pytest.raises(ConfigError, match="lasting"):
        ProtoKVConfig.preset("lasting", 512)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_setting_is_documented(kind: str) -> None:
    documentation = f"{CONFIGS[kind].__doc__}{MemoryConfig.__doc__}"
    for field in dataclasses.fields(CONFIGS[kind]):
        assert f" {field.name}:" in documentation or f" {field.name}," in documentation, field.name


@pytest.mark.parametrize(
    ("text", "tokens"), [("512", 512), ("6k", 6000), ("24K", 24_000), ("1.5k", 1500), (" 1m ", 1_000_000), (7, 7)]
)
def test_a_budget_is_read_from_text(text: str | int, tokens: int) -> None:
    assert parse_budget(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "0", "-5", "1.5", "6kb", "1e3", "six", "0.0001k", "inf"])
def test_text_that_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="budget"):
        parse_budget(text)


def test_idle_mass_is_kept_in_whole_numbers() -> None:
    kept = ProtoKVConfig().kept_mass
    assert [int(kept * mass) for mass in (1, 19, 20, 21, 40, 100)] == [0, 18, 19, 19, 38, 95]
