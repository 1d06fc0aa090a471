"""A mistake at the command line is one error line, at most one hint and its exit code; nothing is
written.
"""

import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, Watch

TABLE = tomllib.loads((Path(__file__).parent / "mistakes.toml").read_text(encoding="utf-8"))
MISTAKES = [
    *((command, code, said) for code, rows in TABLE.items() for command, said in rows.items()),
    ("ingest VIDEO -o x\udcff.safetensors", "USAGE", "not UTF-8"),
]


def files() -> dict[Path, bytes]:
    """Return the content of every file below the current folder, except results and failures."""
    return {
        path: path.read_bytes()
        for path in Path().rglob("*.*")
        if path.is_file() and path.name not in ("asked.results.jsonl", "failures.jsonl")
    }


@pytest.mark.parametrize(
    ("command", "code", "said"), MISTAKES, ids=[command for command, *_ in MISTAKES]
)
def test_a_mistake_is_one_error_line_at_most_one_hint_and_its_code(
    protokv: Program,
    video: Path,
    watched: Watch,
    command: str,
    code: str,
    said: str,
) -> None:
    state = Path(shutil.copy(watched(), protokv.folder / "s.safetensors"))
    Path("torn.safetensors").write_bytes(state.read_bytes()[:-100])
    Path("notes.mp4").write_text("not a video\n" * 100)
    Path("notes").write_text("my notes")
    Path("bad.jsonl").write_text('{"question": 1}')
    Path("asked.jsonl").write_text(
        '{"question": "what is it ?", "answer": "red", "type": "shape", "ask_s": 3}'
    )
    Path("states").mkdir()
    before = files()
    result = protokv(*(str(video) if word == "VIDEO" else word for word in shlex.split(command)))
    assert result.code == ExitCode[code], result.err
    error, *hints = result.err.splitlines()
    assert error.startswith("Error: ")
    assert len(hints) <= 1
    assert all(line.startswith("Hint: ") for line in hints)
    assert said in " ".join([error, *hints])
    assert result.out == ""
    assert files() == before
