"""The videos of a fleet and the keys of their states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceNotFound
from protokv.fleet import Job, plan, read_manifest
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


def test_two_videos_of_one_key_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"x/talk\.mp4 and y/talk\.mkv would both have the state talk") as caught:
        plan(["x/talk.mp4", "y/talk.mkv"])
    assert "--from" in caught.value.hint


@pytest.mark.parametrize("source", ["rtsp://u:s3cret@camera/1", "-", "/dev/video0"])
def test_a_live_source_is_refused(source: str) -> None:
    for ask in (lambda: plan([source]), lambda: plan([], [Job(source, "x")])):
        with pytest.raises(ConfigError, match="is live") as caught:
            ask()
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


def test_a_manifest_lists_sources_and_keys(films: Path) -> None:
    lines = [
        "x/talk.mp4\n",
        "\n",
        '{"source": "y/talk.mp4", "key": "y/talk"}\n',
        f"{films}/sub\n",
        '{"source": "z.mp4"}',
    ]
    assert [job.key for job in read_manifest(lines, "list")] == ["talk", "y/talk", "c", "z"]


@pytest.mark.parametrize("key", ["", "/etc/x", "../x", "a//b", "a/./b", "a\\b", "a\nb"])
def test_a_key_that_leads_out_of_the_place_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="line 1 of list: the key"):
        list(read_manifest([json.dumps({"source": "a.mp4", "key": key})], "list"))


@pytest.mark.parametrize("line", ["{", '{"key": "a"}', '{"source": 3}', '{"source": "a", "key": 3}', "{" * 10**5])
def test_a_line_that_is_no_job_is_one_error_with_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2 of list"):
        list(read_manifest(["a.mp4", line], "list"))
