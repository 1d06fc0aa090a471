"""The main job on the shipped samples: ingest a video, and answer questions from the state
alone.
"""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from samples import terminal
from samples.terminal import WIDTH
from tests.cli.conftest import Program, Result
from tests.conftest import slow

SAMPLES = Path(__file__).parent.parent / "samples"
# Ten minutes of video take half a minute.
NAMES = ["short", "minute", *slow("long")]
PICTURE = SAMPLES / "terminal.svg"
BUDGET = 512
# Questions that the shipped model answers from a durable state of 512 tokens; see
# samples/README.md.
RIGHT = {"short": 18, "minute": 19, "long": 30}

Ingested = Callable[[str], tuple[Program, Result]]


def make_program(folder: Path) -> Program:
    program = Program(folder, Path())
    program.environment |= {"PROTOKV_MODEL": "protokv/mini", "COLUMNS": str(WIDTH)}
    return program


@pytest.fixture
def protokv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(tmp_path)
    return make_program(tmp_path)


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Ingested:
    """Ingest each sample once; its state is `video.safetensors` in the folder of the program."""

    @cache
    def ingest(name: str) -> tuple[Program, Result]:
        program = make_program(tmp_path_factory.mktemp(name))
        with contextlib.chdir(program.folder):
            result = program(
                "ingest", SAMPLES / name / "video.mp4", "--budget", BUDGET, "--format", "table"
            )
        assert result.code == 0, result.err
        return program, result

    return ingest


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_answered_from_its_state_alone(ingested: Ingested, name: str) -> None:
    protokv, _ = ingested(name)
    questions = (SAMPLES / name / "questions.jsonl").read_text(encoding="utf-8")
    rows = protokv("query", protokv.folder / "video.safetensors", stdin=questions).rows()
    assert max(row["context_tokens"] for row in rows) <= BUDGET + 4
    assert len(rows) == len(questions.splitlines())
    wrong = [
        (row["question"], row["answer"], row["expected"]) for row in rows if not row["correct"]
    ]
    assert len(rows) - len(wrong) >= RIGHT[name], wrong


@pytest.mark.slow
def test_the_picture_of_the_readme_shows_what_the_commands_print(ingested: Ingested) -> None:
    protokv, result = ingested("long")
    printed = [result]
    with contextlib.chdir(protokv.folder):
        printed += [protokv(*command, "--format", "table") for command in terminal.COMMANDS[1:]]
    lines = [line for one in printed for line in (one.out + one.err).splitlines()]
    lines = terminal.wrap_lines(line for line in lines if "frames/s, state" not in line)
    drawn = [
        line
        for line in terminal.read_lines(PICTURE.read_text(encoding="utf-8"))
        if not line.startswith("$ ")
    ]
    assert sorted(terminal.drop_varying(drawn)) == sorted(terminal.drop_varying(lines))
    sizes = terminal.find_sizes(lines)
    assert terminal.find_sizes(drawn) == pytest.approx(sizes, rel=0.01)
    assert len(sizes) == 2


def test_a_window_of_the_same_budget_has_lost_the_first_minute(protokv: Program) -> None:
    # Two of the ten minutes are enough for that.
    window = ("--memory", "sliding-window", "--duration", "2m")
    result = protokv(
        "ingest", SAMPLES / "long" / "video.mp4", "--budget", BUDGET, *window, "--json"
    )
    assert result.code == 0, result.err
    lines = (SAMPLES / "long" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    content = [
        line for line in lines if json.loads(line)["type"] in ("colour", "shape", "where", "at")
    ]
    rows = protokv("query", "video.safetensors", stdin="\n".join(content)).rows()
    assert len(rows) == len(content) > 0
    assert sum(row["correct"] for row in rows) <= len(rows) / 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("protokv") is None, reason="the program is not on the path")
def test_the_demo_of_the_readme_runs(tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", str(SAMPLES / "demo.sh"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert result.stderr.count("answers as expected") == 3
