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
from protokv.replay.dataset import open_dataset
from protokv.replay.questions import ReplayQuestion
from protokv.texts import JsonObject
from tests.replay.benchmarks.miniature import ANNOTATIONS, LENGTH_S

# Data set -> video, number, type, answer and time of each question.
EXPECTED = json.loads((ANNOTATIONS / "questions.json").read_text())
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
def test_annotations_are_read_with_types_answers_and_times(name: str, data_root: Path) -> None:
    found = [
        [
            video.name,
            question.id,
            question.type,
            question.answer,
            "end" if question.reference == "end" else question.reference_s,
        ]
        for video, question in BENCHMARKS[name].read(data_root / name, Counter())
    ]
    assert found == EXPECTED[name]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_all_videos_open_with_their_questions(name: str, data_root: Path, tmp_path: Path) -> None:
    opened = open_dataset(find_benchmark(name), data_root / name)
    assert not opened.missing
    assert sum(len(stream.questions) for stream in opened.streams) == len(EXPECTED[name])
    for stream in opened.streams:
        for question in stream.questions:
            assert 0 <= question.reference_s <= stream.length_s
            assert question.reference != "end" or question.reference_s == stream.length_s
            assert find_question_group(question.type, name) != "other"
            assert question.text in (question.prompt or question.text)
            if question.prompt and question.answer in set("ABCD"):
                assert re.search(rf"\W{question.answer}[.)] \w", question.prompt)
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SourceNotFound, match="expected"):
            open_dataset(BENCHMARKS[name], root)


@pytest.mark.parametrize(
    ("file", "other", "said"),
    [
        ("ovo-bench/ovo_bench_new.json", "not json", "ovo_bench_new"),
        ("ovo-bench/ovo_bench_new.json", "[1, 2]", "object.*int"),
        ("ovo-bench/ovo_bench_new.json", {"gt": -1}, r"\[0\]\.gt"),
        ("ovo-bench/ovo_bench_new.json", {"task": "XYZ"}, "XYZ"),
        ("ovo-bench/ovo_bench_new.json", {"video": None}, r"\[0\]\.video"),
        (
            "streamingbench/questions_real.json",
            {"questions": [{"time_stamp": "7x"}]},
            r"\[0\]\.questions\[0\]\.time_stamp",
        ),
    ],
)
def test_annotations_of_another_form_are_refused_by_their_place(
    copied: Copied, file: str, other: Any, said: str
) -> None:
    name = file.partition("/")[0]
    path = copied(name).parent / file
    if isinstance(other, str):
        path.write_text(other)
    else:
        change(path, lambda row: row | other)
    with pytest.raises(ConfigError, match=said):
        load(name, path.parent)


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


def test_types_of_rvs_are_joined_by_the_video_of_several_and_else_unknown(copied: Copied) -> None:
    root = copied("rvs-ego")
    original = root / "test_qa_ego4d.json"
    change(original, lambda row: row | {"answer_type": f"type of {row['video_id']}"})
    found = {(v.name, q.type) for v, q in BENCHMARKS["rvs-ego"].read(root, Counter())}
    assert found == {("clip21", "type of x_clip21"), ("clip22", "type of x_clip22")}
    original.unlink()
    notes = Counter[str]()
    found = {(v.name, q.type) for v, q in BENCHMARKS["rvs-ego"].read(root, notes)}
    assert found == {("clip21", "unjoined"), ("clip22", "unjoined")}
    assert notes["questions without a type"] == 6
    assert not BENCHMARKS["rvs-ego"].find_type("unjoined").retrospective


def test_times_count_from_the_beginning_of_what_a_file_holds(data_root: Path) -> None:
    opened = open_dataset(BENCHMARKS["rvs-movie"], data_root / "rvs-movie")
    # One file holds the film from its beginning, the other the clip, whose annotations begin at
    # second 500.
    assert opened.notes["questions counted from the beginning of their clip"] == 2
    assert [step.time_s for step in opened.streams[1].steps(1.0, 1)] == list(range(LENGTH_S))


def test_probes_are_asked_what_their_task_asks(data_root: Path) -> None:
    asked = load("ovo-bench", data_root / "ovo-bench")
    prompts = {question.type: question.prompt for question in asked}
    assert "How many times did they appear?" in prompts["REC"]
    assert "Is anything visible now?" in prompts["SSR"]
    assert "Was there a star?" in prompts["CRR"]


def test_both_forms_of_streamingbench_are_one_and_late_times_are_counted(
    data_root: Path, tmp_path: Path
) -> None:
    root = data_root / "streamingbench"
    opened = open_dataset(BENCHMARKS["streamingbench"], root)
    assert opened.notes == {"questions after the end of their video, asked at its end": 2}
    first = opened.streams[0]
    assert {question.reference_s for question in first.questions} == {10.0, first.length_s}
    by_video: dict[str, list[Any]] = {}
    for entry in json.loads((root / "questions_real.json").read_text()):
        by_video.setdefault(entry["video_path"], []).extend(entry["questions"])
    stream = [{"questions": rows, "video_path": video} for video, rows in by_video.items()]
    (tmp_path / "questions_real_stream.json").write_text(json.dumps(stream))
    assert load("streamingbench", tmp_path) == load("streamingbench", root)


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
