"""protokv.toml: what is wrong in it is one clear line, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from protokv_cli.exits import Exit
from protokv_cli.main import COMMANDS, app
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
def test_what_is_wrong_is_named_with_what_was_meant(protokv: Program, text: str, said: str, hint: str) -> None:
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
