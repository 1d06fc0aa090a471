"""`protokv replay --dataset`: one command from a folder of annotations and videos to a table, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from protokv.replay.benchmarks import BENCHMARKS
from protokv_cli.exits import Exit
from tests.cli.conftest import Program
from tests.replay.benchmarks.conftest import clips, data_root  # noqa: F401

STUDIES = Path(__file__).parents[2] / "samples" / "studies"
TABLE_1 = str(STUDIES / "paper-table-1.toml")
SMALL = ("--memory", "durable", "--budget", "36", "--fps", "2")


@pytest.fixture(scope="module")
def ovo(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """One video of two."""
    root = tmp_path_factory.mktemp("ovo")
    shutil.copytree(data_root / "ovo-bench", root / "ovo-bench")
    (root / "ovo-bench" / "src_videos" / "Ego4D" / "clips" / "clip22.mp4").unlink()
    return root


def test_a_table_says_everything_that_its_numbers_stand_on(protokv: Program, ovo: Path) -> None:
    done = protokv("replay", "--dataset", "ovo-bench", "--data-root", ovo, *SMALL, "--format", "table")
    assert done.code == Exit.PARTIAL
    assert "left out: Ego4D/clips/clip22.mp4" in done.err
    said = " ".join(done.out.split())
    for text in (
        "ovo-bench: scores", "revision", "2 a second", "pixels a frame", "tokens a step", "videos left out 1:",
        "most frequent answer of a type", "always 'A'", "text only", "last 4 frames", "last 16 frames", "official",
        "strict", "context", "95 % interval", "fewer than 100 questions or 5 videos", "CC BY-NC-SA 4.0",
    ):  # fmt: skip
        assert text in said, text
    (report,) = protokv("replay", "--dataset", "ovo-bench", "--data-root", ovo, *SMALL, "--json").rows()
    assert report["missing"].keys() == {"Ego4D/clips/clip22.mp4"}
    (hashed,) = report["benchmark"]["prompt_hash"]
    assert len(hashed) == 12
    assert hashed in said


def test_open_answers_are_judged_after_the_pass(
    protokv: Program,
    data_root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BENCHMARKS["rvs-ego"], "max_new_tokens", 4)
    wanted = ("--dataset", "rvs-ego", "--data-root", data_root, *SMALL, "--videos", "1", "--json")
    (report,) = protokv("replay", *wanted).rows()
    assert report["benchmark"]["judges"] == {"offline, token F1 of 0.5 or more": report["questions"] * 4}
    (judged,) = protokv("replay", *wanted, "--judge", "exact").rows()
    assert judged["benchmark"]["judges"] == {"offline, exact text": report["questions"] * 4}
    refused = protokv("replay", "--dataset", "mlvu", "--data-root", data_root, "--judge", "exact")
    assert refused.code == Exit.USAGE
    assert "reads open answers" in refused.err


def test_strict_stops_at_the_first_missing_video(protokv: Program, ovo: Path) -> None:
    done = protokv("replay", "--dataset", "ovo-bench", "--data-root", ovo, *SMALL, "--strict")
    assert done.code == Exit.NOT_FOUND
    assert "clip22.mp4" in done.err.splitlines()[0]
    assert not list(protokv.folder.iterdir())


def test_a_dry_run_counts_hours_questions_and_time(protokv: Program, data_root: Path) -> None:  # noqa: F811
    options = ("--data-root", data_root, "--dataset", "ovo-bench", *SMALL, "--dry-run", "--json")
    (plan,) = protokv("replay", *options).rows()
    assert plan["videos"] == 2
    assert plan["hours"] == 0.01
    assert plan["embedded"] < plan["steps"]
    assert plan["estimate_s"] > 0
    assert plan["missing"] == {}
    assert not list(protokv.folder.iterdir())


def test_a_table_of_the_paper_lists_what_it_would_run_and_what_is_not_there(
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


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--dataset", "imagenet"), Exit.USAGE, "no data set 'imagenet'"),
        (("--dataset", "mlvu"), Exit.USAGE, "where is mlvu"),
        (("--data-root", "."), Exit.USAGE, "--data-root is the folder"),
        (("--dataset", "mlvu", "--data-root", "absent"), Exit.NOT_FOUND, "no folder absent"),
        (("--dataset", "mlvu", "--data-root", "."), Exit.NOT_FOUND, "no annotations of mlvu"),
        (("--dataset", "mlvu", "--data-root", ".", "--world", "3"), Exit.USAGE, "either --dataset or sources"),
        (("--dataset", "mlvu", "--data-root", ".", "--prompt", "x"), Exit.USAGE, "no prompt 'x'"),
        (("--study", TABLE_1), Exit.USAGE, "add --dataset"),
        (("--study", TABLE_1, "--dataset", "mlvu", "--data-root", "."), Exit.USAGE, "has no mlvu"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(
    protokv: Program, arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = protokv("replay", *arguments)
    assert result.code == code
    assert said in " ".join(result.err.splitlines()[:2])
