"""Every command, option and example in the help, the README and the samples exists.

Shell commands are taken from the fenced blocks and inline code of the documents and from the examples in the help. Each
is parsed by the program's own parser; those that need nothing but the samples and the embedded model are run.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer

from protokv.ingestion import ingest
from protokv_cli.exits import Exit
from protokv_cli.main import COMMANDS, app
from tests.cli.conftest import Program
from tests.fleet.conftest import InlinePool

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path for place in ("*.md", "docs/**/*.md", "samples/**/*.md") for path in ROOT.glob(place))
SCRIPTS = sorted((ROOT / "samples").rglob("*.sh"))
GROUP = typer.main.get_command(app)
SUBCOMMANDS = GROUP.commands  # type: ignore[attr-defined]


def commands_in(text: str) -> Iterator[str]:
    """Yield the calls of the program: the words between its name and the end of its part of a pipeline."""
    text = text.replace("\\\n", " ")
    for found in re.finditer(r"(?:^|[`$;&|] ?|-m )protokv ((?:\"[^\"]*\"|'[^']*'|[^`\n;&|#])*)", text, re.MULTILINE):
        yield found[1].strip()


def in_document(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    code = re.findall(r"```(?:sh|text)?\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`(protokv [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\n", " "))
    return [command for part in (*code, *inline) for command in commands_in(part)]


def in_help(name: str) -> list[str]:
    command = SUBCOMMANDS[name] if name else GROUP
    return list(commands_in("\n".join(line.strip() for line in (command.help or "").splitlines())))


EXAMPLES = {
    **{str(path.relative_to(ROOT)): in_document(path) for path in DOCUMENTS},
    **{
        str(path.relative_to(ROOT)): list(commands_in(path.read_text(encoding="utf-8").replace("\n  ", "\n")))
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
    for place in ("README.md", "samples/README.md", "samples/demo.sh", *(f"help of {name}" for name in COMMANDS)):
        assert EXAMPLES[place], place
    shown = {command.split()[0] for command in EXAMPLES["README.md"] if command}
    assert set(COMMANDS) <= shown


@pytest.mark.parametrize("command", ALL)
def test_commands_and_options_of_an_example_exist(command: str) -> None:
    arguments = arguments_of(command)
    if arguments[0] == "help":
        arguments = arguments[1:]
    if arguments[0] == "COMMAND":
        return
    if arguments[0].startswith("-"):
        GROUP.make_context("protokv", arguments, resilient_parsing=True)
        return
    assert arguments[0] in COMMANDS, command
    if len(arguments) == 1:
        # Only its name.
        return
    # The parser itself refuses unknown options, numbers, choices and a wrong number of arguments.
    SUBCOMMANDS[arguments[0]].make_context(arguments[0], arguments[1:])


# These speak of other programs, too: of pytest, and of those in `samples/training`.
TEXTS = [path for path in DOCUMENTS if path.name != "CONTRIBUTING.md" and "training" not in path.parts]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_in_a_text_exist(path: Path) -> None:
    parameters = [parameter for command in SUBCOMMANDS.values() for parameter in command.params]
    known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)} | {"--help", "--version"}
    text = path.read_text(encoding="utf-8")
    text = re.sub(
        r"`(?:pip|python3?|ruff|pytest|ffmpeg|git|hf)[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )
    for option in re.findall(r"`(--[a-z][a-z-]+)", text):
        assert option in known, option


def runnable(command: str) -> bool:
    """Return True if an example is quick and needs only a sample video, its questions and the embedded model."""
    arguments = arguments_of(command)
    options = set(arguments)
    # The sample ends before a part with --start begins, and --watch and --follow go on until they are stopped.
    heavy = {"--model", "--device", "-m", "--at", "--start", "--watch", "--follow"}
    if arguments[0] != "query":
        heavy.add("-")
    # Capitals stand for any name.
    if any("://" in part or part.startswith("/dev/") or part.isupper() for part in arguments):
        return False
    operands = any(not part.startswith("-") for part in arguments[1:])
    return operands and arguments[0] in ("ingest", "query", "inspect") and not options & heavy


def shape(command: str) -> str:
    """Return a command without its names and questions: the same sample stands for all of them."""
    command = re.sub(r'"[^"]*\?"( "[^"]*\?")*', "QUESTIONS", command)
    command = re.sub(r"\S+\.(mp4|mkv)\b", "VIDEO", command)
    return re.sub(r"\S+\.(safetensors|jsonl)\b", r"ANY.\1", command)


RUNNABLE = {shape(command): command for command in ALL if runnable(command)}


@pytest.fixture(scope="module")
def short_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of the short sample by the embedded model."""
    path = tmp_path_factory.mktemp("short") / "video.safetensors"
    list(ingest(ROOT / "samples" / "short" / "video.mp4", path, backbone="protokv/mini"))
    return path


@pytest.mark.parametrize("command", RUNNABLE.values())
def test_an_example_runs(protokv: Program, short_state: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    protokv.environment["PROTOKV_MODEL"] = "protokv/mini"
    arguments = [part.replace("$name", "short").replace("$out/", "") for part in arguments_of(command)]
    # Videos and states have many names in examples; each is the short sample here.
    short = ROOT / "samples" / "short"
    stands_for = {".mp4": short / "video.mp4", ".mkv": short / "video.mp4"}
    (protokv.folder / "states").mkdir()
    if arguments[0] != "ingest":
        stands_for[".safetensors"] = short_state
        shutil.copy(short_state, protokv.folder / "states")
    for part in arguments[1:]:
        if source := stands_for.get(Path(part).suffix):
            (protokv.folder / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, protokv.folder / part)
    shutil.copytree(short, protokv.folder / "videos")
    (protokv.folder / "list.txt").write_text("videos/video.mp4\n")
    (protokv.folder / "questions.jsonl").write_text('{"question": "What shape appeared first?"}\n')
    # Processes of workers are in `test_fleet.py`.
    monkeypatch.setattr("protokv.fleet.LocalPool", lambda recipe, n, _: nullcontext(InlinePool(recipe, n)))
    result = protokv(*arguments, stdin='{"question": "What shape appeared first?", "answer": "star"}\n')
    assert result.code == Exit.DONE, result.err
    assert result.out
