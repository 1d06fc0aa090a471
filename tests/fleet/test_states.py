"""The states of a fleet: one row each, and a bucket of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import StateCorrupt
from protokv.fleet import (
    JobRecipe,
    VideoJob,
    list_video_jobs,
    locate_fleet_state,
)
from protokv.ingestion import Every
from protokv.state.folder import describe_states, find_states
from protokv.state.reader import load_state
from protokv.stream.opening import load_backbone_for_states
from tests.core.streams import same
from tests.fleet.conftest import InlinePool, StateBytes, ends, outcomes


def test_every_state_has_a_row_and_a_broken_one_says_why(
    jobs: list[VideoJob], recipe: JobRecipe
) -> None:
    outcomes(jobs[:1], InlinePool(recipe), recipe)
    bad = Path(recipe.place, "0.safetensors")
    good = Path(recipe.place, "a.safetensors")
    bad.write_bytes(b"no state")
    with pytest.raises(StateCorrupt):
        load_backbone_for_states([str(bad)], device="cpu")
    broken, row = describe_states(recipe.place)
    assert broken.keys() == row.keys()
    assert (broken["complete"], broken["steps"]) == (False, None)
    assert "0.safetensors" in broken["failure"]
    assert (row["source"], row["complete"], row["steps"]) == ("a.mp4", True, 4)
    assert (row["file_bytes"], row["failure"]) == (good.stat().st_size, None)


def test_a_bucket_of_videos_becomes_a_bucket_of_states_and_then_nothing_is_left(
    store: Any, recipe: JobRecipe, singly: StateBytes, tmp_path: Path
) -> None:
    options = replace(recipe.options, every=Every(n_steps=3))
    recipe = replace(recipe, place=f"s3://bucket/{tmp_path.name}", options=options)
    assert [job.key for job in list_video_jobs(["s3://bucket/videos/s*/*"])] == ["sub/c"]
    jobs = [job for job in list_video_jobs(["s3://bucket/videos/"]) if job.key != "broken"]
    assert ends(outcomes(jobs, InlinePool(recipe, 2), recipe)) == dict.fromkeys(
        singly, ("watched", 1)
    )
    # Objects beside a state and at other prefixes are ignored.
    for key in (f"{tmp_path.name}/notes.txt", f"{tmp_path.name}-y/d.safetensors"):
        store.put(key, b"")
    assert find_states(f"{recipe.place}/") == [
        locate_fleet_state(recipe.place, key) for key in singly
    ]
    for key, single in singly.items():
        (tmp_path / "single.safetensors").write_bytes(single)
        mine = load_state(locate_fleet_state(recipe.place, key))
        theirs = load_state(tmp_path / "single.safetensors")
        assert mine.clock == theirs.clock
        assert same(mine.tensors, theirs.tensors)
    before = store.objects()
    assert {one.status for one in outcomes(jobs, InlinePool(recipe), recipe).values()} == {"done"}
    assert store.objects() == before
