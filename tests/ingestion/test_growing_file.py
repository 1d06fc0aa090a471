"""A file that is still being written is watched to its present end, and on when it has grown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protokv.errors import StateMismatch
from protokv.ingestion import Every, Started, Summary, ingest
from protokv.memories import DurableConfig
from protokv.state import api as storage
from tests.cli.conftest import write_video
from tests.mock_backbone import MockBackbone

PACKET = 188


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A transport stream of 12 s: every beginning of it can be read."""
    return write_video(tmp_path_factory.mktemp("whole") / "camera.ts", 12, rate=4).read_bytes()


@pytest.fixture
def part(whole: bytes) -> bytes:
    return whole[: len(whole) * 6 // 10 // PACKET * PACKET]


def run(video: Path, path: Path, *, meanwhile: bytes = b"", keep: int | None = None) -> tuple[Started, Summary]:
    """Watch a file; append `meanwhile` to it as soon as it is open."""
    events = ingest(
        str(video), path, DurableConfig(budget=24), backbone=MockBackbone(), every=Every(n_steps=2), keep=keep
    )
    started = next(events)
    with video.open("ab") as file:
        file.write(meanwhile)
    *_, summary = events
    assert isinstance(started, Started)
    assert isinstance(summary, Summary)
    return started, summary


def test_a_file_that_grows_while_it_is_read_is_not_at_its_end(whole: bytes, part: bytes, tmp_path: Path) -> None:
    video, path = tmp_path / "camera.ts", tmp_path / "s.safetensors"
    video.write_bytes(part)
    _, summary = run(video, path, meanwhile=whole[len(part) :])
    assert (summary.grows, summary.complete) == (True, False)
    started, summary = run(video, path)
    assert started.how == "continued"
    assert (summary.steps, summary.grows, summary.complete) == (12, False, True)
    started, _ = run(video, path)
    assert started.how == "finished"


def test_a_file_that_has_grown_is_watched_on_and_its_commits_stay_those_of_one_stream(
    whole: bytes, part: bytes, tmp_path: Path
) -> None:
    video, path = tmp_path / "camera.ts", tmp_path / "s.safetensors"
    video.write_bytes(part)
    _, first = run(video, path, keep=20)
    assert (first.grows, first.complete) == (False, True)
    for size in ((len(part) + len(whole)) // 2 // PACKET * PACKET, len(whole)):
        video.write_bytes(whole[:size])
        started, last = run(video, path, keep=20)
        assert started.how == "continued"
        assert started.steps >= first.steps
    assert (last.steps, last.complete) == (12, True)
    assert run(video, path)[0].how == "finished"
    assert {2.0, 4.0, first.stream_time_s, 12.0} <= set(storage.moments(path))


def test_another_file_of_the_same_name_is_refused_by_its_name(whole: bytes, part: bytes, tmp_path: Path) -> None:
    video, path = tmp_path / "camera.ts", tmp_path / "s.safetensors"
    video.write_bytes(part)
    run(video, path)
    video.write_bytes(b"\x47" + bytes(PACKET - 1) + whole)
    with pytest.raises(StateMismatch, match=r"another camera\.ts, or camera\.ts as it was before it changed") as caught:
        run(video, path)
    assert "--force" in caught.value.hint
    assert not re.search("[0-9a-f]{32}", caught.value.message)
