"""`protokv replay` of files and data sets: its questions, results, continuation and refusals."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.judges import Judge, Verdict
from protokv.replay.rows import AnswerRow, RowFile
from protokv_cli.exits import Exit
from tests.cli.conftest import Program
from tests.replay.benchmarks.conftest import data_root  # noqa: F401

QUESTIONS = (
    '{"question": "what is the star ?", "answer": "red", "type": "colour", "evidence_s": 3}',
    '{"question": "what is the ring ?", "answer": "blue", "type": "colour", "evidence_s": 4}',
)
SMALL = ("--questions", "small.jsonl", "--delays", "0,2s", "--memory", "durable,sliding-window", "--budget", "24")


@pytest.fixture
def small(protokv: Program, video: Path) -> tuple[object, ...]:
    """The command of a small replay, whose questions lie in the folder of the program."""
    (protokv.folder / "small.jsonl").write_text("\n".join(QUESTIONS))
    return ("replay", video, *SMALL)


def results(program: Program, name: str = "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (program.folder / name).read_text().splitlines()]


@pytest.fixture
def finished(protokv: Program, small: tuple[object, ...]) -> bytes:
    """The results of `small`, which lie in the folder of the program."""
    assert protokv(*small, "--json").code == 0
    return (protokv.folder / "results.jsonl").read_bytes()


def test_a_finished_replay_is_reported_again_and_asks_nothing(
    protokv: Program, small: tuple[object, ...], finished: bytes
) -> None:
    done = protokv(*small, "--json")
    assert done.code == 0, done.err
    (report,) = done.rows()
    rows = results(protokv)
    assert len(rows) == report["questions"] * 2 * 2 == 8
    assert {row["memory"] for row in rows} == {"durable", "sliding-window"}
    assert {row["delay_s"] for row in rows} == {0.0, 2.0}
    assert "was last visible (2)" in report["facts"]["delay counts from"]
    assert {point["memory"] for point in report["points"]} == {"durable", "sliding-window"}
    assert protokv(*small, "--json", "--dry-run").rows()[0]["answers"] == 0
    # Rows of other memories stay in the file, and are not shown.
    (one,) = protokv(*small, "--memory", "sliding-window", "--json").rows()
    assert {point["memory"] for point in one["points"]} == {"sliding-window"}
    assert (protokv.folder / "results.jsonl").read_bytes() == finished


def test_results_of_several_runs_are_merged_into_a_table_a_csv_file_and_a_figure(
    protokv: Program, finished: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drawing itself is tested in `tests/replay/test_figure.py`.
    drawn: list[str] = []
    monkeypatch.setattr("protokv.replay.figure.save_figure", lambda report, path, **_: drawn.append(str(path)))
    (protokv.folder / "12.jsonl").write_bytes(finished.replace(b'"budget": 24', b'"budget": 12'))
    files = ("12.jsonl", "results.jsonl")
    protokv.environment["COLUMNS"] = "160"
    merged = protokv("replay", "--report", *files, "--format", "table", "--plot", "x.png", "--csv", "x.csv")
    assert merged.code == 0, merged.err
    assert "first token ms" in merged.out
    assert all(budget in merged.out for budget in ("12", "24"))
    assert drawn == ["x.png"]
    assert len((protokv.folder / "x.csv").read_text().splitlines()) == 1 + 2 * 2 * 2 * 2


def test_a_dry_run_says_what_it_would_do_and_does_nothing(protokv: Program, small: tuple[object, ...]) -> None:
    plan = protokv(*small, "--dry-run", "--json").rows()[0]
    assert plan["type"] == "plan"
    assert plan["answers"] == plan["questions"] * 4
    compared = ("--memory", "last-frames,full", "--set", "last-frames.last-steps=1,2")
    (plan,) = protokv(*small, *compared, "--dry-run", "--json").rows()
    assert plan["answers"] == plan["questions"] * 2 * 3
    assert not (protokv.folder / "results.jsonl").exists()


def test_questions_about_a_file_are_asked_and_those_left_out_are_counted(protokv: Program, video: Path) -> None:
    (protokv.folder / "q.jsonl").write_text(
        '{"question": "what is the star ?", "answer": "red", "type": "colour", "evidence_s": 3}\n'
        '{"question": "what is the ring ?", "answer": "red", "type": "colour", "evidence_s": 9}\n'
        '{"question": "what is now ?", "answer": "red", "type": "now", "ask_s": 3, "lasts": false}\n'
    )
    options = ("--questions", "q.jsonl", "--delays", "0,5s", "--memory", "durable", "--budget", "24", "--json")
    (report,) = protokv("replay", video, *options).rows()
    assert report["questions"] == 1
    assert report["facts"]["left out, type now, whose answers change with time"] == "1"
    assert report["facts"]["left out, beyond the end of the stream at some delay"] == "1"
    assert {row["asked_s"] for row in results(protokv)} == {3.0, 8.0}
    (protokv.folder / "bad.srt").write_bytes(b"junk\0" * 99)
    refused = protokv("replay", video, *options, "--subtitles", "bad.srt", "-o", "bad.jsonl")
    assert refused.code == Exit.FAILURE
    assert "bad.srt holds no subtitles" in refused.err


def test_results_of_another_study_are_refused_and_left_as_they_are(
    protokv: Program, small: tuple[object, ...], finished: bytes
) -> None:
    result = protokv(*small, "--fps", "1")
    assert result.code == Exit.USAGE
    assert "had fps 2.0 and now has fps 1.0" in result.err
    assert protokv(*small, "--fps", "1", "--dry-run").err == result.err
    assert (protokv.folder / "results.jsonl").read_bytes() == finished


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    protokv: Program, small: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*small, "--memory", "durable")
    append = RowFile.append

    def append_and_interrupt(file: RowFile, row: AnswerRow) -> None:
        append(file, row)
        # Once: the second is that of a user who will not wait.
        if len(file.rows) == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RowFile, "append", append_and_interrupt)
        stopped = protokv(*command, "--json")
    assert stopped.code == Exit.INTERRUPTED, stopped.err
    assert "Continue with the same command" in stopped.err
    n_done = len(results(protokv))
    assert n_done
    (report,) = protokv(*command, "--json").rows()
    assert len(results(protokv)) == report["questions"] * 2 > n_done


OF_DATA_SET = ("--memory", "durable", "--budget", "36", "--fps", "2")


@pytest.fixture(scope="module")
def ovo(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """One video of two."""
    root = tmp_path_factory.mktemp("ovo")
    shutil.copytree(data_root / "ovo-bench", root / "ovo-bench")
    (root / "ovo-bench" / "src_videos" / "Ego4D" / "clips" / "clip22.mp4").unlink()
    return root


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for benchmark in BENCHMARKS.values():
        monkeypatch.setattr(benchmark, "max_new_tokens", 2)


def test_a_table_names_everything_that_decides_its_numbers(protokv: Program, ovo: Path) -> None:
    protokv.environment["COLUMNS"] = "160"
    done = protokv("replay", "--dataset", "ovo-bench", "--data-root", ovo, *OF_DATA_SET, "--format", "table")
    assert done.code == Exit.PARTIAL
    assert "left out: Ego4D/clips/clip22.mp4" in done.err
    said = " ".join(done.out.split())
    for text in (
        "ovo-bench,", ", weights ", "2 a second", "tokens a step", "left out, video", "most frequent answer of a type",
        "text only", "last 4 frames", "last 16 frames", "backward without HLD", "95% interval",
        "fewer than 100 questions or 5 videos",
    ):  # fmt: skip
        assert text in said, text
    (report,) = protokv("replay", "--dataset", "ovo-bench", "--data-root", ovo, *OF_DATA_SET, "--json").rows()
    assert report["missing"].keys() == {"Ego4D/clips/clip22.mp4"}
    hashed = report["facts"]["prompt"]
    assert len(hashed) == 12
    assert hashed in said


def test_open_answers_are_judged_after_the_pass(
    protokv: Program,
    data_root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("openai")
    protokv.environment["OPENAI_API_KEY"] = "a-key"
    wanted = ("--dataset", "rvs-ego", "--data-root", data_root, *OF_DATA_SET, "--videos", "1", "--json")
    (report,) = protokv("replay", *wanted).rows()
    assert report["facts"]["judged by"] == f"offline, token F1 of 0.5 or more ({report['questions'] * 4})"
    monkeypatch.setattr(Judge, "read", lambda self, cases: ((case, Verdict(True, 5.0)) for case in cases))
    (judged,) = protokv("replay", *wanted, "--judge", "gpt").rows()
    assert {(point["accuracy"], point["points"]) for point in judged["points"]} == {(1.0, 5.0)}
    refused = protokv("replay", "--dataset", "mlvu", "--data-root", data_root, "--judge", "gpt")
    assert refused.code == Exit.USAGE
    assert "reads open answers" in refused.err
