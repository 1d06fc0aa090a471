"""`protokv ingest` of one source: what it writes, says and ends with."""

import json
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from protokv.errors import PositionWarning
from protokv.state.reader import StateReader
from protokv_cli.exits import ExitCode
from protokv_cli.output import Output
from tests.cli.conftest import Program, write_video

SMALL = ("--budget", "24", "--json")
TABLE = ("--budget", "24", "--format", "table")


def test_a_video_becomes_a_state_here_and_every_format_says_so(
    protokv: Program, video: Path
) -> None:
    odd = Path("in", "it's [bold] $HOME.mp4")
    odd.parent.mkdir()
    shutil.copy(video, odd)
    result = protokv("ingest", odd, *SMALL)
    assert result.code == 0, result.err
    state = protokv.folder / "it's [bold] $HOME.safetensors"
    # The next command works as it stands: a state names no folder of its model.
    pasted = result.err.splitlines()[-1].removeprefix("ask it: protokv ")
    asked = protokv(*shlex.split(pasted), env={**protokv.environment, "PROTOKV_MODEL": ""})
    assert (asked.code, asked.out != "") == (0, True), asked.err
    rows = result.rows()
    types = [row["type"] for row in (*rows[:2], *rows[-2:])]
    assert types == ["started", "progress", "commit", "summary"]
    expected = {"complete": True, "damaged": False, "steps": 12, "stream_time_s": 12.0}
    assert rows[-1].items() >= (expected | {"file_bytes": state.stat().st_size}).items()
    before = state.read_bytes()
    # The same command again changes nothing.
    table = " ".join(protokv("ingest", odd, *TABLE).out.split())
    assert f"state {state.name} watched 0:12 tokens seen 72 file bytes" in table
    assert protokv("ingest", odd, *SMALL, "--quiet", "--force").err == ""
    assert state.read_bytes() == before


def test_a_stream_beyond_the_positions_of_the_model_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for quiet in (False, True):
        with Output(as_json=True, quiet=quiet).errors():
            warnings.warn("trained on 10", PositionWarning, stacklevel=1)
        assert capsys.readouterr().err == ("" if quiet else "Warning: trained on 10\n")


@pytest.mark.usefixtures("mocked")
def test_settings_and_the_source_come_from_flags_then_the_environment(
    protokv: Program, video: Path
) -> None:
    # Other users can read a command line, and an address may have a password.
    protokv.environment |= {
        "PROTOKV_BUDGET": "22",
        "PROTOKV_SOURCE": str(shutil.copy(video, "my other.mp4")),
    }
    protokv.environment["PROTOKV_SET"] = "seed=3\ncenter_bits=32"
    for arguments, name, budget in (((), "my other", 22), ((video, "--budget", "24"), "clip", 24)):
        assert protokv("ingest", "--json", *arguments).code == 0
        config = StateReader.open(f"{name}.safetensors").header.memory
        assert (config["budget"], config["seed"], config["center_bits"]) == (budget, 3, 32)


def test_a_dry_run_says_what_one_video_takes_and_writes_nothing(
    protokv: Program, mocked: None, video: Path
) -> None:
    before = sorted(protokv.folder.iterdir())
    (row,) = protokv("ingest", video, "--dry-run", "--json").rows()
    shown = protokv("ingest", video, "--dry-run", "--format", "table")
    (unbounded,) = protokv("ingest", video, "--memory", "full", "--dry-run", "--json").rows()
    assert sorted(protokv.folder.iterdir()) == before
    assert (row["type"], row["tried_steps"]) == ("estimate", 12)
    assert (row["seconds"] > 0, unbounded["most_bytes"]) == (True, None)
    for said in ("steps 12", "nothing was written", "keeps all of the video"):
        assert said in " ".join((shown.out + shown.err).split())
    summary = protokv("ingest", video, "--json").rows()[-1]
    assert [row[name] for name in ("state_bytes", "steps", "tokens")] == [
        summary[name] for name in ("state_bytes", "steps", "tokens_seen")
    ]
    small = protokv("ingest", video, *SMALL, "--force")
    assert "\nthe budget keeps 1/3 of the video (" in small.err


def test_timings_are_a_json_key_or_lines_on_stderr_and_nothing_without_the_option(
    protokv: Program, video: Path
) -> None:
    watched = {"model", "decode", "vision tower", "forward", "memory", "commit", "process cpu"}
    asked = {"start", "model", "session", "first token", "tokens", "process cpu"}
    summary = protokv("ingest", video, *SMALL, "--timings").rows()[-1]
    assert summary["timings"].keys() > watched
    question = ("query", "clip.safetensors", "what is it?")
    first, second = protokv(*question, "and now?", "--timings", "--json").rows()
    assert first["timings"].keys() > asked
    assert second["timings"]["tokens"] > first["timings"]["tokens"], "they are of all questions"
    shown = protokv("ingest", video, *TABLE, "--timings", "--force").err
    assert all(f"\n{name} " in f"\n{shown}" for name in watched)
    assert "first token" in protokv(*question, "--timings").err
    assert "timings" not in protokv(*question, "--json").rows()[0]


def test_who_watches_with_the_embedded_model_is_told_in_the_first_line_how_to_name_one(
    embedded: Program, video: Path
) -> None:
    named = (
        "Note: the embedded model reads drawn shapes only. For other videos: protokv ingest VIDEO "
        "--model llava-hf/"
    )
    assert embedded("ingest", video, *SMALL, "-o", "new/clip.safetensors").err.startswith(named)
    # Every answer about a video that it cannot read says so, as text and as JSON.
    asked = ("query", "new/clip.safetensors", "who is the chef ?", "how many ?")
    told = embedded(*asked, "-f", "json").err
    assert told.count("drawn shapes only, and this video is no such") == 1
    assert "does not know who, chef" in told
    for state in asked[1], "new/":
        rows = embedded("query", state, "what shape ?", "how many ?").rows()
        assert all("drawn shapes only" in row["notice"] for row in rows)
    _, progress, *rows = embedded("ingest", video, "--json", "--ask", "how many ?").rows()
    assert all("drawn shapes" in row["notice"] for row in rows if row["type"] == "answered")
    # The size that is told before is about that of the state after.
    assert 0.7 < progress["end_bytes"] / rows[-1]["file_bytes"] < 1.25


ASK = ("--ask", "what is first ?", "--ask", "who ?", "--ask-every", "5s")


def test_answers_are_events_lines_and_a_part_of_the_state_and_go_to_a_command(
    protokv: Program, video: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    code = (
        f"import sys; print('noise'); open({str(log)!r}, 'a').write(sys.stdin.read()); sys.exit(7)"
    )
    run = ("ingest", video, "--budget", "24", *ASK, "--choices", "red,blue", "--evidence")
    result = protokv(*run, "--json", "--exec", shlex.join([sys.executable, "-c", code]))
    rows = [row for row in result.rows() if row["type"] == "answered"]
    assert [json.loads(line) for line in log.read_text("utf-8").splitlines()] == rows
    assert result.code == 0
    assert (result.err.count("Warning: --exec: "), "exit status 7" in result.err) == (1, True)
    due = [(at_s, question) for at_s in (5, 10) for question in ASK[1:4:2]]
    assert [(row["stream_time_s"], row["question"]) for row in rows] == due
    last = rows[-1]
    assert last["probability"] == max(last["probabilities"].values())
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
        ((*ASK, "--exec", "no-such-program -v"), "no program no-such-program -v can be run"),
        ((*ASK, "--exec", "say 'it"), "quoted as in a shell"),
        (("other.mp4", *ASK), "--ask and --ask-every: not for several videos"),
    ],
)
@pytest.mark.usefixtures("mocked")
def test_questions_and_commands_that_make_no_sense_are_refused(
    protokv: Program, video: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused = protokv("ingest", video, *arguments)
    assert (refused.code, said in refused.err) == (ExitCode.USAGE, True), refused.err


def test_an_answer_about_a_drawn_video_says_nothing_of_other_models(embedded: Program) -> None:
    short = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"
    assert embedded("ingest", short, "--budget", "512", "-q").code == 0
    asked = embedded("query", "video.safetensors", "What shape appeared first?", "--json")
    assert (asked.err, "notice" in asked.rows()[0]) == ("", False)


def test_a_state_goes_on_with_its_own_memory_unless_another_is_named(
    protokv: Program, mocked: None, video: Path
) -> None:
    half = ("--budget", "24", "--memory", "sliding-window", "-o", "s.safetensors")
    write_video(Path("two.mp4"), 4, seed=3)
    assert protokv("ingest", video, *half).code == 0
    on = ("-o", "s.safetensors", "--append")
    refused = protokv("ingest", "two.mp4", *on, "--seed", "3")
    assert (refused.code, "its memory." in refused.err) == (ExitCode.MISMATCH, True)
    assert protokv("ingest", "two.mp4", *on).code == 0
    header = StateReader.open("s.safetensors").header
    assert (header.clock.steps, header.memory["budget"]) == (16, 24)
