"""The program itself: help, version, start, end, and completion in a shell."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from protokv import __version__
from protokv.memories import CONFIGS
from protokv.replay.benchmarks import BENCHMARKS
from protokv.state.forms import load_forms
from protokv_cli import main, options
from protokv_cli.exits import Exit
from protokv_cli.panels import Panel
from protokv_cli.process import uncollected
from protokv_cli.replay import DATASETS
from tests.cli.conftest import Program

GROUP: Any = typer.main.get_command(main.app)

# Packages that take long to import, and their uses.
HEAVY = {
    "transformers": "other models than the embedded one",
    "huggingface_hub": "other models than the embedded one",
    "zarr": "other forms than safetensors",
    "av": "decoding, which is done in another process",
    "jinja2": "chat templates of other models",
    "sympy": "compiling",
    "matplotlib": "figures",
}


def test_versions_of_the_program_and_its_packages_are_printed(
    protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(main.DEPENDS_ON, "decord", "protokv-no-such-package")
    rows = dict(line.split(" ", 1) for line in protokv("--version").out.splitlines())
    assert next(iter(rows)) == "protokv"
    assert rows["protokv"] == __version__
    assert rows["torch"] == metadata.version("torch")
    assert rows["transformers"] == metadata.version("transformers")
    assert rows["PyAV"] == metadata.version("av")
    assert rows["decord"] == "not installed"


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_is_the_same_in_every_spelling(protokv: Program, command: str) -> None:
    pages = {protokv(*words).out for words in ([command, "--help"], [command, "-h"], ["help", command])}
    assert len(pages) == 1
    assert protokv("help").out == protokv("--help").out
    assert "Did you mean 'ingest'" in protokv("help", "ingst").err


@pytest.mark.parametrize("command", ["ingest", "query", "replay"])
def test_the_options_of_a_long_command_stand_in_panels_and_the_ten_most_used_come_first(
    protokv: Program, command: str
) -> None:
    text = protokv(command, "--help", terminal_width=80).out
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:2] == ["Arguments", Panel.MOST]
    assert titles[1:] == [panel for panel in Panel if panel in titles]
    most = text[text.index("Most used:") : text.index(f"{titles[2]}:")].splitlines()
    assert len([line for line in most if line.startswith("  -")]) in (9, 10)
    options = [one for one in GROUP.commands[command].params if one.param_type_name == "option" and not one.hidden]
    assert [one.name for one in options if not one.rich_help_panel] == []


@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_help_is_plain_text_that_fits_80_columns(protokv: Program, command: str) -> None:
    text = protokv(*command.split(), "--help", terminal_width=80).out
    told = text[: text.index("Examples:")] + text[text.index("\n\n", text.index("Examples:")) :]
    # Rows of the examples and of the form of questions are commands and JSON, and are not wrapped.
    assert [line for line in told.splitlines() if len(line) > 80 and "evidence_s, if known" not in line] == []
    assert text.isascii()
    assert text.count("PROTOKV_MAX_NEW_TOKENS") == 1
    # typer's names of types, and a list of commands that was cut.
    assert re.findall(r"<[a-z|]+>", text) == []
    assert "..." not in text[text.rindex("Commands:" if not command else "PROTOKV_") :]


def test_a_mistyped_format_is_told_the_nearest_one(protokv: Program) -> None:
    result = protokv("inspect", "x.safetensors", "--format", "jsn")
    assert result.code == Exit.USAGE
    assert "there is no format 'jsn'; did you mean json?" in result.err


def test_a_bug_is_one_line_and_a_traceback_only_with_debug(protokv: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("impossible")

    monkeypatch.setattr("protokv.state.describe.describe", broken)
    result = protokv("inspect", "x.safetensors")
    assert result.code == Exit.FAILURE
    assert result.err.splitlines()[0] == "Error: ZeroDivisionError: impossible"
    assert "--debug" in result.err


IMPORTS = """
import sys

def tell(stage):
    print("loaded", stage, *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)

import protokv
tell("package")
from protokv_cli.main import app
for words in ("--version", "--help", "ingest --help", "query --help", "replay --help"):
    app(words.split(), standalone_mode=False)
tell("help")
app(["query", "s.safetensors", "what colour was the star?", "--json"], standalone_mode=False)
tell("query")
app(["ingest", sys.argv[1], "-o", "t.safetensors", "--budget", "24", "--json"], standalone_mode=False)
tell("ingest")
"""
"""One process that does more and more, and tells after each stage what is imported, by first names."""


def test_every_command_imports_only_what_it_needs(embedded: Program, video: Path) -> None:
    # Of noise, the embedded model would answer nothing.
    drawn = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"
    assert embedded("ingest", drawn, "-o", "s.safetensors", "--budget", "24", "--duration", "4s", "--json").code == 0
    command = [sys.executable, "-c", IMPORTS, video]
    options = {"cwd": embedded.folder, "env": embedded.environment, "timeout": 120}
    result = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    told = [line.split() for line in result.stderr.splitlines() if line.startswith("loaded ")]
    loaded = {stage: set(names) for _, stage, *names in told}
    assert not (HEAVY.keys() | {"torch", "numpy", "PIL", "decord"}) & (loaded["package"] | loaded["help"])
    # Nothing is drawn, and no frame is resized; PIL checks the thumbnails of the state.
    assert not (HEAVY.keys() | {"rich"}) & loaded["query"]
    assert not HEAVY.keys() & loaded["ingest"]
    assert "torch" in loaded["query"] & loaded["ingest"]


def test_the_process_ends_with_its_output_and_its_code_and_without_a_teardown() -> None:
    code = "import atexit\natexit.register(print, 'teardown')\nfrom protokv_cli.main import run\nrun()"
    command = [sys.executable, "-c", code, "query"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == Exit.USAGE, result.stderr
    assert "Error:" in result.stderr
    assert "teardown" not in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_help_that_cannot_be_written_is_a_failure() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "protokv", "--version"]
        assert subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False).returncode


def test_garbage_is_collected_again_after_loading_and_stays_off_where_it_was() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("protokv ingest --memory ", list(CONFIGS)),
        ("protokv ingest --memory dur", ["durable"]),
        ("protokv replay --memory paper,dur", ["paper,durable"]),
        ("protokv ingest --decoder ", ["auto", "pyav", "decord"]),
        ("protokv query --dtype", []),
        ("protokv ingest --positions c", ["compact"]),
        ("protokv inspect --format ", ["auto", "table", "json", "plain"]),
    ],
)
def test_values_are_completed(protokv: Program, words: str, values: list[str]) -> None:
    protokv.environment |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    protokv.environment["_PROTOKV_COMPLETE"] = "complete_bash"
    assert protokv(prog_name="protokv").out.split() == values


@pytest.mark.parametrize(
    ("shell", "said"), [("bash", "complete -o"), ("zsh", "#compdef protokv"), ("fish", "complete --command protokv")]
)
def test_the_completion_script_is_for_the_named_shell(protokv: Program, shell: str, said: str) -> None:
    protokv.environment["SHELL"] = "/bin/tcsh"
    result = protokv("--show-completion", shell)
    assert result.code == 0
    assert said in result.out
    assert "_PROTOKV_COMPLETE" in result.out


def test_states_are_completed_in_a_folder_and_below_it(protokv: Program) -> None:
    for name in ("a.safetensors", "b.zarr", "video.mp4", "days/c.pt", "days/deep/d.pt", "other/x.txt"):
        (protokv.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (protokv.folder / name).touch()
    assert options.states("") == ["a.safetensors", "b.zarr", "days/", "days/c.pt"]
    assert options.states("days/") == ["days/c.pt", "days/deep/", "days/deep/d.pt"]
    assert set(load_forms()) == set(options.STATE_SUFFIXES)
    for command in ("query", "inspect", "query --state"):
        words = f"protokv {command} a"
        protokv.environment |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        protokv.environment["_PROTOKV_COMPLETE"] = "complete_bash"
        assert protokv(prog_name="protokv").out.split() == ["a.safetensors"]


def test_completion_knows_all_studies_and_data_sets() -> None:
    assert tuple(BENCHMARKS) == DATASETS
