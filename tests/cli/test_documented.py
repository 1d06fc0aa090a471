"""Every command, option and example in the help, the README and the samples exists.

Shell commands are taken from the fenced blocks and inline code of the documents and from the
examples in the help. Each is parsed by the program's own parser; those of the README are run.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from protokv.ingestion import ingest_events
from protokv.state.moments import list_instants, parse_duration
from protokv.texts import JsonObject
from protokv_cli.exits import ExitCode
from protokv_cli.main import COMMANDS, app
from protokv_cli.options import VARIABLES, MemoryFlags, make_kwargs
from tests.cli.conftest import Program
from tests.fleet.conftest import InlinePool

ROOT = Path(__file__).parents[2]
SHORT = ROOT / "samples" / "short"
DOCUMENTS = sorted(
    path for place in ("*.md", "docs/**/*.md", "samples/**/*.md") for path in ROOT.glob(place)
)
SCRIPTS = sorted(
    path
    for pattern in ("*.sh", "*.service", "Containerfile")
    for path in (ROOT / "samples").rglob(pattern)
)
GROUP = typer.main.get_command(app)
SUBCOMMANDS = GROUP.commands  # type: ignore[attr-defined]


def commands_in(text: str) -> Iterator[str]:
    """Yield the calls of the program: the words between its name and the end of its part of a
    pipeline.
    """
    text = text.replace("\\\n", " ")
    # As an argument of another program, such as an image, it is followed by a subcommand.
    names = "|".join(COMMANDS)
    before = rf"^|[`$;&|/] ?|-m |(?<= )(?=protokv +(?:{names}) )"
    words = r"(?:\"[^\"]*\"|'[^']*'|[^`\n;&|#])*"
    for found in re.finditer(rf"(?:{before})protokv +({words})", text, re.MULTILINE):
        if command := found[1].strip():
            yield command


def in_document(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    # A usage, as the reference has it, is no command.
    code = [
        block
        for language, block in blocks
        if language in ("", "sh", "text") and "[OPTIONS]" not in block
    ]
    inline = re.findall(
        r"`(protokv [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\n", " ")
    )
    return [command for part in (*code, *inline) for command in commands_in(part)]


def in_help(name: str) -> list[str]:
    command = SUBCOMMANDS[name] if name else GROUP
    return list(commands_in("\n".join(line.strip() for line in (command.help or "").splitlines())))


EXAMPLES = {
    **{str(path.relative_to(ROOT)): in_document(path) for path in DOCUMENTS},
    **{
        str(path.relative_to(ROOT)): list(
            commands_in(path.read_text(encoding="utf-8").replace("\n  ", "\n"))
        )
        for path in SCRIPTS
    },
    **{f"help of {name or 'protokv'}": in_help(name) for name in ("", *COMMANDS)},
}
ALL = sorted({command for found in EXAMPLES.values() for command in found})


def arguments_of(command: str) -> list[str]:
    """Return the arguments as a shell splits them, without redirections and ellipses."""
    command = re.sub(r"\s*[<>]+ ?\S+", "", command)
    return [part for part in shlex.split(command) if part not in ("...", "…")]


def test_documents_and_help_have_examples() -> None:
    assert all(EXAMPLES[f"help of {name}"] for name in COMMANDS)
    shown = {
        one.split()[0]
        for place in ("README.md", "docs/guides/installing.md")
        for one in EXAMPLES[place]
        if one
    }
    assert set(COMMANDS) <= shown


@pytest.mark.parametrize("command", ALL)
def test_commands_and_options_of_an_example_exist(command: str) -> None:
    name, *more = [part for part in arguments_of(command) if part != "help"]
    if name.startswith("-"):
        GROUP.make_context("protokv", [name, *more], resilient_parsing=True)
    elif name != "COMMAND":
        assert name in COMMANDS, command
        if more:
            # The parser itself refuses unknown options, numbers, choices and a wrong number of
            # arguments.
            context = SUBCOMMANDS[name].make_context(name, more)
            check_values(name, context.params)


def check_values(name: str, given: JsonObject) -> None:
    """Read the texts of options as the command does, which raises for what is none."""
    command: Any = COMMANDS[name]
    for group in get_type_hints(command.__wrapped__).values():
        if is_dataclass(group):
            made: Any = group
            filled = made(**{one.name: given[one.name] for one in fields(group)})
            make_kwargs(filled)
            if isinstance(filled, MemoryFlags):
                filled.config()
    if at := given.get("at"):
        parse_duration(at.removeprefix("-")) if "-" not in at[1:] else list_instants(at, 0.0)


def test_the_variables_of_a_service_and_an_image_are_read_by_an_option() -> None:
    named = {
        variable
        for path in (*SCRIPTS, *DOCUMENTS)
        for variable in re.findall(r"\bPROTOKV_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    # One more is of the tests.
    assert {"PROTOKV_POSITIONS", "PROTOKV_SOURCE"} <= named <= VARIABLES | {"PROTOKV_TEST_THREADS"}


# These speak of other programs, too: pytest and `samples.worlds`.
TEXTS = [
    path for path in DOCUMENTS if path.name != "CONTRIBUTING.md" and "studies" not in path.parts
]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_in_a_text_exist(path: Path) -> None:
    # `test_site.py` holds that this page has the options of the code.
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    known = {"--help", "--version", *re.findall(r"--[a-z][a-z-]+", commands)}
    text = path.read_text(encoding="utf-8")
    text = re.sub(
        r"`(?:pip|python3?|ruff|pytest|ffmpeg|git|hf)[^`]*`",
        "",
        re.sub(r"```.*?```", "", text, flags=re.DOTALL),
    )
    for option in re.findall(r"`(--[a-z][a-z-]+)", text):
        assert option in known, option


# What the README names, and what stands for it here: the short sample, its state and questions, the
# embedded model.
STANDS_FOR = {
    r"[^\s\"]+\.mp4\b": "video.mp4",
    r"[^\s\"]+\.safetensors\b": "video.safetensors",
    r"\S+\.jsonl\b": "questions.jsonl",
    r"--model \S+ --device cuda --dtype \S+": "--model protokv/mini",
    # The short sample fills no budget.
    r" --budget \S+": "",
    r"--delays \S+ --memory \S+": "--delays 0,2s --memory durable,sliding-window",
    r"\"[^\"]*\?\"": '"What shape appeared first?"',
}


def stand_in(command: str) -> str:
    """Return an example with what stands for its names here."""
    for pattern, stands_for in STANDS_FOR.items():
        command = re.sub(pattern, stands_for, command)
    return command


# Cameras are in `test_live.py`.
RUN = sorted({stand_in(one) for one in EXAMPLES["README.md"] if "camera" not in one})


@pytest.fixture(scope="session")
def short_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of the short sample by the embedded model."""
    path = tmp_path_factory.mktemp("short") / "video.safetensors"
    list(ingest_events(SHORT / "video.mp4", path, backbone="protokv/mini"))
    return path


@pytest.mark.parametrize("command", RUN)
def test_an_example_of_the_readme_runs(
    embedded: Program, short_state: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    shutil.copytree(SHORT, "videos")
    shutil.copytree(SHORT, ".", dirs_exist_ok=True)
    Path("states").mkdir()
    if not command.startswith("ingest"):
        shutil.copy(short_state, ".")
        shutil.copy(short_state, "states")
    # Processes of workers are in `test_fleet.py`, and the server's answers in `tests/serve`.
    monkeypatch.setattr(
        "protokv.fleet.LocalWorkerPool", lambda recipe, n, *_: nullcontext(InlinePool(recipe, n))
    )
    monkeypatch.setattr("uvicorn.Server.run", lambda server: None)
    result = embedded(*arguments_of(command))
    assert result.code == ExitCode.DONE, result.err
    assert result.out or result.err
