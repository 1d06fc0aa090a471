"""Annotations are read as they were published, with every trap in them, and anything else is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.benchmarks import BENCHMARKS, find_benchmark, find_group
from protokv.replay.benchmarks.files import Record, find_video
from protokv.replay.benchmarks.streamingbench import read_clock
from protokv.replay.dataset import open_dataset
from tests.replay.benchmarks.miniature import LENGTH_S, WRITERS


@pytest.fixture(params=WRITERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_data_set_has_a_miniature() -> None:
    assert WRITERS.keys() == BENCHMARKS.keys()


def test_all_videos_open_with_their_questions(name: str, data_root: Path) -> None:
    opened = open_dataset(find_benchmark(name), data_root / name)
    assert not opened.missing
    assert len({stream.name for stream in opened.streams}) == len(opened.streams)
    for stream in opened.streams:
        assert stream.questions
        assert len({question.id for question in stream.questions}) == len(stream.questions)
        for question in stream.questions:
            assert 0 <= question.reference_s <= stream.length_s
            assert question.dataset == name
            assert find_group(question.type, name) != "other"
            assert question.text in (question.prompt or question.text)
            if question.prompt and question.answer in set("ABCD"):
                assert re.search(rf"\W{question.answer}[.)] \w", question.prompt)


def test_missing_and_unreadable_videos_are_named(data_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "mlvu"
    shutil.copytree(data_root / "mlvu", root)
    (root / "video" / "1_plotQA" / "clip21.mp4").unlink()
    (root / "video" / "2_needle" / "clip21.mp4").unlink()
    (root / "video" / "2_needle" / "clip21.mp4").write_bytes(b"not a video")
    opened = open_dataset(BENCHMARKS["mlvu"], root)
    # Every task has a copy of its own, and the one that is gone is not looked for in another task's folder.
    assert opened.missing.keys() == {"1_plotQA/clip21.mp4", "2_needle/clip21.mp4"}
    assert "clip21.mp4" in opened.missing["1_plotQA/clip21.mp4"]


def test_a_folder_without_annotations_says_what_was_looked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="expected"):
        open_dataset(BENCHMARKS[name], tmp_path)
    with pytest.raises(SourceNotFound, match="no folder"):
        open_dataset(BENCHMARKS[name], tmp_path / "absent")


@pytest.mark.parametrize("text", ["not json", '{"a": 1}', "[1, 2]"])
def test_annotations_that_are_something_else_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ovo_bench_new.json").write_text(text)
    with pytest.raises(ConfigError, match="ovo_bench_new"):
        BENCHMARKS["ovo-bench"].load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gt": 9}, "gt 9"),
        ({"task": "XYZ"}, "XYZ"),
        ({"realtime": "soon"}, "realtime"),
        ({"video": None}, "video"),
    ],
)
def test_a_record_that_is_not_as_published_is_named(data_root: Path, tmp_path: Path, change: dict, said: str) -> None:
    rows = json.loads((data_root / "ovo-bench" / "ovo_bench_new.json").read_text())
    rows[0] |= change
    (tmp_path / "ovo_bench_new.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=f"entry 0.*{said}"):
        BENCHMARKS["ovo-bench"].load(tmp_path)


def test_a_path_of_annotations_never_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "outside.mp4").write_bytes(b"x")
    root = tmp_path / "set"
    (root / "videos").mkdir(parents=True)
    (root / "videos" / "inside.mp4").write_bytes(b"x")
    assert find_video(root, "../outside.mp4") is None
    assert find_video(root, str(tmp_path / "outside.mp4")) is None
    assert find_video(root, "/data/elsewhere/videos/inside.mp4") == root / "videos" / "inside.mp4"
    assert find_video(root, "inside") == root / "videos" / "inside.mp4"
    assert find_video(root, "inside.mkv") == root / "videos" / "inside.mp4"
    assert find_video(root, "") is None


def test_types_of_rvs_are_joined_by_question_and_answer(data_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "rvs"
    shutil.copytree(data_root / "rvs-ego", root)
    found = [question for video in BENCHMARKS["rvs-ego"].load(root).videos for question in video.questions]
    assert {question.type for question in found} == {
        "Whether Something Happened(Y/N)", "What event order", "Scene Summary"
    }  # fmt: skip
    (root / "test_qa_ego4d.json").unlink()
    without = BENCHMARKS["rvs-ego"].load(root)
    assert {question.type for video in without.videos for question in video.questions} == {"unjoined"}
    assert without.notes["questions without a type"] == len(found)
    assert not BENCHMARKS["rvs-ego"].find_type("unjoined").retrospective


def test_a_question_of_two_types_has_that_of_its_own_video(data_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "rvs"
    shutil.copytree(data_root / "rvs-ego", root)
    typed = json.loads((root / "test_qa_ego4d.json").read_text())
    order, summary = "Order Judging(Y/N)", "Scene Summary"
    (root / "test_qa_ego4d.json").write_text(
        json.dumps([row | {"answer_type": order if "clip21" in row["video_id"] else summary} for row in typed])
    )
    one, two = BENCHMARKS["rvs-ego"].load(root).videos
    assert ({q.type for q in one.questions}, {q.type for q in two.questions}) == ({order}, {summary})


def test_seconds_of_a_film_count_from_the_beginning_of_what_its_file_holds(data_root: Path) -> None:
    opened = open_dataset(BENCHMARKS["rvs-movie"], data_root / "rvs-movie")
    # One file holds the film from its beginning, the other the clip, whose annotations begin at second 500.
    assert [{question.reference_s for question in stream.questions} for stream in opened.streams] == [{10.0}, {10.0}]
    assert opened.notes["questions counted from the beginning of their clip"] == 2
    assert opened.streams[1].length_s == LENGTH_S
    assert [step.time_s for step in opened.streams[1].steps(1.0, 1)] == list(range(LENGTH_S))


def test_probes_of_forward_tasks_are_questions_of_their_own_with_their_own_times(data_root: Path) -> None:
    loaded = BENCHMARKS["ovo-bench"].load(data_root / "ovo-bench")
    probes = [q for video in loaded.videos for q in video.questions if q.type in ("REC", "SSR", "CRR")]
    assert [(q.type, q.answer, q.reference_s) for q in probes] == [
        ("REC", "1", 4), ("REC", "2", 10), ("SSR", "Yes", 3), ("CRR", "No", 5), ("CRR", "Yes", 12)
    ]  # fmt: skip
    assert "How many times did they appear?" in probes[0].prompt
    assert "Is anything visible now?" in probes[2].prompt
    # The prefix of a query ends at its time, rounded up.
    assert {q.reference_s for video in loaded.videos for q in video.questions if q.type == "EPM"} == {10.0}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:16", 16), ("0:07:40", 460), ("00:24", 24), ("00:12450", 12450), ("01:00:01", 3601), ("7", 7)],
)
def test_clock_times_are_sums_of_powers_of_sixty_in_any_form(text: str, seconds: float) -> None:
    assert read_clock(Record({"at": text}, "here"), "at") == seconds
    with pytest.raises(ConfigError, match="no clock time"):
        read_clock(Record({"at": f"{text}x"}, "here"), "at")


def test_times_after_the_end_are_counted(data_root: Path) -> None:
    opened = open_dataset(BENCHMARKS["streamingbench"], data_root / "streamingbench")
    assert opened.notes == {
        "questions after the end of their video, asked at its end": 2,
    }
    assert len(opened.streams) == 2
    assert {question.reference_s for question in opened.streams[0].questions} == {10.0, opened.streams[0].length_s}


def test_both_forms_of_streamingbench_are_the_same_questions(data_root: Path, tmp_path: Path) -> None:
    entries = json.loads((data_root / "streamingbench" / "questions_real.json").read_text())
    by_video: dict[str, list[dict]] = {}
    for entry in entries:
        by_video.setdefault(entry["video_path"], []).extend(q | {"time": entry["time"]} for q in entry["questions"])
    stream = [{"questions": rows, "video_path": video, "video_categories": "x"} for video, rows in by_video.items()]
    (tmp_path / "questions_real_stream.json").write_text(json.dumps(stream))
    one = BENCHMARKS["streamingbench"].load(data_root / "streamingbench")
    assert BENCHMARKS["streamingbench"].load(tmp_path) == one


def test_offline_sets_are_asked_at_the_end_and_a_missing_task_is_noted(data_root: Path, tmp_path: Path) -> None:
    for offline in ("videomme", "mlvu"):
        loaded = BENCHMARKS[offline].load(data_root / offline)
        assert {q.reference_s for video in loaded.videos for q in video.questions} == {math.inf}
        stream = open_dataset(BENCHMARKS[offline], data_root / offline).streams[0]
        assert {question.reference_s for question in stream.questions} == {stream.length_s}
    shutil.copytree(data_root / "mlvu", tmp_path / "mlvu")
    (tmp_path / "mlvu" / "json" / "4_count.json").unlink()
    assert BENCHMARKS["mlvu"].load(tmp_path / "mlvu").notes == {"4_count.json is missing": 1}


def test_a_question_that_nothing_answers_is_counted_and_never_right(data_root: Path, tmp_path: Path) -> None:
    shutil.copytree(data_root / "mlvu", tmp_path / "mlvu")
    path = tmp_path / "mlvu" / "json" / "2_needle.json"
    path.write_text(json.dumps([row | {"answer": "something else"} for row in json.loads(path.read_text())]))
    loaded = BENCHMARKS["mlvu"].load(tmp_path / "mlvu")
    asked = [q for video in loaded.videos for q in video.questions if q.type == "findNeedle"]
    assert {q.answer for q in asked} == {"@"}
    assert loaded.notes == {"questions whose answer is none of their candidates": len(asked)}
    for said in ("A", "B) x", "", "nothing"):
        assert not BENCHMARKS["mlvu"].is_right(said, "@", "findNeedle")
