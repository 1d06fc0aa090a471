"""protokv.toml, variables and the grammar of values: a mistake is one clear line, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError
from protokv.ingestion import NEVER, Every
from protokv.replay.memories import Variation
from protokv_cli.exits import Exit
from protokv_cli.main import COMMANDS, app
from protokv_cli.parsing import (
    parse_budget,
    parse_duration,
    parse_every,
    parse_list,
    parse_scene,
    parse_seeds,
    parse_setting,
    parse_variation,
)
from protokv_cli.tables import time_text
from tests.cli.conftest import Program


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("query = 5\n", "query is a command", "write [query]"),
        ("[ingest\n", "cannot be read", "mend it"),
        ("[injest]\nfps = 2\n", "there is no command injest", "did you mean ingest?"),
        ("budgt = 5\n", "no command has the setting budgt", "did you mean budget?"),
        ("[query]\nbudget = 5\n", "query has no setting budget", "names are those of the options in --help"),
        ("[query]\nmax-new-token = 5\n", "query has no setting max-new-token", "did you mean max_new_tokens?"),
        ("[ingest]\nresume = 'yes'\n", "ingest.resume is 'yes'", "expected true or false"),
        ("[ingest]\nkeep = 2.5\n", "ingest.keep is 2.5", "expected a whole number"),
        ("[ingest]\nfps = '2'\n", "ingest.fps is '2'", "expected a number"),
        ("[ingest]\nmodel = true\n", "ingest.model is True", "expected a text"),
        ("format = 'xml'\n", "format is 'xml'", "expected one of auto, table, json, plain"),
        ("fmt = 'json'\n", "no command has the setting fmt", ""),
        ("[query]\nat = 1979-05-27\n", "query.at is", "expected a text"),
        ("[query]\nat = [1, 2]\n", "query.at is", "expected a text"),
        ('[query]\n"\\u001b[31m" = 1\n', "\\x1b[31m", ""),
        ("a = " + "[" * 5000 + "]" * 5000, "cannot be read", "mend it"),
    ],
)
def test_a_wrong_setting_is_named_with_a_suggestion(protokv: Program, text: str, said: str, hint: str) -> None:
    (protokv.folder / "protokv.toml").write_text(text)
    result = protokv("query", "x.safetensors", "what ?")
    assert result.code == Exit.USAGE
    error, help_ = result.err.splitlines()
    assert error.startswith("Error: protokv.toml")
    assert said in error
    assert hint in help_


def test_a_setting_at_the_top_serves_every_command_that_has_it(protokv: Program) -> None:
    (protokv.folder / "protokv.toml").write_text('format = "plain"\nmax-new-tokens = 3\n[ingest]\nset = ["anchor"]\n')
    assert "no state at x.safetensors" in protokv("query", "x.safetensors", "what ?").err
    assert "NAME=VALUE" in protokv("ingest", "x.mp4").err


def test_an_option_is_read_by_its_name_on_the_command_line(protokv: Program, mocked: None, video: Path) -> None:
    text = "quiet = true\n[ingest]\njson = true\noutput = 'there.safetensors'\nset = ['split=1:5']\nbudget = 24\n"
    (protokv.folder / "protokv.toml").write_text(text + "[inspect]\nformat = 'plain'\n")
    assert protokv("ingest", video).rows()[-1]["state"] == "there.safetensors"
    lines = protokv("inspect", "there.safetensors").out.splitlines()
    assert "memory.budget\t24" in lines
    assert "memory.config.split[1]\t5" in lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_its_variable(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    variables = {parameter.opts[0]: parameter.envvar for parameter in command.params if parameter.opts[0][:2] == "--"}
    assert variables.pop("--help", None) is None
    assert variables == {option: "PROTOKV_" + option[2:].upper().replace("-", "_") for option in variables}
    assert "--debug" in variables


def test_a_variable_sets_an_option_and_an_unknown_one_is_reported(protokv: Program, mocked: None, video: Path) -> None:
    protokv.environment |= {"PROTOKV_JSON": "1", "PROTOKV_OUTPUT": "b.pt", "PROTOKV_BUDGT": "3", "PROTOKV_BUDGET": "24"}
    result = protokv("ingest", video)
    assert result.rows()[-1]["state"] == "b.pt"
    assert "Warning: PROTOKV_BUDGT is no setting; did you mean PROTOKV_BUDGET?" in result.err


SECONDS = {
    "0": 0, "30s": 30, "2m": 120, "1.5h": 5400, " 7 ": 7, "10M": 600, "1m30s": 90, "1h2m3.5s": 3723.5, "7:30": 450,
    "7m30s": 450, "450": 450, "450s": 450, "7.5m": 450, "0:04.5": 4.5, "1:02:03": 3723, "90:00": 5400, "1h30s": 3630,
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_list, " a,, b ,", ["a", "b"]),
        (parse_seeds, "7:3", range(7, 10)),
        (parse_seeds, "7", range(7, 8)),
        (parse_scene, "6:20", (6, 20)),
        (parse_scene, "none", None),
        (parse_every, "never", NEVER),
        (parse_every, "30s", Every(seconds=30)),
        (parse_every, "2m", Every(seconds=120)),
        (parse_every, "500steps", Every(n_steps=500)),
        (parse_every, "1 step", Every(n_steps=1)),
        (parse_variation, "paper.split=1:5,1:3", Variation("paper", "split", [("1:5", (1, 5)), ("1:3", (1, 3))])),
        (parse_variation, "pseudo-tokens=4", Variation(None, "pseudo_tokens", [("4", 4)])),
        (parse_budget, "512", 512),
        (parse_budget, "6k", 6000),
        (parse_budget, "24K", 24_000),
        (parse_budget, "1.5k", 1500),
        (parse_budget, " 1m ", 1_000_000),
        (parse_setting, "split=1:5", ("split", (1, 5))),
        (parse_setting, "idle-steps = 7", ("idle_steps", 7)),
        (parse_setting, "key_rate=0.5", ("key_rate", 0.5)),
        (parse_setting, "merge=false", ("merge", False)),
        (parse_setting, "anchor=first", ("anchor", "first")),
        (parse_setting, "anchor=a=b", ("anchor", "a=b")),
        (parse_setting, "x=" + "[" * 100_000, ("x", "[" * 100_000)),
        *((parse_duration, text, seconds) for text, seconds in SECONDS.items()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:20]),
)
def test_a_value_is_read_from_its_text(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@given(st.integers(0, 10**7))
def test_every_time_that_a_table_prints_is_read_back(tenths: int) -> None:
    assert parse_duration(time_text(tenths / 10)) == pytest.approx(tenths / 10)


def test_a_time_is_shown_to_the_nearest_tenth() -> None:
    assert [time_text(s) for s in (4.004, 3.97, 59.99, 3600, 12.5)] == ["0:04", "0:04", "1:00", "1:00:00", "0:12.5"]


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (parse_budget, ("", "k", "0", "-5", "1.5", "6kb", "1e3", "six", "0.0001k", "inf"), "budget"),
        (parse_setting, ("", "=", "a", "a=", "=1"), "NAME=VALUE"),
        (
            parse_duration,
            ("", " ", "s", "-1s", "1d", "7m30", "30s7m", "7:60", "7:3", "1:2:03", ":30", "nan", "1e3", "٣s", "9" * 400),
            "length of time",
        ),
        (parse_every, ("", "0s", "0steps", "-1steps", "often", "steps", "1.5steps"), "cannot commit every"),
        (parse_seeds, ("", "x", "7:", "7:0", "-1", "7:x", "7:2:3"), "SEED:COUNT"),
        (parse_scene, ("6",), "SHORTEST:LONGEST"),
        (parse_variation, ("split", "split=", "=1"), "NAME=VALUE"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_other_text_is_refused(parse: Callable[[str], object], texts: tuple[str, ...], said: str) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=said):
            parse(text)
