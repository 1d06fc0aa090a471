"""The videos of a fleet, the keys of their states, and where states are."""

from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceNotFound, StateNotFound
from protokv.fleet import list_video_jobs, locate_fleet_state
from protokv.state.folder import find_states, names_many_states


@pytest.mark.parametrize(
    ("sources", "keys"),
    [
        # A file: its stem, in any folder and of any kind.
        (["{films}/sub/c.mp4", "{films}/notes.txt", "gone.mp4"], ["c", "notes.txt", "gone"]),
        # A folder: its videos, sorted and named by their paths. One that is named twice is one job.
        (["{films}/a.mp4", "{films}"], ["a", "b", "broken", "sub/c"]),
    ],
)
def test_videos_are_found_once_and_have_keys(
    sources: list[str], keys: list[str], films: Path
) -> None:
    assert [
        job.key for job in list_video_jobs([source.format(films=films) for source in sources])
    ] == keys


def test_videos_of_one_folder_that_differ_in_their_suffix_keep_it(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("a.mp4", "a.mkv", "b/a.mp4", "c.mp4", "c.mp4.mkv"):
        (tmp_path / name).touch()
    keys = [job.key for job in list_video_jobs([str(tmp_path)])]
    assert keys == ["a.mkv", "a.mp4", "b/a", "c", "c.mp4"]


def test_what_names_no_videos_that_end_is_refused_by_name(tmp_path: Path) -> None:
    for error, named, match in (
        (
            ConfigError,
            ["x/talk.mp4", "y/talk.mkv"],
            r"x/talk\.mp4 and y/talk\.mkv would both have the state talk",
        ),
        (ConfigError, ["rtsp://u:s3cret@camera/1"], r"^rtsp://camera/1 is live"),
        (SourceNotFound, [str(tmp_path)], "there is no video in"),
    ):
        with pytest.raises(error, match=match):
            list_video_jobs(named)


def test_a_name_that_is_too_long_for_a_state_is_cut_and_stays_different() -> None:
    assert locate_fleet_state("states", "a/b") == "states/a/b.safetensors"
    long = {locate_fleet_state("states", f"monday/{'ö' * 120}{last}") for last in "ab"}
    assert len(long) == 2
    assert all(len(Path(path).name.encode()) <= 212 for path in long)


def test_states_are_found_at_any_depth_and_nothing_else_is(tmp_path: Path) -> None:
    states = ["b.safetensors", "deep/er/a.pt", "z.zarr"]
    others = [
        "z.zarr/in.zarr/zarr.json",
        "b.safetensors@000012.000s",
        ".b.safetensors.lock",
        ".hidden/c.pt",
        "n.txt",
    ]
    for name in (*others, *states[:2]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_states(str(tmp_path)) == [str(tmp_path / name) for name in states]
    with pytest.raises(StateNotFound, match="there is no state in"):
        find_states(str(tmp_path / "deep" / "nothing"))
    assert all(map(names_many_states, (str(tmp_path), "new/", "s3://bucket/states/")))
    assert not any(
        map(
            names_many_states, (str(tmp_path / "z.zarr"), "s3://bucket/states/a", "new.safetensors")
        )
    )
