"""The videos of a fleet and the keys of their states."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceNotFound
from protokv.fleet import Job, locate_state, plan
from protokv.fleet.plan import is_several


@pytest.mark.parametrize(
    ("sources", "keys"),
    [
        # A folder: its videos, sorted and named by their paths.
        (["{films}"], ["a", "b", "broken", "sub/c"]),
        # A glob: named from its first wildcard on.
        (["{films}/**/*.mp4"], ["a", "broken", "sub/c"]),
        (["{films}/s*/*.mp4"], ["sub/c"]),
        # A file: its stem, in any folder and of any kind.
        (["{films}/sub/c.mp4", "{films}/notes.txt", "gone.mp4"], ["c", "notes.txt", "gone"]),
        # One video that is named twice is one job.
        (["{films}/a.mp4", "{films}"], ["a", "b", "broken", "sub/c"]),
    ],
)
def test_videos_are_found_once_and_have_keys(sources: list[str], keys: list[str], films: Path) -> None:
    assert [job.key for job in plan([source.format(films=films) for source in sources])] == keys


def test_a_name_that_is_too_long_for_a_state_is_cut_and_stays_different() -> None:
    assert locate_state("states", "a/b") == "states/a/b.safetensors"
    long = [locate_state("states", f"monday/{'ö' * 120}{last}") for last in "ab"]
    assert len({*long}) == 2
    for path in long:
        assert path.startswith("states/monday/ööö")
        assert len(Path(path).name.encode()) <= 212


def test_two_videos_of_one_key_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"x/talk\.mp4 and y/talk\.mkv would both have the state talk") as caught:
        plan(["x/talk.mp4", "y/talk.mkv"])
    assert "name a folder that holds both" in caught.value.hint


@pytest.mark.parametrize("source", ["rtsp://u:s3cret@camera/1", "-", "/dev/video0"])
def test_a_live_source_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="is live") as caught:
        plan([source])
    assert "protokv ingest SOURCE -o" in caught.value.hint
    assert "s3cret" not in caught.value.message


def test_a_folder_or_glob_without_videos_is_not_found(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "*.mp4"):
        with pytest.raises(SourceNotFound, match="there is no video in"):
            plan([str(source)])


def test_a_name_with_brackets_is_a_file_where_there_is_one(tmp_path: Path) -> None:
    video = tmp_path / "talk [x1].mp4"
    video.touch()
    assert not is_several(str(video))
    assert plan([str(video)]) == [Job(str(video), "talk [x1]")]
