"""`protokv replay` of worlds, files and data sets: its questions, results, continuation and refusals."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.rows import Row, RowFile
from protokv_cli.exits import Exit
from tests.cli.conftest import Program
from tests.replay.benchmarks.conftest import clips, data_root  # noqa: F401

SMALL = tuple(
    shlex.split("--world 3 --length 20s --before 0s --delays 0,2s --memory durable,sliding-window --per-type 1")
)


def results(program: Program, name: str = "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (program.folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> bytes:
    """The results of `SMALL` at 24 tokens."""
    program = Program(tmp_path_factory.mktemp("finished"), tiny_folder)
    path = program.folder / "results.jsonl"
    assert program("replay", *SMALL, "--budget", "24", "-o", path, "--json").code == 0
    return path.read_bytes()


def test_a_finished_replay_is_reported_again_and_asks_nothing(protokv: Program, finished: bytes) -> None:
    (protokv.folder / "results.jsonl").write_bytes(finished)
    done = protokv("replay", *SMALL, "--budget", "24", "--json")
    assert done.code == 0, done.err
    (report,) = done.rows()
    rows = results(protokv)
    assert len(rows) == report["questions"] * 2 * 2
    assert {row["memory"] for row in rows} == {"durable", "sliding-window"}
    assert {row["delay_s"] for row in rows} == {0.0, 2.0}
    assert report["reference"] == {"evidence": report["questions"]}
    assert [curve["memory"] for curve in report["curves"]] == ["durable", "sliding-window"]
    assert protokv("replay", *SMALL, "--budget", "24", "--json", "--dry-run").rows()[0]["answers"] == 0
    # Rows of other memories stay in the file, and are not shown.
    (one,) = protokv("replay", *SMALL, "--budget", "24", "--memory", "sliding-window", "--json").rows()
    assert [curve["memory"] for curve in one["curves"]] == ["sliding-window"]
    assert (protokv.folder / "results.jsonl").read_bytes() == finished


def test_results_of_several_runs_are_merged_and_drawn(
    protokv: Program, finished: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drawing itself is tested in `tests/replay/test_figure.py`.
    drawn: list[str] = []
    monkeypatch.setattr("protokv.replay.figure.save_figure", lambda report, path, **_: drawn.append(str(path)))
    monkeypatch.setattr("protokv.replay.figure.save_page", lambda report, path, **_: drawn.append(str(path)))
    (protokv.folder / "24.jsonl").write_bytes(finished)
    (protokv.folder / "12.jsonl").write_bytes(finished.replace(b'"budget": 24', b'"budget": 12'))
    files = ("12.jsonl", "24.jsonl")
    merged = protokv("replay", "--report", *files, "--format", "table", "--plot", "x.png", "--html", "x.html")
    assert merged.code == 0, merged.err
    assert "accuracy against delay, all questions" in merged.out
    assert all(budget in merged.out for budget in ("12", "24"))
    assert sorted(drawn) == ["x.html", "x.png"]


def test_a_dry_run_says_what_it_would_do_and_does_nothing(protokv: Program) -> None:
    plan = protokv("replay", *SMALL, "--budget", "24", "--dry-run", "--json").rows()[0]
    assert plan["type"] == "plan"
    assert plan["answers"] == plan["questions"] * 4
    assert 0 < plan["steps"] <= 40
    compared = ("--memory", "last-frames,full", "--set", "last-frames.last-steps=1,2")
    (plan,) = protokv("replay", *SMALL, *compared, "--budget", "24", "--dry-run", "--json").rows()
    assert plan["answers"] == plan["questions"] * 2 * 3
    assert not list(protokv.folder.iterdir())


def test_questions_about_a_file_are_asked_and_those_left_out_are_counted(protokv: Program, video: Path) -> None:
    (protokv.folder / "q.jsonl").write_text(
        '{"question": "what is the star ?", "answer": "red", "type": "colour", "evidence_s": 3}\n'
        '{"question": "what is the ring ?", "answer": "red", "type": "colour", "evidence_s": 9}\n'
        '{"question": "what is now ?", "answer": "red", "type": "now", "ask_s": 3}\n'
    )
    options = ("--questions", "q.jsonl", "--delays", "0,5s", "--memory", "durable", "--budget", "24", "--json")
    (report,) = protokv("replay", video, *options).rows()
    assert report["questions"] == 1
    assert report["dropped"] == {
        "type now is not known to be retrospective": 1,
        "beyond the end of the stream at some delay": 1,
    }
    assert {row["asked_s"] for row in results(protokv)} == {3.0, 8.0}
    (protokv.folder / "bad.srt").write_bytes(b"junk\0" * 99)
    partial = protokv("replay", video, *options, "--subtitles", "bad.srt", "-o", "bad.jsonl")
    assert (partial.code, partial.err.count("not all words are read: bad.srt holds no subtitles")) == (Exit.PARTIAL, 1)
    assert "bad.srt holds no subtitles" in results(protokv, "bad.jsonl")[0]["stream"]["subtitles"]["lost"]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (("--length", "40s"), "world length_s 20 and now has world length_s 40"),
        (("--fps", "1"), "fps 2.0 and now has fps 1.0"),
        (("--cuts", "none"), "world cut_s [6, 20] and now has world cut_s None"),
    ],
    ids=str,
)
def test_results_of_another_study_are_refused_and_left_as_they_are(
    protokv: Program, finished: bytes, change: tuple[str, ...], fact: str
) -> None:
    (protokv.folder / "results.jsonl").write_bytes(finished)
    result = protokv("replay", *SMALL, "--budget", "24", *change)
    assert result.code == Exit.USAGE
    assert f"results.jsonl holds results of another study: the stream world-3 had {fact}" in result.err
    assert protokv("replay", *SMALL, "--budget", "24", *change, "--dry-run").err == result.err
    assert (protokv.folder / "results.jsonl").read_bytes() == finished


def test_a_missing_plot_library_is_told_before_the_run(protokv: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protokv.replay.figure.find_spec", lambda name: None)
    for option in ("--plot", "--html"):
        result = protokv("replay", *SMALL, option, "x.svg")
        assert result.code == Exit.USAGE
        assert "figures need matplotlib" in result.err
    assert not list(protokv.folder.iterdir())


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("replay", *SMALL, "--memory", "durable", "--budget", "24")
    append = RowFile.append

    def append_and_interrupt(file: RowFile, row: Row) -> None:
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


STUDIES = Path(__file__).parents[2] / "samples" / "studies"
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
    done = protokv("replay", "--dataset", "ovo-bench", "--data-root", ovo, *OF_DATA_SET, "--format", "table")
    assert done.code == Exit.PARTIAL
    assert "left out: Ego4D/clips/clip22.mp4" in done.err
    said = " ".join(done.out.split())
    for text in (
        "ovo-bench: scores", "revision", "2 a second", "pixels a frame", "tokens a step", "videos left out 1:",
        "most frequent answer of a type", "always 'A'", "text only", "last 4 frames", "last 16 frames", "official",
        "strict", "context", "95% interval", "fewer than 100 questions or 5 videos", "CC BY-NC-SA 4.0",
    ):  # fmt: skip
        assert text in said, text
    (report,) = protokv("replay", "--dataset", "ovo-bench", "--data-root", ovo, *OF_DATA_SET, "--json").rows()
    assert report["missing"].keys() == {"Ego4D/clips/clip22.mp4"}
    (hashed,) = report["benchmark"]["prompt_hash"]
    assert len(hashed) == 12
    assert hashed in said


def test_open_answers_are_judged_after_the_pass(protokv: Program, data_root: Path) -> None:  # noqa: F811
    wanted = ("--dataset", "rvs-ego", "--data-root", data_root, *OF_DATA_SET, "--videos", "1", "--json")
    (report,) = protokv("replay", *wanted).rows()
    assert report["benchmark"]["judges"] == {"offline, token F1 of 0.5 or more": report["questions"] * 4}
    judged = protokv("replay", *wanted, "--judge", "local:protokv/mini")
    assert judged.rows() == [report]
    assert f"{report['questions'] * 4} answers have no verdict of protokv/mini (weights " in judged.err
    refused = protokv("replay", "--dataset", "mlvu", "--data-root", data_root, "--judge", "local:protokv/mini")
    assert refused.code == Exit.USAGE
    assert "reads open answers" in refused.err


def test_a_dry_run_of_a_study_lists_its_runs_and_missing_data_sets(
    protokv: Program,
    data_root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    shutil.copytree(data_root / "mlvu", tmp_path / "some" / "mlvu")
    study, root = STUDIES / "paper-table-3.toml", tmp_path / "some"
    wanted = ("--study", study, "--data-root", root, "--dry-run", "--budget", "36")
    done = protokv("replay", *wanted, "--json")
    assert done.code == 0, done.err
    (preset,) = done.rows()
    assert preset["models"] == ["Qwen/Qwen2-VL-7B-Instruct"]
    offline, mlvu = preset["cells"]
    assert "no annotations of videomme" in offline["absent"]
    assert mlvu["videos"] == 7
    assert mlvu["compared"] == ["paper", "infinipot-v", "dycoke", "durable"]
    assert mlvu["estimate_s"] > 0
    shown = protokv("replay", *wanted, "--format", "table")
    assert "offline benchmarks (table 3 of the paper)" in shown.out
