"""States in an object store: one object, put on the condition that nobody else has put one
meanwhile.
"""

from typing import Any

import pytest

from protokv.errors import StateCorrupt, StateError, StateLocked, StateNotFound, UnknownForm
from protokv.state.checkpoint import save_state
from protokv.state.reader import StateReader, load_state
from protokv.state.store import find_store
from tests.state.conftest import make, moment, same

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from tests.state.s3 import S3Server

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"s3://bucket/{tmp_path.name}/a.safetensors"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_state_there_is_the_file_that_it_would_be_on_disk(
    suffix: str, url: str, store: S3Server, tmp_path: Any
) -> None:
    url = url.replace(".safetensors", suffix)
    path = tmp_path / f"a{suffix}"
    save_state(make(), url)
    save_state(make(), path)
    assert same(load_state(url), make())
    assert StateReader.open(url).header.to_json() == make().to_json()
    assert [*store.objects(tmp_path.name).values()] == [path.read_bytes()]
    assert StateReader.open(url).file_bytes == path.stat().st_size


@pytest.mark.parametrize("there", [False, True])
def test_a_second_writer_is_found_and_overwrites_nothing(there: bool, url: str) -> None:
    if there:
        save_state(make(), url)
    with find_store(url) as writer:
        if there:
            writer.commit(moment(6))
        save_state(moment(7), url)
        with pytest.raises(StateLocked, match="by another writer meanwhile"):
            writer.commit(moment(8))
    assert same(load_state(url), moment(7))


def test_commits_are_kept_and_read_at_a_time(url: str, store: S3Server, tmp_path: Any) -> None:
    with find_store(url, keep=2) as writer:
        for step in (5, 6, 7):
            writer.commit(moment(step))
    assert StateReader.open(url).commits_s == [12.0, 14.0]
    assert same(load_state(url, at_s=13.0), moment(6))
    assert len(store.objects(tmp_path.name)) == 2


def test_what_is_no_state_is_one_error(url: str, store: S3Server, tmp_path: Any) -> None:
    with pytest.raises(StateNotFound, match=f"no state at {url}"):
        load_state(url)
    store.put(f"{tmp_path.name}/a.safetensors", b"no state" * 100)
    for read in (load_state, StateReader.open):
        with pytest.raises(StateCorrupt, match=rf"^{url}: .*") as caught:
            read(url)
        assert "/tmp" not in caught.value.message
    with pytest.raises(UnknownForm):
        load_state("s3://bucket/a.zarr")
    with (
        pytest.raises(StateError, match=r"cannot write the state s3://none/a.pt: .*404"),
        find_store("s3://none/a.pt"),
    ):
        pass
