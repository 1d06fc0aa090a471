"""The program itself: help, version, start, end, and the grammar of
values.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from protokv.core.settings import parse_budget
from protokv.errors import ConfigError
from protokv.ingestion import COMMIT_NEVER, Every
from protokv.replay.memories import SettingSweep
from protokv.state.moments import parse_duration
from protokv.texts import Keywords
from protokv.version import __version__
from protokv_cli import main
from protokv_cli.exits import ExitCode
from protokv_cli.parsing import (
    parse_every,
    parse_list,
    parse_setting,
    parse_variation,
)
from tests.cli.conftest import Program

GROUP: Any = typer.main.get_command(main.app)

# Packages that take long to import, and that the embedded model does without.
HEAVY = {"transformers", "huggingface_hub", "zarr", "jinja2", "sympy", "matplotlib"}


@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_help_fits_80_columns_and_is_spelled_in_three_ways(protokv: Program, command: str) -> None:
    assert protokv("--version").out == f"protokv {__version__}\n"
    protokv.environment["COLUMNS"] = "80"
    words = command.split()
    page, same, short = (
        protokv(*spelled).out for spelled in ([*words, "--help"], ["help", *words], [*words, "-h"])
    )
    assert page == same == short
    assert max(map(len, page.splitlines())) <= 80
    assert f"protokv {command}".strip() in page


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_option_says_what_it_does_and_has_a_panel_and_a_variable(name: str) -> None:
    for one in GROUP.commands[name].params:
        assert one.help, one.name
        if one.param_type_name == "option":
            assert one.rich_help_panel, one.name
            assert (
                one.envvar == "PROTOKV_" + one.opts[0].removeprefix("--").replace("-", "_").upper()
            )


def test_a_wrong_option_or_a_bug_is_one_line_and_a_traceback_only_with_debug(
    protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Did you mean 'ingest'" in protokv("help", "ingst").err
    result = protokv("inspect", "x.safetensors", "--format", "jsn")
    assert result.code == ExitCode.USAGE
    assert "Error: Invalid value for '--format' / '-f'" in result.err.splitlines()[-1]

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("impossible")

    monkeypatch.setattr("protokv.state.reader.StateReader.open", broken)
    result = protokv("inspect", "x.safetensors")
    assert (result.code, result.err.splitlines()[0]) == (
        ExitCode.FAILURE,
        "Error: ZeroDivisionError: impossible",
    )
    assert "--debug" in result.err
    assert "Traceback" in protokv("inspect", "x.safetensors", "--debug").err


IMPORTS = """
import sys

def tell(stage):
    print("loaded", stage, *{".".join(name.split(".")[:n]) for name in sys.modules for n in (1, 2)},
          file=sys.stderr)

import protokv
from protokv_cli.main import app
for words in ("--version", "--help", "ingest --help", "query --help", "replay --help"):
    app(words.split(), standalone_mode=False)
tell("help")
for state in ("s.safetensors", "."):
    app(["query", state, "what colour was the star?", "--json"], standalone_mode=False)
tell("query")
"""
"""One process that does more and more, and tells after each stage which packages and rooms are
imported.
"""


def test_every_command_imports_only_what_it_needs(embedded: Program, video: Path) -> None:
    assert embedded("ingest", video, "-o", "s.safetensors", "--budget", "24", "--json").code == 0
    options: Keywords = {"cwd": embedded.folder, "env": embedded.environment, "timeout": 120}
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, **options
    )
    told = [line.split() for line in result.stderr.splitlines() if line.startswith("loaded ")]
    loaded = {stage: set(names) for _, stage, *names in told}
    assert not (HEAVY | {"torch", "numpy", "PIL", "av", "decord"}) & loaded["help"]
    # A question needs neither what watches nor what reads videos.
    watching = {"protokv.ingestion", "protokv.video", "protokv.fleet"}
    assert not (HEAVY | watching) & loaded["query"]
    assert "torch" in loaded["query"]


SECONDS = {
    "0": 0,
    "30s": 30,
    "2m": 120,
    " 7 ": 7,
    "10M": 600,
    "1h2m3.5s": 3723.5,
    "7:30": 450,
    "0:04.5": 4.5,
    "1:02:03": 3723,
    "90:00": 5400,
}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_list, " a,, b ,", ("a", "b")),
        (parse_every, "never", COMMIT_NEVER),
        (parse_every, "2m", Every(seconds=120)),
        (parse_every, "1 step", Every(n_steps=1)),
        (
            parse_variation,
            "paper.split=1:5,1:3",
            SettingSweep("paper", "split", [("1:5", (1, 5)), ("1:3", (1, 3))]),
        ),
        (parse_budget, "512", 512),
        (parse_budget, " 1.5M ", 1_500_000),
        (parse_setting, "split=1:5", ("split", (1, 5))),
        (parse_setting, "idle-steps = 7", ("idle_steps", 7)),
        (parse_setting, "anchor=a=b", ("anchor", "a=b")),
        *((parse_duration, text, seconds) for text, seconds in SECONDS.items()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:20]),
)
def test_a_value_is_read_from_its_text(
    parse: Callable[[str], object], text: str, value: object
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (
            parse_budget,
            ("", "k", "0", "-5", "1.5", "6kb", "1e3", "six", "0.0001k", "inf"),
            "budget",
        ),
        (parse_setting, ("", "=", "a", "a=", "=1"), "NAME=VALUE"),
        (
            parse_duration,
            (
                "",
                "s",
                "-1s",
                "7m30",
                "30s7m",
                "7:60",
                "7:3",
                "1:2:03",
                ":30",
                "nan",
                "1e3",
                "٣s",
                "9" * 400,
            ),
            "length of time",
        ),
        (
            parse_every,
            ("", "0s", "0steps", "-1steps", "often", "steps", "1.5steps"),
            "length of time|is 0",
        ),
        (parse_variation, ("split", "split=", "=1"), "NAME=VALUE"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_other_text_is_refused(
    parse: Callable[[str], object], texts: tuple[str, ...], said: str
) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=said):
            parse(text)


def test_a_variable_that_no_option_reads_is_warned_of(protokv: Program) -> None:
    protokv.environment |= {"PROTOKV_BUDGTE": "6k", "PROTOKV_BUDGET": "512"}
    said = protokv("models").err
    assert "Warning: no option has the variable PROTOKV_BUDGTE. did you mean" in said
    assert "PROTOKV_BUDGET?" in said
    assert "variable PROTOKV_MODEL" not in said
