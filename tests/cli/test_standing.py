"""Standing questions at the command line, and the command that gets their answers."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from protokv_cli.exits import Exit
from protokv_cli.hooks import Hook
from tests.cli.conftest import Program

ASK = ("--ask", "what is first ?", "--ask", "who ?", "--ask-every", "5s")


def test_answers_are_events_lines_and_a_part_of_the_state_and_go_to_a_command(
    protokv: Program, video: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    code = f"import sys; print('noise'); open({str(log)!r}, 'a').write(sys.stdin.read()); sys.exit(7)"
    run = ("ingest", video, "--budget", "24", *ASK, "--choices", "red,blue", "--evidence")
    result = protokv(*run, "--json", "--exec", shlex.join([sys.executable, "-c", code]))
    rows = [row for row in result.rows() if row["type"] == "answered"]
    assert [json.loads(line) for line in log.read_text("utf-8").splitlines()] == rows
    assert (result.code, result.err.count("Warning: --exec: "), "exit status 7" in result.err) == (0, 1, True)
    due = [(at_s, question) for at_s in (5, 10) for question in ASK[1:4:2]]
    assert [(row["stream_time_s"], row["question"]) for row in rows] == due
    last = rows[-1]
    assert last["probability"] == last["probabilities"][last["answer"]] == max(last["probabilities"].values())
    assert all(0 <= span["start_s"] < span["end_s"] <= 10 for span in last["evidence"])
    table = protokv(*run, "-f", "table", "--force").out
    assert f"0:10 who ? {last['answer']} ({last['probability']:.2f})\n  stood on" in table
    kept = protokv("inspect", "clip.safetensors", "--json").rows()[0]["stream"]["answers"]
    assert kept == [{name: row[name] for name in kept[0]} for row in rows]
    shown = protokv("inspect", "clip.safetensors", "-f", "table").out
    assert f"0:10 who ? {last['answer']}" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--choices", "a,b", "--on-change"), "--on-change and --choices: nothing is asked"),
        ((*ASK, "--choices", "red"), "a single choice is none"),
        ((*ASK, "--exec", "no-such-program -v"), "there is no program no-such-program -v"),
        ((*ASK, "--exec", "say 'it"), "quoted as in a shell"),
        (("other.mp4", *ASK), "--ask and --ask-every: for one video only"),
    ],
)
@pytest.mark.usefixtures("mocked")
def test_what_makes_no_sense_is_refused(protokv: Program, video: Path, arguments: tuple[str, ...], said: str) -> None:
    refused = protokv("ingest", video, *arguments)
    assert (refused.code, said in refused.err) == (Exit.USAGE, True), refused.err


def test_a_slow_command_is_never_waited_for_and_killed_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv_cli.hooks.MOST_WAITING", 2)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    os.mkfifo("begun")
    os.mkfifo("never")
    with Hook("sh -c 'echo > begun; exec cat never'", said.append, 1.0) as hook:
        hook({"answer": 0})
        Path("begun").read_bytes()
        for i in range(3):
            hook({"answer": i})
        assert said == ["Warning: --exec: sh is too slow; answers are left out"]
    assert "timed out after" in said[1]
    assert "answers are left out at the end" in said[-1]
