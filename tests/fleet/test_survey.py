"""One row per state of a fleet, and per video that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv.errors import StateNotFound
from protokv.fleet import Job, Recipe, find_states, locate_state
from protokv.fleet.plan import is_place
from protokv.fleet.states import survey
from tests.fleet.conftest import InlinePool, outcomes


def test_a_row_describes_a_state(jobs: list[Job], recipe: Recipe) -> None:
    outcomes(jobs[:1], InlinePool(recipe), recipe)
    (row,) = survey(recipe.place)
    state = locate_state(recipe.place, "a")
    assert row == {
        "state": state,
        "source": "a.mp4",
        "complete": True,
        "stream_time_s": 4.0,
        "steps": 4,
        "tokens_seen": 24,
        "file_bytes": Path(state).stat().st_size,
        "memory": "durable, 40 tokens",
        "model": "mock",
        "damage": None,
        "failure": None,
    }


def test_an_unreadable_state_is_a_row_with_the_reason(jobs: list[Job], recipe: Recipe) -> None:
    outcomes(jobs[:1], InlinePool(recipe), recipe)
    Path(recipe.place, "bad.safetensors").write_bytes(b"no state")
    a, bad = survey(recipe.place)
    assert (a["complete"], a["failure"]) == (True, None)
    assert (bad["complete"], bad["steps"]) == (False, None)
    assert "bad.safetensors" in bad["failure"]


def test_states_are_found_at_any_depth_and_nothing_else_is(tmp_path: Path) -> None:
    for name in (
        "b.safetensors",
        "deep/er/a.pt",
        "z.zarr/zarr.json",
        "z.zarr/inner.zarr/zarr.json",
        "b.safetensors@000012.000s",
        ".b.safetensors.lock",
        ".hidden/c.safetensors",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [Path(state).relative_to(tmp_path).as_posix() for state in find_states(str(tmp_path))]
    assert found == ["b.safetensors", "deep/er/a.pt", "z.zarr"]
    with pytest.raises(StateNotFound, match="there is no state in"):
        find_states(str(tmp_path / "deep" / "nothing"))


def test_a_place_is_a_folder_that_is_no_state_or_a_path_with_a_final_slash(tmp_path: Path) -> None:
    (tmp_path / "s.zarr").mkdir()
    assert not is_place(str(tmp_path / "s.zarr"))
    assert is_place(str(tmp_path))
    assert is_place("new/")
    assert is_place("s3://bucket/states/")
    assert not is_place("s3://bucket/states/a")
    assert not is_place("new.safetensors")
