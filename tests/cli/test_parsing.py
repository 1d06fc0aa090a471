"""The grammar of option values."""

from __future__ import annotations

import pytest

from protokv.errors import ConfigError
from protokv_cli.parsing import parse_list, parse_scene, parse_seeds


def test_a_list_has_no_empty_parts() -> None:
    assert parse_list(" a,, b ,") == ["a", "b"]


def test_seeds_are_counted_on_from_the_first() -> None:
    assert list(parse_seeds("7:3")) == [7, 8, 9]
    assert list(parse_seeds("7")) == [7]


@pytest.mark.parametrize("text", ["", "x", "7:", "7:0", "-1", "7:x", "7:2:3"])
def test_what_is_no_seed_and_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SEED:COUNT"):
        parse_seeds(text)


def test_a_scene_is_a_range_or_none() -> None:
    assert parse_scene("6:20") == (6, 20)
    assert parse_scene("none") is None
    with pytest.raises(ConfigError, match="SHORTEST:LONGEST"):
        parse_scene("6")
