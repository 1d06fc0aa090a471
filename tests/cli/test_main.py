"""The program itself: help, version, what it imports, and that every option is explained."""

from __future__ import annotations

from importlib import metadata

import pytest

from protokv.version import __version__
from protokv_cli import main
from protokv_cli.exits import Exit
from tests.cli.conftest import Program

COMMANDS = ["ingest", "query", "inspect", "replay"]


def test_the_version_is_printed_with_those_of_what_results_depend_on(protokv: Program) -> None:
    rows = dict(line.split(" ", 1) for line in protokv("--version").out.splitlines())
    assert next(iter(rows)) == "protokv"
    assert rows["protokv"] == __version__
    assert rows["torch"] == metadata.version("torch")
    assert rows["transformers"] == metadata.version("transformers")
    assert rows["PyAV"] == metadata.version("av")


def test_a_package_that_is_not_there_is_said_not_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.DEPENDS_ON, "decord", "protokv-no-such-package")
    assert main.describe_versions().splitlines()[-1] == "decord not installed"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_explains_every_option(protokv: Program, command: str) -> None:
    text = protokv(command, "--help").out
    assert "Examples:" in text
    assert f"  protokv {command} " in text
    described = [line for line in text.splitlines() if line.strip().startswith("-")]
    assert described
    for line in described:
        position = text.splitlines().index(line)
        following = text.splitlines()[position + 1] if position + 1 < len(text.splitlines()) else ""
        assert len(line.split("  ")) > 2 or following.startswith(" " * 20), f"no help: {line}"


def test_an_unknown_command_or_option_is_a_usage_error(protokv: Program) -> None:
    assert protokv("swallow").code == Exit.USAGE
    assert protokv("ingest", "x.mp4", "--loud").code == Exit.USAGE


def test_a_bug_is_one_line_and_a_traceback_only_with_debug(protokv: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("impossible")

    monkeypatch.setattr("protokv.inspection.describe.describe", broken)
    result = protokv("inspect", "x.safetensors")
    assert result.code == Exit.FAILURE
    assert result.err.splitlines()[0] == "Error: ZeroDivisionError: impossible"
    assert "--debug" in result.err
