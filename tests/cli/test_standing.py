"""Standing questions at the command line, and the command that gets their answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from protokv.errors import ConfigError
from protokv_cli.exits import Exit
from protokv_cli.hooks import Hook
from tests.cli.conftest import Program

ASK = ("--ask", "what is first ?", "--ask", "who ?", "--ask-every", "5s")


def test_answers_are_events_lines_and_a_part_of_the_state(protokv: Program, video: Path) -> None:
    run = ("ingest", video, "--budget", "24", *ASK, "--choices", "red,blue", "--evidence")
    rows = [row for row in protokv(*run, "--json").rows() if row["type"] == "answered"]
    assert [(row["stream_time_s"], row["question"]) for row in rows] == [
        (at_s, question) for at_s in (5, 10) for question in ("what is first ?", "who ?")
    ]
    for row in rows:
        assert row["answer"] == max(row["probabilities"], key=row["probabilities"].get)
        assert (row["mean_logprob"] < 0, row["took_s"] > 0, row["late_s"], row["faint"]) == (True, True, None, None)
        assert all(0 <= span["start_s"] < span["end_s"] <= row["stream_time_s"] for span in row["evidence"])
    table = protokv(*run, "-f", "table", "--force")
    line = f"0:10 who ? {rows[-1]['answer']} ({rows[-1]['probabilities'][rows[-1]['answer']]:.2f})"
    assert line in table.out.splitlines()
    assert "stood on" in table.out or "no span" in table.out
    (document,) = protokv("inspect", "clip.safetensors", "--json").rows()
    names = ("stream_time_s", "question", "answer", "mean_logprob")
    assert [[one[name] for name in names] for one in document["stream"]["answers"]] == [
        [row[name] for name in names] for row in rows
    ]
    assert f"0:10 who ? {rows[-1]['answer']}" in " ".join(
        protokv("inspect", "clip.safetensors", "-f", "table").out.split()
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--choices", "a,b", "--on-change"), "--on-change and --choices: nothing is asked"),
        ((*ASK, "--choices", "red"), "1 choice"),
        ((*ASK, "--exec", "no-such-program -v"), "there is no program 'no-such-program -v'"),
        (("other.mp4", *ASK), "--ask and --ask-every: for one video only"),
    ],
)
@pytest.mark.usefixtures("mocked")
def test_what_makes_no_sense_is_refused(protokv: Program, video: Path, arguments: tuple[str, ...], said: str) -> None:
    refused = protokv("ingest", video, *arguments)
    assert (refused.code, said in refused.err) == (Exit.USAGE, True), refused.err


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", f"import os, sys; {code}"])


def test_a_command_gets_each_answer_as_json_and_does_not_write_to_stdout(
    protokv: Program, mocked: None, video: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = python(f"sys.stdout.write('noise'); open({str(log)!r}, 'a').write(sys.stdin.read()); sys.exit(7)")
    result = protokv("ingest", video, *ASK, "--exec", command, "--json")
    answered = [row for row in result.rows() if row["type"] == "answered"]
    assert [json.loads(line) for line in log.read_text("utf-8").splitlines()] == answered
    assert (len(answered), result.code) == (4, 0)
    assert f"Warning: --exec: {sys.executable} ended with 7" in result.err


def test_a_slow_command_is_never_waited_for_and_killed_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv_cli.hooks.MOST_WAITING", 2)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    os.mkfifo("begun")
    os.mkfifo("never")
    with Hook("sh -c 'echo > begun; exec cat never'", said.append, 1.0) as hook:
        hook({"answer": "first"})
        Path("begun").read_bytes()
        for i in range(5):
            hook({"answer": i})
        assert not said
    assert said[0] == "Warning: --exec: sh was killed after 1 s, at the answer first"
    assert re.search(r"sh is too slow: [345] answers were left out", said[-1])
    with pytest.raises(ConfigError, match="No closing quotation"):
        Hook("say 'it", said.append)
