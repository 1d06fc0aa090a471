"""protokv.toml: what is wrong in it is one clear line, never a traceback."""

from __future__ import annotations

import pytest

from protokv_cli.exits import Exit
from tests.cli.conftest import Program


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("query = 5\n", "query is a command"),
        ("[ingest\n", "cannot be read"),
        ("[swallow]\nx = 1\n", "there is no command swallow"),
        ("budgt = 5\n", "no command has the setting budgt"),
        ("[query]\nbudget = 5\n", "query has no setting budget"),
        ("[query]\nat = 1979-05-27\n", "query.at is"),
        ("[query]\nat = [1, 2]\n", "query.at is"),
        ("[query]\n'\x1b[31m' = 1\n".replace("\x1b", "\\u001b").replace("'", '"'), "\\x1b[31m"),
        ("a = " + "[" * 5000 + "]" * 5000, "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(protokv: Program, text: str, said: str) -> None:
    (protokv.folder / "protokv.toml").write_text(text)
    result = protokv("query", "x.safetensors", "what ?")
    assert result.code == Exit.USAGE
    assert said in result.err.splitlines()[0]
    assert result.err.splitlines()[0].startswith("Error: protokv.toml")
    assert "Traceback" not in result.err


def test_a_setting_at_the_top_serves_every_command_that_has_it(protokv: Program) -> None:
    (protokv.folder / "protokv.toml").write_text('format = "plain"\nmax-new-tokens = 3\n[ingest]\nset = ["anchor"]\n')
    assert "no state at x.safetensors" in protokv("query", "x.safetensors", "what ?").err
    assert "NAME=VALUE" in protokv("ingest", "x.mp4").err
