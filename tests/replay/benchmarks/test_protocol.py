"""Every data set end to end on the embedded model: loaded, watched once, answered, scored,
reported.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from protokv.core.backbone import Backbone
from protokv.errors import SourceUnreadable
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.dataset import TEXT_ONLY_VARIANT, complete_memory_variants, open_dataset
from protokv.replay.memories import make_memory_variants
from protokv.replay.plan import ReplayFailure, ReplayPlan, make_replay_plan, run_replay_plan
from protokv.replay.report import summarise_answers
from protokv.replay.rows import AnswerRow, AnswerRowFile
from protokv.replay.runner import ReplayProgress, TrialSetup
from protokv.replay.streams import ReplayStream
from tests.replay.benchmarks.miniature import NAMES, VIDEOS


class Played(NamedTuple):
    rows: list[AnswerRow]
    watched: list[ReplayProgress]


@pytest.fixture(scope="session")
def played(
    data_root: Path, embedded: Backbone, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Played]:
    """Play each data set once, for several tests."""
    return cache(
        lambda name: play(name, data_root, embedded, tmp_path_factory.mktemp(name) / "rows.jsonl")
    )


def plan_dataset(
    name: str,
    streams: Sequence[ReplayStream],
    backbone: Backbone,
) -> ReplayPlan:
    variants = complete_memory_variants(
        make_memory_variants(["durable"], [90]), streams, backbone, baselines=True
    )
    return make_replay_plan(
        streams, variants, [0.0], TrialSetup.of(backbone, BENCHMARKS[name], fps=2.0)
    )


def play(name: str, root: Path, backbone: Backbone, path: Path, subtitles: str = "off") -> Played:
    """Run a data set under a memory of nearly all steps, at two frames a second."""
    # Of the two videos of VideoMME one has subtitles.
    opened = open_dataset(
        BENCHMARKS[name], root, most_videos=1 + (name == "videomme"), subtitles=subtitles
    )
    events = list(
        run_replay_plan(plan_dataset(name, opened.streams, backbone), AnswerRowFile(path))
    )
    rows = [event for event in events if isinstance(event, AnswerRow)]
    return Played(rows, [event for event in events if isinstance(event, ReplayProgress)])


@pytest.mark.parametrize("name", VIDEOS)
def test_a_data_set_is_watched_once_answered_scored_and_reported(
    name: str, played: Callable[[str], Played], embedded: Backbone
) -> None:
    rows, watched = played(name)
    # Every step of a video is taken once for all questions.
    assert max(Counter((event.video, event.stream_time_s) for event in watched).values()) == 1
    report = summarise_answers(rows)
    facts = report["facts"]
    points = {p["memory"]: p for p in report["points"] if p["part"] == "all"}
    assert facts["data set"].startswith(f"{name}, ")
    assert facts["prompt"] == BENCHMARKS[name].prompt_hash
    # Without a rate that is asked for, a data set has its own, or the model's.
    rate = 1.0 if name == "streamingbench" else embedded.default_fps
    assert TrialSetup.of(embedded, BENCHMARKS[name]).fps == rate
    # The last frames have room for all of them: two frames of a square picture are nine tokens.
    assert [(memory, point["budget"]) for memory, point in points.items()] == [
        ("durable", 90),
        (TEXT_ONLY_VARIANT, 0),
        ("last 4 frames", 18),
        ("last 16 frames", 72),
    ]
    assert {point["n"] for point in points.values()} == {report["questions"]}
    means = {mean["name"] for mean in report["means"]}
    assert means >= {"backward", "backward without HLD"} if name == "ovo-bench" else len(means) <= 1
    assert "2 a second, 12.0 tokens a step" in facts["frames"] or name == "rvs-movie"


def test_with_subtitles_the_same_is_asked_of_a_stream_with_their_words_and_the_report_says_so(
    played: Callable[[str], Played], data_root: Path, embedded: Backbone, tmp_path: Path
) -> None:
    shutil.copytree(data_root / "videomme", tmp_path / "videomme")
    file = tmp_path / "videomme" / "subtitle" / f"{NAMES[0]}.srt"
    file.parent.mkdir()
    file.write_text("1\n00:00:03,000 --> 00:00:04,500\n<i>There was</i> a star\n", encoding="utf-8")
    opened = open_dataset(BENCHMARKS["videomme"], tmp_path, subtitles="auto")
    assert opened.notes["videos without subtitles"] == 1
    rows, _ = play("videomme", tmp_path, embedded, tmp_path / "rows.jsonl", "auto")
    # Four words between the control tokens that close one segment of video and open the next.
    plain = played("videomme").rows
    for row, other in zip(rows, plain, strict=True):
        assert (row.asked, row.memory) == (other.asked, other.memory)
        assert row.tokens_seen == other.tokens_seen + 6 * (row.video == NAMES[0])
    assert "of 1 video, in the stream" in summarise_answers(rows)["facts"]["subtitles"]
    assert "subtitles" not in summarise_answers(plain)["facts"]


def test_a_query_sees_no_frame_behind_its_time_and_the_text_alone_sees_none(
    played: Callable[[str], Played],
) -> None:
    for row in played("ovo-bench").rows:
        # Only frames that share a step with a later frame are missing.
        assert 0 <= row.reference_s - row.asked_s <= 1.0
        assert row.tokens_seen == 12 * row.asked_s
    blind = [row for row in played("streamingbench").rows if row.memory == TEXT_ONLY_VARIANT]
    assert {(row.context_tokens, row.state_bytes, row.budget) for row in blind} == {(0, 0, 0)}
    asked = {(row.video, row.question) for row in blind}
    assert len({(row.video, row.question, row.prediction) for row in blind}) == len(asked)


def test_a_video_that_breaks_within_the_pass_is_told_and_the_others_go_on(
    data_root: Path, embedded: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_dataset(BENCHMARKS["ovo-bench"], data_root)
    monkeypatch.setattr(opened.streams[0], "steps", Mock(side_effect=SourceUnreadable("damaged")))
    plan = plan_dataset("ovo-bench", opened.streams, embedded)
    events = list(run_replay_plan(plan, AnswerRowFile(tmp_path / "r.jsonl")))
    assert isinstance(events[0], ReplayFailure)
    assert (events[0].video, events[0].error.message) == (opened.streams[0].name, "damaged")
    assert {event.video for event in events if isinstance(event, AnswerRow)} == {
        opened.streams[1].name
    }
