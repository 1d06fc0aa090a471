"""`protokv replay` of files and data sets: its questions, results, continuation and refusals."""

import json
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.judges import Judge, JudgeVerdict
from protokv.replay.rows import AnswerRow, AnswerRowFile
from protokv.state.reader import StateReader
from protokv.texts import JsonObject
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, Watch
from tests.replay.benchmarks.conftest import data_root  # noqa: F401

QUESTIONS = (
    '{"question": "what is the star ?", "answer": "red", "type": "colour", "evidence_s": 3}',
    '{"question": "what is the ring ?", "answer": "blue", "type": "colour", "evidence_s": 4}',
    '{"question": "what is late ?", "answer": "blue", "type": "colour", "evidence_s": 11}',
    '{"question": "what is now ?", "answer": "red", "type": "now", "ask_s": 3, "lasts": false}',
)
SMALL = (
    "--questions",
    "small.jsonl",
    "--delays",
    "0,2s",
    "--memory",
    "durable,sliding-window",
    "--budget",
    "24",
)


@pytest.fixture
def small(protokv: Program, video: Path) -> tuple[object, ...]:
    """The command of a small replay, whose questions lie in the folder of the program."""
    (protokv.folder / "small.jsonl").write_text("\n".join(QUESTIONS))
    return ("replay", video, *SMALL, "--json")


def results() -> list[JsonObject]:
    return [json.loads(line) for line in Path("small.results.jsonl").read_text().splitlines()]


def test_a_replay_is_planned_run_reported_again_and_merged_into_a_table(
    protokv: Program, small: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (plan,) = protokv(*small, "--dry-run").rows()
    assert (plan["type"], plan["answers"]) == ("plan", 8)
    assert not Path("small.results.jsonl").exists()
    compared = ("--memory", "last-frames,full", "--set", "last-frames.last-steps=1,2")
    assert protokv(*small, *compared, "--dry-run").rows()[0]["answers"] == 2 * 2 * 3
    assert protokv(*small).code == 0
    finished = Path("small.results.jsonl").read_bytes()
    done = protokv(*small)
    assert done.code == 0, done.err
    (report,) = done.rows()
    assert len(results()) == report["questions"] * 2 * 2 == 8
    assert report["facts"]["left out, type now, whose answers change with time"] == "1"
    assert protokv(*small, "--dry-run").rows()[0]["answers"] == 0
    # Another study is refused.
    result = protokv(*small, "--fps", "1")
    assert (result.code, "had fps 2.0 and now has fps 1.0" in result.err) == (ExitCode.USAGE, True)
    assert Path("small.results.jsonl").read_bytes() == finished

    # Drawing itself is tested in `tests/replay/test_figure.py`.
    drawing = mock.Mock()
    monkeypatch.setattr("protokv.replay.figure.save_report_figure", drawing)
    Path("12.jsonl").write_bytes(finished.replace(b'"budget": 24', b'"budget": 12'))
    protokv.environment["COLUMNS"] = "80"
    files = ("12.jsonl", "small.results.jsonl", "--plot", "x.png", "--csv", "x.csv")
    merged = protokv("replay", "--report", *files, "--format", "table")
    assert merged.code == 0, merged.err
    assert all(said in merged.out for said in ("difference", "first token ms", "12", "24"))
    drawing.assert_called_once()
    assert len(Path("x.csv").read_text().splitlines()) == 1 + 2 * 2 * 2 * 2


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    protokv: Program, small: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = AnswerRowFile.append

    def append_and_interrupt(file: AnswerRowFile, row: AnswerRow) -> None:
        append(file, row)
        # Once: the second is that of a user who will not wait.
        if len(file.rows) == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerRowFile, "append", append_and_interrupt)
        stopped = protokv(*small)
    assert stopped.code == ExitCode.INTERRUPTED, stopped.err
    assert "Continue with the same command" in stopped.err
    assert 0 < len(results()) < 8
    assert protokv(*small).code == 0
    assert len(results()) == 8


@pytest.fixture
def on_dataset(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    for benchmark in BENCHMARKS.values():
        monkeypatch.setattr(benchmark, "max_new_tokens", 2)
    return ("replay", "--memory", "durable", "--budget", "36", "--fps", "2", "--dataset")


def test_a_table_names_everything_that_decides_its_numbers(
    protokv: Program,
    data_root: Path,  # noqa: F811
    tmp_path: Path,
    on_dataset: tuple[str, ...],
) -> None:
    # One video of two.
    shutil.copytree(data_root / "ovo-bench", tmp_path / "ovo-bench")
    (tmp_path / "ovo-bench" / "src_videos" / "Ego4D" / "clips" / "clip22.mp4").unlink()
    protokv.environment["COLUMNS"] = "160"
    done = protokv(*on_dataset, "ovo-bench", "--data-root", tmp_path, "--format", "table")
    assert (done.code, "left out: Ego4D/clips/clip22.mp4" in done.err) == (ExitCode.PARTIAL, True)
    said = " ".join(done.out.split())
    for text in (
        "ovo-bench,",
        ", weights ",
        "left out video",
        "most frequent answer of a type",
        "text only",
        "last 4 frames",
        "last 16 frames",
        "backward without HLD",
        "fewer than 100 questions or 5 videos",
        "questions: backward memory n 0 s",
        "durable 36 3 0%",
    ):
        assert text in said, text
    (report,) = protokv(*on_dataset, "ovo-bench", "--data-root", tmp_path, "--json").rows()
    assert report["missing"].keys() == {"Ego4D/clips/clip22.mp4"}
    assert (len(report["facts"]["prompt"]), report["facts"]["prompt"] in said) == (12, True)


def test_open_answers_are_judged_after_the_pass(
    protokv: Program,
    data_root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    on_dataset: tuple[str, ...],
) -> None:
    pytest.importorskip("openai")
    protokv.environment["OPENAI_API_KEY"] = "a-key"
    wanted = (*on_dataset, "rvs-ego", "--data-root", data_root, "--videos", "1", "--json")
    (report,) = protokv(*wanted).rows()
    assert "offline, token F1" in report["facts"]["judged by"]
    monkeypatch.setattr(
        Judge, "read", lambda self, cases: ((case, JudgeVerdict(True, 5.0)) for case in cases)
    )
    (judged,) = protokv(*wanted, "--judge", "gpt").rows()
    assert {(point["accuracy"], point["points"]) for point in judged["points"]} == {(1.0, 5.0)}


def test_a_calibrated_replay_lets_a_query_promise_and_withhold(
    protokv: Program, small: tuple[object, ...], watched: Watch
) -> None:
    state = watched()
    protokv.environment["PROTOKV_CALIBRATIONS"] = str(protokv.folder / "calibrations")
    asked = ("query", state, "what is the star ?", "--at-most-wrong", "20%")
    refused = protokv(*asked)
    assert (refused.code, "nothing is calibrated for durable" in refused.err) == (2, True)
    assert "--memory durable --budget 24 --calibrate NAME" in refused.err
    assert protokv(*small, "--memory", "durable").code == 0
    seen = StateReader.open(state).header.clock.tokens_seen
    row = results()[0] | {"correct": True, "tokens_seen": seen}
    for sure, known in ((-100.0, True), (0.0, False)):
        made = [row | {"question_id": str(n), "mean_logprob": sure} for n in range(40)]
        Path("made.jsonl").write_text("\n".join(map(json.dumps, made)))
        shown = protokv("replay", "--report", "made.jsonl", "--calibrate", "mine", "--json")
        assert shown.code == 0, shown.err
        promises = {one["at_most_wrong"]: one["answered"] for one in shown.rows()[0]["promises"]}
        assert promises == {0.01: None, 0.05: None, 0.1: None, 0.2: 1.0}
        done = protokv(*asked, "--json")
        assert done.code == 0, done.err
        (answer,) = done.rows()
        assert answer["promise"]["known"] is known
        assert (answer["answer"] == "I do not know") is not known
        assert "evidence" in answer
    assert "5% wrong: it tested 20" in protokv(*asked[:-1], "5%").err
