"""protokv.toml: what is wrong in it is one clear line, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from protokv_cli.exits import Exit
from protokv_cli.main import COMMANDS, app
from tests.cli.conftest import Program


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("query = 5\n", "query is a command"),
        ("[ingest\n", "cannot be read"),
        ("[swallow]\nx = 1\n", "there is no command swallow"),
        ("budgt = 5\n", "no command has the setting budgt"),
        ("[query]\nbudget = 5\n", "query has no setting budget"),
        ("[ingest]\nresume = 'yes'\n", "ingest.resume is 'yes'"),
        ("[ingest]\nkeep = 2.5\n", "ingest.keep is 2.5"),
        ("[ingest]\nfps = '2'\n", "ingest.fps is '2'"),
        ("[ingest]\nmodel = true\n", "ingest.model is True"),
        ("format = 'xml'\n", "format is 'xml'"),
        ("fmt = 'json'\n", "no command has the setting fmt"),
        ("as_json = true\n", "no command has the setting as_json"),
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


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("budgt = 5\n", "did you mean budget?"),
        ("[injest]\nfps = 2\n", "did you mean ingest?"),
        ("[query]\nmax-new-token = 5\n", "did you mean max_new_tokens?"),
        ("[inspect]\nzzz = 5\n", "names are those of the options in --help"),
        ("[ingest]\nresume = 'yes'\n", "expected true or false"),
        ("[ingest]\nkeep = 2.5\n", "expected a whole number"),
        ("format = 'xml'\n", "expected one of auto, table, json, plain"),
    ],
)
def test_the_hint_names_what_was_meant(protokv: Program, text: str, nearest: str) -> None:
    (protokv.folder / "protokv.toml").write_text(text)
    assert nearest in protokv("query", "x.safetensors", "what ?").err.splitlines()[1]


def test_options_whose_names_are_others_in_the_program_are_read(protokv: Program, mocked: None, video: Path) -> None:
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


def test_a_variable_sets_an_option_and_one_that_is_none_is_told(protokv: Program, mocked: None, video: Path) -> None:
    protokv.environment |= {"PROTOKV_JSON": "1", "PROTOKV_OUTPUT": "b.pt", "PROTOKV_BUDGT": "3", "PROTOKV_BUDGET": "24"}
    result = protokv("ingest", video)
    assert result.rows()[-1]["state"] == "b.pt"
    assert "Warning: PROTOKV_BUDGT is no setting; did you mean PROTOKV_BUDGET?" in result.err
