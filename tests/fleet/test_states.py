"""The states of a fleet: where they are, one row each, and questions to all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protokv.errors import StateCorrupt, StateNotFound
from protokv.fleet import Job, Recipe, find_states, locate_state, plan
from protokv.fleet.plan import is_place
from protokv.fleet.states import load_backbone_for, survey
from protokv.ingestion import Every
from protokv.state.reader import load_state
from tests.fleet.conftest import InlinePool, ends, outcomes


def test_the_model_of_a_folder_is_that_of_its_first_readable_state(jobs: list[Job], recipe: Recipe) -> None:
    outcomes(jobs, InlinePool(recipe), recipe)
    bad = Path(recipe.place, "0.safetensors")
    bad.write_bytes(b"no state")
    assert [Path(state).stem for state in find_states(recipe.place)] == ["0", "a", "b", "c"]
    with pytest.raises(StateCorrupt):
        load_backbone_for([str(bad)], None, device="cpu", device_map=None)


def test_a_row_describes_a_state_or_says_why_it_cannot_be_read(jobs: list[Job], recipe: Recipe) -> None:
    outcomes(jobs[:1], InlinePool(recipe), recipe)
    Path(recipe.place, "bad.safetensors").write_bytes(b"no state")
    row, bad = survey(recipe.place)
    assert bad.keys() == row.keys()
    assert (bad["complete"], bad["steps"]) == (False, None)
    assert "bad.safetensors" in bad["failure"]
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


@pytest.fixture(scope="module")
def server(films: Path) -> Iterator[Any]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    from tests.state.s3 import S3Server

    with S3Server() as made:
        for path in films.rglob("*.*"):
            made.put(f"videos/{path.relative_to(films).as_posix()}", path.read_bytes())
        yield made


def test_a_bucket_of_videos_becomes_a_bucket_of_states_and_then_nothing_is_left(
    store: Any, recipe: Recipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    options = replace(recipe.options, every=Every(n_steps=3))
    recipe = replace(recipe, place=f"s3://bucket/{tmp_path.name}", options=options)
    assert [job.key for job in plan(["s3://bucket/videos/s*/*"])] == ["sub/c"]
    jobs = [job for job in plan(["s3://bucket/videos/"]) if job.key != "broken"]
    assert ends(outcomes(jobs, InlinePool(recipe, 2), recipe)) == dict.fromkeys(singly, ("watched", 1))
    # Objects beside a state and at other prefixes are ignored.
    for key in (f"{tmp_path.name}/notes.txt", f"{tmp_path.name}-y/d.safetensors"):
        store.put(key, b"")
    place = f"{recipe.place}/"
    assert find_states(place) == [locate_state(place, key) for key in singly]
    for key, single in singly.items():
        (tmp_path / "single.safetensors").write_bytes(single)
        mine, theirs = load_state(locate_state(place, key)), load_state(tmp_path / "single.safetensors")
        assert mine.clock == theirs.clock
        assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in mine.tensors.items())
    assert [(row["source"], row["complete"]) for row in survey(place)] == [
        ("a.mp4", True),
        ("b.mkv", True),
        ("c.mp4", True),
    ]
    before = store.objects()
    assert {one.status for one in outcomes(jobs, InlinePool(recipe), recipe).values()} == {"done"}
    assert store.objects() == before
