"""Kept commits are states of their own, no more than asked for, and never of another stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protokv.errors import StateError, StateNotFound
from protokv.state.reader import Reader, load_state
from protokv.state.sources import is_before, list_fingerprints, next_source_part, read_source_part
from protokv.state.store import find_store
from protokv.state.writer import save_state
from tests.state.conftest import EVERY_FORM, names, same
from tests.state.conftest import moment as at


def commit(state, path: Path, keep: int | None = None) -> None:
    with find_store(path, keep=keep) as store:
        store.commit(state)


def kept(path: Path) -> list[Path]:
    return [Path(at) for at, _ in find_store(path).list_kept()]


def times(path: Path) -> list[float]:
    return [Reader.open(one).header.clock.stream_time_s for one in kept(path)]


OTHER_STREAMS = {
    "memory": lambda state: replace(state, memory={"kind": "protokv", "budget": 9}),
    "source": lambda state: replace(state, source={"name": "b.mp4", "fingerprint": "b"}),
    "model": lambda state: replace(state, backbone=replace(state.backbone, weights_digest="other")),
    "rate": lambda state: replace(state, clock=replace(state.clock, fps=4.0)),
}


@pytest.mark.parametrize("other", OTHER_STREAMS)
def test_commits_of_another_stream_are_neither_read_nor_removed(other, tmp_path):
    path = tmp_path / "a.safetensors"
    for step in (1, 2, 3):
        commit(OTHER_STREAMS[other](at(step)), path, 3)
    commit(at(5), path)
    with pytest.raises(StateNotFound, match=r"at 10 s$"):
        load_state(path, at_s=9.0)
    commit(at(6), path, 3)
    assert Reader.open(path).commits_s == [10.0, 12.0]
    assert same(load_state(path, at_s=10.0), at(5))
    # Commits of others are not removed.
    assert times(path) == [2.0, 4.0, 10.0]


@EVERY_FORM
def test_other_entries_with_the_name_of_a_kept_commit_are_left_alone(suffix, tmp_path):
    """A file, a link, which is not followed, and files with similar names."""
    path, elsewhere = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    similar = ("a{}@1s", "ab{}@000001.000s", "a{}@000001.000s.bak", "a{}@000002.000s")
    mine, link = [tmp_path / name.format(suffix) for name in similar], tmp_path / f"a{suffix}@000004.000s"
    for one in mine:
        one.write_text("mine")
    save_state(at(4), elsewhere)
    link.symlink_to(elsewhere)
    for step in range(1, 5):
        commit(at(step), path, 2)
        assert same(load_state(path), at(step))
        assert Reader.open(path).commits_s == ([6.0, 8.0] if step == 4 else [2.0 * step])
    assert all(one.read_text() == "mine" for one in mine)
    assert link.is_symlink()
    assert same(load_state(elsewhere), at(4))


def test_a_source_without_a_fingerprint_is_never_taken_for_another():
    for source in (None, {"name": "rtsp://camera/1"}, {"name": "a.mp4", "fingerprint": None}):
        past, now = (at(step, source=source) for step in (1, 2))
        assert not is_before(past, now)
    assert is_before(at(1), at(2))


def test_a_damaged_state_is_not_kept_and_does_not_stop_a_commit(tmp_path):
    path = tmp_path / "a.safetensors"
    commit(at(1), path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    commit(at(2), path, 3)
    assert times(path) == []


def test_a_link_stays_a_link_and_its_target_has_the_history(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "a.safetensors"
    link.symlink_to("there/b.safetensors")
    for step in (1, 2):
        commit(at(step), link, 2)
    assert names(tmp_path / "there") == ["b.safetensors", "b.safetensors@000002.000s"]
    assert link.is_symlink()
    assert load_state(tmp_path / "there" / "b.safetensors").clock.steps == 2
    assert load_state(link, at_s=2.0).clock.steps == 1


ONE, TWO, THREE = ({"name": f"{letter}.mp4", "fingerprint": letter} for letter in "abc")


def test_sources_are_listed_in_order_with_the_beginning_of_each():
    state = at(3, source=ONE, complete=True)
    for step, source in [(5, TWO), (9, THREE)]:
        segment = next_source_part(state)
        assert (segment.first_step, segment.start_s) == (state.clock.steps, state.clock.stream_time_s)
        state = at(step, source=segment.record(source), complete=True)
        assert read_source_part(state) == replace(segment, done=True)
    assert list_fingerprints(state) == ("a", "b", "c")
    places = [(one["name"], one.get("first_step"), one.get("start_s")) for one in read_source_part(state).earlier]
    assert places == [("a.mp4", None, None), ("b.mp4", 3, 6.0)]
    assert (state.source["first_step"], state.source["start_s"]) == (5, 10.0)


def test_a_record_that_makes_no_sense_is_named():
    good = {**TWO, "earlier": [ONE], "first_step": 1, "start_s": 2.0}
    read_source_part(at(3, source=good))
    for field, value in (("earlier", 5), ("earlier", ["a"]), ("first_step", 1.5), ("start_s", "0")):
        with pytest.raises(StateError, match=rf"source: .*\$\.{field}"):
            read_source_part(at(3, source={**good, field: value}))
