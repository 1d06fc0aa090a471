"""Annotations are read as they were published, with every trap in them, and anything else is
refused.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.benchmarks import BENCHMARKS, find_benchmark, find_question_group
from protokv.replay.benchmarks.files import find_dataset_video
from protokv.replay.benchmarks.streamingbench import _Question
from protokv.replay.dataset import open_dataset
from protokv.replay.questions import ReplayQuestion
from protokv.texts import JsonObject
from tests.replay.benchmarks.miniature import LENGTH_S

Copied = Callable[[str], Path]


@pytest.fixture
def copied(data_root: Path, tmp_path: Path) -> Copied:
    """Copy a data set, to be changed."""
    return lambda name: shutil.copytree(data_root / name, tmp_path / name)


def change(path: Path, edit: Callable[[JsonObject], JsonObject]) -> None:
    path.write_text(json.dumps([edit(row) for row in json.loads(path.read_text())]))


def load(name: str, root: Path) -> list[ReplayQuestion]:
    return [question for _, question in BENCHMARKS[name].read(root, Counter())]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_all_videos_open_with_their_questions(name: str, data_root: Path, tmp_path: Path) -> None:
    opened = open_dataset(find_benchmark(name), data_root / name)
    assert not opened.missing
    assert len({stream.name for stream in opened.streams}) == len(opened.streams)
    for stream in opened.streams:
        ids = [question.id for question in stream.questions]
        assert len(set(ids)) == len(ids) > 0
        for question in stream.questions:
            assert 0 <= question.reference_s <= stream.length_s
            assert question.reference != "end" or question.reference_s == stream.length_s
            assert question.dataset == name
            assert find_question_group(question.type, name) != "other"
            assert question.text in (question.prompt or question.text)
            if question.prompt and question.answer in set("ABCD"):
                assert re.search(rf"\W{question.answer}[.)] \w", question.prompt)
    for root, said in ((tmp_path, "expected"), (tmp_path / "absent", "no folder")):
        with pytest.raises(SourceNotFound, match=said):
            open_dataset(BENCHMARKS[name], root)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("not json", "ovo_bench_new"),
        ("[1, 2]", "object.*int"),
        ({"gt": -1}, r"\[0\]\.gt"),
        ({"task": "XYZ"}, "XYZ"),
        ({"realtime": "soon"}, r"\[0\]\.realtime"),
        ({"video": None}, r"\[0\]\.video"),
    ],
)
def test_annotations_of_another_form_are_refused_by_their_place(
    copied: Copied, other: Any, said: str
) -> None:
    path = copied("ovo-bench") / "ovo_bench_new.json"
    if isinstance(other, str):
        path.write_text(other)
    else:
        change(path, lambda row: row | other if row["id"] == 0 else row)
    with pytest.raises(ConfigError, match=said):
        load("ovo-bench", path.parent)


def test_a_path_of_annotations_never_leaves_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "set"
    inside = tmp_path / "set" / "videos" / "inside.mp4"
    inside.parent.mkdir(parents=True)
    for path in (tmp_path / "outside.mp4", inside):
        path.write_bytes(b"x")
    for name in ("../outside.mp4", str(tmp_path / "outside.mp4"), ""):
        assert find_dataset_video(root, name) is None
    for name in ("/data/elsewhere/videos/inside.mp4", "inside", "inside.mkv"):
        assert find_dataset_video(root, name) == inside


def test_types_of_rvs_are_joined_by_question_and_answer_and_by_the_video_of_several(
    copied: Copied,
) -> None:
    root = copied("rvs-ego")
    types = {"Whether Something Happened(Y/N)", "What event order", "Scene Summary"}
    assert {question.type for question in load("rvs-ego", root)} == types
    order = "Order Judging(Y/N)"
    summary = "Scene Summary"
    original = root / "test_qa_ego4d.json"
    change(
        original,
        lambda row: row | {"answer_type": order if "clip21" in row["video_id"] else summary},
    )
    read = [
        (video.name, question.type)
        for video, question in BENCHMARKS["rvs-ego"].read(root, Counter())
    ]
    assert len(set(read)) == 2
    assert {kind for _, kind in read} == {order, summary}
    original.unlink()
    notes = Counter[str]()
    assert {question.type for _, question in BENCHMARKS["rvs-ego"].read(root, notes)} == {
        "unjoined"
    }
    assert notes["questions without a type"] == 6
    assert not BENCHMARKS["rvs-ego"].find_type("unjoined").retrospective


def test_times_count_from_the_beginning_of_what_a_file_holds_and_of_each_probe(
    data_root: Path,
) -> None:
    opened = open_dataset(BENCHMARKS["rvs-movie"], data_root / "rvs-movie")
    # One file holds the film from its beginning, the other the clip, whose annotations begin at
    # second 500.
    assert [
        {question.reference_s for question in stream.questions} for stream in opened.streams
    ] == [{10.0}, {10.0}]
    assert opened.notes["questions counted from the beginning of their clip"] == 2
    assert [step.time_s for step in opened.streams[1].steps(1.0, 1)] == list(range(LENGTH_S))
    asked = load("ovo-bench", data_root / "ovo-bench")
    probes = [question for question in asked if question.type in ("REC", "SSR", "CRR")]
    assert [(q.type, q.answer, q.reference_s) for q in probes] == [
        ("REC", "1", 4),
        ("REC", "2", 10),
        ("SSR", "Yes", 3),
        ("CRR", "No", 5),
        ("CRR", "Yes", 12),
    ]
    assert "How many times did they appear?" in probes[0].prompt
    assert "Is anything visible now?" in probes[2].prompt
    # The prefix of a query ends at its time, rounded up.
    assert {question.reference_s for question in asked if question.type == "EPM"} == {10.0}


def test_both_forms_of_streamingbench_are_one_and_late_times_are_counted(
    data_root: Path, tmp_path: Path
) -> None:
    root = data_root / "streamingbench"
    opened = open_dataset(BENCHMARKS["streamingbench"], root)
    assert opened.notes == {"questions after the end of their video, asked at its end": 2}
    assert {question.reference_s for question in opened.streams[0].questions} == {
        10.0,
        opened.streams[0].length_s,
    }
    by_video: dict[str, list[Any]] = {}
    for entry in json.loads((root / "questions_real.json").read_text()):
        by_video.setdefault(entry["video_path"], []).extend(entry["questions"])
    stream: list[Any] = [
        {"questions": rows, "video_path": video} for video, rows in by_video.items()
    ]
    (tmp_path / "questions_real_stream.json").write_text(json.dumps(stream))
    assert load("streamingbench", tmp_path) == load("streamingbench", root)
    for text, seconds in {
        "0:07:40": 460,
        "00:24": 24,
        "00:12450": 12450,
        "01:00:01": 3601,
        "7": 7,
    }.items():
        assert _Question("", [], "A", "", text).time_s == seconds
    stream[0]["questions"][0]["time_stamp"] = "7x"
    (tmp_path / "questions_real_stream.json").write_text(json.dumps(stream))
    with pytest.raises(ConfigError, match="time_stamp"):
        load("streamingbench", tmp_path)


def test_what_mlvu_lacks_is_named_and_an_answer_that_is_no_candidate_is_never_right(
    copied: Copied,
) -> None:
    root = copied("mlvu")
    (root / "video" / "1_plotQA" / "clip21.mp4").unlink()
    (root / "video" / "2_needle" / "clip21.mp4").unlink()
    (root / "video" / "2_needle" / "clip21.mp4").write_bytes(b"not a video")
    (root / "json" / "4_count.json").unlink()
    change(root / "json" / "3_ego.json", lambda row: row | {"answer": "something else"})
    opened = open_dataset(BENCHMARKS["mlvu"], root)
    # Every task has a copy of its own, and the one that is gone is not looked for in another task's
    # folder.
    assert opened.missing.keys() == {"1_plotQA/clip21.mp4", "2_needle/clip21.mp4"}
    assert opened.notes == {
        "4_count.json is missing": 1,
        "questions whose answer is none of their candidates": 2,
    }
    assert {question.answer for question in load("mlvu", root) if question.type == "ego"} == {"@"}
    assert not BENCHMARKS["mlvu"].is_right("B) x", "@", "ego")
    # The authors' code takes the last letter of equal candidates.
    twice = {"candidates": ["a", "b", "a"], "answer": "a"}
    change(root / "json" / "3_ego.json", lambda row: row | twice)
    assert {question.answer for question in load("mlvu", root) if question.type == "ego"} == {"C"}
