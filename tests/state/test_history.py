"""Kept commits are states of their own, no more than asked for, and never of another stream."""

from dataclasses import replace
from pathlib import Path

import pytest

from protokv.errors import StateNotFound
from protokv.state.checkpoint import save_state
from protokv.state.header import State
from protokv.state.reader import StateReader, load_state
from protokv.state.store import find_store
from protokv.texts import JsonObject
from tests.state.conftest import EVERY_FORM, names, same
from tests.state.conftest import moment as at


def commit(state: State, path: Path, keep: int | None = None) -> None:
    with find_store(path, keep=keep) as store:
        store.commit(state)


def times(path: Path) -> list[float]:
    return [header.clock.stream_time_s for _, header in find_store(path).list_kept()]


@pytest.mark.parametrize(
    "other",
    [
        {"memory": {"kind": "protokv", "budget": 9}},
        {"source": {"name": "b.mp4", "fingerprint": "b"}},
        {"backbone": replace(at(1).backbone, weights_digest="other")},
    ],
)
def test_commits_of_another_stream_are_neither_read_nor_removed(
    other: JsonObject, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    for step in (1, 2, 3):
        commit(at(step, **other), path, 3)
    commit(at(5), path)
    with pytest.raises(StateNotFound, match=r"at 10 s$"):
        load_state(path, at_s=9.0)
    commit(at(6), path, 3)
    assert StateReader.open(path).commits_s == [10.0, 12.0]
    assert same(load_state(path, at_s=10.0), at(5))
    # Commits of others are not removed.
    assert times(path) == [2.0, 4.0, 10.0]


@EVERY_FORM
def test_other_entries_with_the_name_of_a_kept_commit_are_left_alone(
    suffix: str, tmp_path: Path
) -> None:
    """A file, a link, which is not followed, and files with similar names."""
    path = tmp_path / f"a{suffix}"
    elsewhere = tmp_path / f"b{suffix}"
    similar = ("a{}@1s", "ab{}@000001.000s", "a{}@000001.000s.bak", "a{}@000002.000s")
    mine = [tmp_path / name.format(suffix) for name in similar]
    link = tmp_path / f"a{suffix}@000004.000s"
    for one in mine:
        one.write_text("mine")
    save_state(at(4), elsewhere)
    link.symlink_to(elsewhere)
    for step in range(1, 5):
        commit(at(step), path, 2)
        assert same(load_state(path), at(step))
        assert StateReader.open(path).commits_s == ([6.0, 8.0] if step == 4 else [2.0 * step])
    assert all(one.read_text() == "mine" for one in mine)
    assert link.is_symlink()
    assert same(load_state(elsewhere), at(4))


def test_a_damaged_state_is_not_kept_and_does_not_stop_a_commit(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    commit(at(1), path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    commit(at(2), path, 3)
    assert times(path) == []


def test_a_link_stays_a_link_and_its_target_has_the_history(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "a.safetensors"
    link.symlink_to("there/b.safetensors")
    for step in (1, 2):
        commit(at(step), link, 2)
    assert names(tmp_path / "there") == ["b.safetensors", "b.safetensors@000002.000s"]
    assert link.is_symlink()
    assert load_state(tmp_path / "there" / "b.safetensors").clock.steps == 2
    assert load_state(link, at_s=2.0).clock.steps == 1
