"""States in an object store: one object, put on the condition that nobody else has put one meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt, StateError, StateLocked, StateNotFound, UnknownForm
from protokv.state.reader import Reader, load_state
from protokv.state.store import find_store
from protokv.state.writer import save_state
from tests.state.conftest import make, same

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from tests.state.s3 import S3Server

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"s3://bucket/{tmp_path.name}/a.safetensors"


def at(state: Any, seconds: float) -> Any:
    return replace(state, clock=StreamClock(int(seconds), seconds, 77, 45, 2.0, 2))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_state_there_is_the_one_that_was_put(suffix: str, url: str) -> None:
    url, state = url.replace(".safetensors", suffix), make()
    save_state(state, url)
    assert same(load_state(url), state)
    assert Reader.open(url).header.to_json() == state.to_json()
    assert Reader.open(url).file_bytes > 0


def test_the_object_is_the_same_file_as_on_disk(url: str, store: S3Server, tmp_path: Any) -> None:
    save_state(make(), url)
    save_state(make(), tmp_path / "a.safetensors")
    assert [*store.objects(tmp_path.name).values()] == [(tmp_path / "a.safetensors").read_bytes()]


@pytest.mark.parametrize("there", [False, True])
def test_a_second_writer_is_found_and_overwrites_nothing(there: bool, url: str) -> None:
    if there:
        save_state(make(), url)
    mine, others = at(make(), 6), at(make(), 7)
    with find_store(url) as writer:
        if there:
            writer.commit(mine)
        save_state(others, url)
        with pytest.raises(StateLocked, match="by another writer meanwhile"):
            writer.commit(at(make(), 8))
    assert same(load_state(url), others)


def test_commits_are_kept_and_read_at_a_time(url: str, store: S3Server, tmp_path: Any) -> None:
    with find_store(url, keep=2) as writer:
        for seconds in (5, 6, 7):
            writer.commit(at(make(), seconds))
    assert Reader.open(url).commits_s == [6.0, 7.0]
    assert load_state(url, at_s=6.5).clock.stream_time_s == 6.0
    assert len(store.objects(tmp_path.name)) == 2


def test_what_is_no_state_is_one_error(url: str, store: S3Server, tmp_path: Any) -> None:
    with pytest.raises(StateNotFound, match=f"no state at {url}"):
        load_state(url)
    store.put(f"{tmp_path.name}/a.safetensors", b"no state" * 100)
    for read in (load_state, Reader.open):
        with pytest.raises(StateCorrupt, match=rf"^{url}: .*") as caught:
            read(url)
        assert "/tmp" not in caught.value.message
    with pytest.raises(UnknownForm):
        load_state("s3://bucket/a.zarr")
    with pytest.raises(StateError, match=r"cannot write the state s3://none/a.pt: .*404"), find_store("s3://none/a.pt"):
        pass
