"""Metadata that decompress to far more than a state needs are refused before Icechunk reads them."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta

import pytest
import torch
import zarr

from protokv.errors import StateCorrupt
from protokv.state.api import load_state, save_state

pytest.importorskip("icechunk")
pytest.importorskip("moto.server")

import zstandard

from protokv.state import decompression_limit as limits
from protokv.state import icechunk as repository
from protokv.state.decompression_limit import DecompressionLimit
from tests.state.conftest import READS, failure, limited_memory, make
from tests.state.s3 import BUCKET

HEADER_BYTES = 39

_numbers = itertools.count()


@pytest.fixture
def prefix(store):
    """Return the prefix of a new state."""
    prefix = f"bombs/{next(_numbers)}"
    save_state(make(), f"s3://{BUCKET}/{prefix}")
    store.reset()
    return prefix


@pytest.fixture
def address(prefix):
    return f"s3://{BUCKET}/{prefix}"


def tip(objects: dict[str, bytes], prefix: str) -> str:
    return json.loads(objects[f"{prefix}/refs/branch.main/ref.json"])["snapshot"]


def bomb(like: bytes, size: int = 1 << 30) -> bytes:
    """Return an object of compressed zeros with the head of another: a GiB in 33 kB."""
    compressor = zstandard.ZstdCompressor().compressobj()
    zeros = b"".join([compressor.compress(bytes(1 << 20)) for _ in range(size >> 20)])
    return like[:HEADER_BYTES] + zeros + compressor.flush()


def with_length(data: bytes, old: int, new: int) -> bytes:
    """Return a snapshot that claims `new` bytes for a manifest of `old` bytes."""
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(data[HEADER_BYTES:])
    changed = plain.replace(old.to_bytes(8, "little"), new.to_bytes(8, "little"))
    assert changed != plain
    return data[:HEADER_BYTES] + zstandard.ZstdCompressor().compress(changed)


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("snapshots", [StateCorrupt] * 5),
        # Headers are in the snapshot alone.
        ("manifests", [StateCorrupt, None, None, StateCorrupt, StateCorrupt]),
    ],
)
def test_a_bomb_of_33_kB_is_refused_before_icechunk_reads_it(kind, ends, store, prefix, address):
    objects = store.objects(prefix)
    snapshot = f"{prefix}/snapshots/{tip(objects, prefix)}"
    # The array with the most metadata.
    manifest = max((key for key in objects if "/manifests/" in key), key=lambda key: len(objects[key]))
    key = {"snapshots": snapshot, "manifests": manifest}[kind]
    made = bomb(objects[key])
    assert len(made) < 40_000
    store.put(key, made)
    if kind == "manifests":
        store.put(snapshot, with_length(objects[snapshot], len(objects[key]), len(made)))
    with limited_memory(1 << 30, 100 << 10):
        found = [failure(use, address) for use in (*READS, lambda address: save_state(make(seed=2), address))]
    assert [error and type(error) for error in found] == ends
    # The check fetches it once in each refused call, and Icechunk never does.
    fetched = [one for one in store.requests if one.method == "GET" and one.key == key]
    assert len(fetched) == ends.count(StateCorrupt)


def test_a_bomb_in_an_old_snapshot_is_not_opened_by_garbage_collection(store, prefix, address):
    for seed in (2, 3):
        save_state(make(seed=seed), address)
    objects = store.objects(prefix)
    oldest = next(
        key
        for key in objects
        if "/snapshots/" in key and tip(objects, prefix) not in key and repository.EMPTY not in key
    )
    store.put(oldest, bomb(objects[oldest], 64 << 20))
    repo = repository.open_repository(address)
    with pytest.raises(StateCorrupt, match=r"would take more than 16 MiB"):
        repository.collect(repo, DecompressionLimit(address), datetime.now(UTC) + timedelta(hours=2))
    # The next writer commits, and deletes nothing.
    save_state(make(seed=4), address)
    assert set(objects) < set(store.objects(prefix))


def test_manifests_of_many_small_arrays_are_summed(store, prefix, address, monkeypatch):
    """A large limit needs only their lengths; for a smaller one the longest are fetched and decompressed."""
    state = make(tensors={f"near.t{n}": torch.randn(50 + n, 7) for n in range(12)})
    save_state(state, address)
    lengths = [len(data) for key, data in store.objects(prefix).items() if "/manifests/" in key]
    for limit in (12 << 20, limits.LIMIT_BYTES):
        monkeypatch.setattr(limits, "LIMIT_BYTES", limit)
        store.reset()
        load_state(address)
        fetched = [
            one for one in store.requests if one.method == "GET" and "/manifests/" in one.key and one.status == 200
        ]
        assert (len(fetched) > 0) == (limit == 12 << 20), lengths
    monkeypatch.setattr(limits, "LIMIT_BYTES", 1000)
    with pytest.raises(StateCorrupt, match=r"manifests/\w+ would take more than"):
        load_state(address)


@pytest.mark.parametrize("name", ["../../notes", "0" * 19 + "H", "0" * 19, "a" * 20])
def test_a_name_that_icechunk_would_not_write_is_refused(name, store):
    """Two spellings of one snapshot could be two objects: one is checked, the other opened."""
    with pytest.raises(StateCorrupt, match="no such name"):
        DecompressionLimit(f"s3://{BUCKET}/a").check_snapshot(name)
    assert not store.requests


def test_no_object_decompresses_to_more_than_its_length_allows():
    for size in (1 << 17, 1 << 22, 1 << 26):
        data = bomb(bytes(HEADER_BYTES), size)
        assert limits._most_decompressed(len(data)) >= size


def test_a_document_that_is_too_long_is_not_fetched(store, address):
    session = repository.open_repository(address).writable_session("main")
    zarr.open_group(session.store, mode="a").attrs["long"] = "x" * (5 << 20)
    session.commit("long")
    for read in READS:
        with pytest.raises(StateCorrupt, match=r"there is no zarr\.json that could be"):
            read(address)
