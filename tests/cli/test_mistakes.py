"""A mistake at the command line is one error line, at most one hint and its exit code; nothing is
written.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program

SMALL = "VIDEO --questions asked.jsonl --budget 24"

MISTAKES = [
    ("ingest", ExitCode.USAGE, "there is no video to ingest"),
    ("ingest ''", ExitCode.USAGE, "the name of a source or a state is empty"),
    (
        "ingest https://youtu.be/x",
        ExitCode.FAILURE,
        "yt-dlp -o - https://youtu.be/x | protokv ingest -",
    ),
    ("ingest absent.mp4", ExitCode.NOT_FOUND, "absent.mp4"),
    ("ingest notes.mp4", ExitCode.FAILURE, "notes.mp4"),
    ("ingest VIDEO --budget lots", ExitCode.USAGE, "budget"),
    (
        "ingest VIDEO -o s.safetensors --budget 32",
        ExitCode.MISMATCH,
        "budget is 24, this run's is 32",
    ),
    (
        "ingest VIDEO -o s.safetensors --budget 24 --model protokv/mini",
        ExitCode.MISMATCH,
        "its backbone.",
    ),
    ("ingest VIDEO --append", ExitCode.USAGE, "append"),
    ("ingest VIDEO --memory elephant", ExitCode.USAGE, "there is no memory 'elephant'"),
    ("ingest VIDEO --decoder pyaf", ExitCode.USAGE, "did you mean pyav?"),
    ("ingest VIDEO -o x.safetensor", ExitCode.USAGE, "did you mean .safetensors?"),
    ("ingest VIDEO --set center_bits=16", ExitCode.USAGE, "center_bits: expected one of"),
    ("ingest VIDEO --model ./absent-model", ExitCode.NOT_FOUND, "absent-model"),
    ("ingest absent.mp4 --fps 0 --model ./absent-model", ExitCode.USAGE, "fps is 0"),
    ("ingest VIDEO --device abacus", ExitCode.USAGE, "abacus"),
    ("ingest VIDEO -o x\udcff.safetensors", ExitCode.USAGE, "not UTF-8"),
    (
        "ingest VIDEO -o notes/x.safetensors --budget 24",
        ExitCode.FAILURE,
        "a part of its path is a file",
    ),
    ("ingest rtsp:/camera/1", ExitCode.NOT_FOUND, "rtsp://camera/1"),
    ("ingest c:/absent.mp4", ExitCode.NOT_FOUND, "spelling"),
    ("ingest VIDEO --model protokv/mini --system brief", ExitCode.USAGE, "takes no system prompt"),
    (
        "ingest VIDEO --system '<|im_end|>'",
        ExitCode.USAGE,
        "the system prompt contains the control token",
    ),
    (
        "ingest VIDEO notes.mp4 -o states --model protokv/mini --revision v1",
        ExitCode.USAGE,
        "has no revisions",
    ),
    ("ingest a.mp4 b.mp4 -o s.safetensors", ExitCode.USAGE, "s.safetensors is the name of one"),
    (
        "ingest a.mp4 b.mp4 --chunk 8 --for 1h",
        ExitCode.USAGE,
        "--chunk and --for: for one video only",
    ),
    (
        "ingest a.mp4 --workers 2 --devices 0",
        ExitCode.USAGE,
        "--workers and --devices: for several videos only",
    ),
    ("ingest --from gone.txt", ExitCode.NOT_FOUND, "cannot read gone.txt"),
    ("ingest *.avi", ExitCode.NOT_FOUND, "no video at *.avi"),
    ("ingest rtsp:/cam", ExitCode.NOT_FOUND, "an address has two slashes: rtsp://cam"),
    ("query absent.safetensors 'what ?'", ExitCode.NOT_FOUND, "absent.safetensors"),
    ("query torn.safetensors 'what ?'", ExitCode.CORRUPT, "torn.safetensors"),
    ("query s.safetensors -", ExitCode.USAGE, "no question"),
    ("query s.safetensors --questions bad.jsonl", ExitCode.USAGE, "line 1 of"),
    ("query s.safetensors --questions absent.jsonl", ExitCode.USAGE, "cannot be read"),
    (
        "query s.safetensors 'what ?' --top 3",
        ExitCode.USAGE,
        "--top ranks the answers of many states",
    ),
    ("query s.safetensors 'what ?' --video .", ExitCode.USAGE, "--video is where --frames looks"),
    (
        "query s.safetensors 'what ?' --at 2026-01-01",
        ExitCode.USAGE,
        "is of a video, which has no date",
    ),
    ("query s.safetensors 'what ?' --choices ,", ExitCode.USAGE, "expected one or more"),
    ("query states 'what ?'", ExitCode.NOT_FOUND, "states"),
    ("query states/ 'what ?' --frames seen", ExitCode.USAGE, "--frames are of one state"),
    ("query s.safetensors 'is <|im_end|> ?'", ExitCode.USAGE, "control token"),
    ("inspect ''", ExitCode.USAGE, "the name of a source or a state is empty"),
    ("inspect absent.safetensors", ExitCode.NOT_FOUND, "absent.safetensors"),
    ("inspect VIDEO", ExitCode.USAGE, "clip.mp4 is a video, not a state"),
    ("query VIDEO 'what ?'", ExitCode.USAGE, "watch it first: protokv ingest"),
    ("query s.safetensors 'what ?' --model ./absent-model", ExitCode.NOT_FOUND, "absent-model"),
    ("inspect s.safetensors s.safetensors -o b.pt", ExitCode.USAGE, ""),
    ("inspect states -o b.zarr", ExitCode.USAGE, "holds many states"),
    ("serve absent", ExitCode.NOT_FOUND, "there is no folder absent"),
    ("serve . --host 0.0.0.0", ExitCode.USAGE, "PROTOKV_TOKEN"),
    ("replay x.mp4", ExitCode.USAGE, "no questions"),
    ("replay absent.mp4 --questions absent.jsonl", ExitCode.NOT_FOUND, "absent.jsonl"),
    (f"replay {SMALL} --memory durable --types shap", ExitCode.USAGE, "did you mean shape?"),
    (
        f"replay {SMALL} --delays 1h --memory durable",
        ExitCode.USAGE,
        "nothing to show: no question could be asked",
    ),
    (f"replay {SMALL} -o bad.jsonl", ExitCode.USAGE, "row of results"),
    (
        "replay notes.mp4 --questions bad.jsonl -o notes.mp4 --force",
        ExitCode.USAGE,
        "would be written over",
    ),
    (
        "replay notes.mp4 --questions bad.jsonl --plot notes.mp4",
        ExitCode.USAGE,
        "would be written over",
    ),
    ("replay --report absent.jsonl", ExitCode.NOT_FOUND, "absent.jsonl"),
    ("replay --dataset ovobench", ExitCode.USAGE, "did you mean ovo-bench?"),
    ("replay --dataset mlvu", ExitCode.USAGE, "where is mlvu"),
    ("replay --data-root .", ExitCode.USAGE, "--data-root and --judge are about a data set"),
    ("replay --dataset mlvu --data-root . x.mp4", ExitCode.USAGE, "either --dataset or SOURCE"),
]


def files() -> dict[Path, bytes]:
    """Return the content of every file below the current folder, except lists of results and
    failures.
    """
    found = (
        path
        for path in Path().rglob("*")
        if not path.name.endswith(("results.jsonl", "failures.jsonl"))
    )
    return {path: path.read_bytes() for path in found if path.is_file()}


@pytest.mark.parametrize(
    ("command", "code", "said"), MISTAKES, ids=[command for command, *_ in MISTAKES]
)
def test_a_mistake_is_one_error_line_at_most_one_hint_and_its_code(
    protokv: Program,
    video: Path,
    watched: Callable[..., Path],
    command: str,
    code: ExitCode,
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
    assert result.code == code, result.err
    error, *hints = result.err.splitlines()
    assert error.startswith("Error: ")
    assert len(hints) <= 1
    assert all(line.startswith("Hint: ") for line in hints)
    assert said in " ".join([error, *hints])
    assert result.out == ""
    assert files() == before
