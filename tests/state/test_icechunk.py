"""States in an object store: a commit is one transaction, a race has one winner, a dead writer leaves a whole state."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import torch
import zarr
from zarr.core.sync import sync

from protokv.errors import StateCorrupt, StateError, StateLocked, StateNotFound
from protokv.state import zarr as hierarchy
from protokv.state.api import check_target, load_state, moments, save_state

pytest.importorskip("icechunk")
pytest.importorskip("moto.server")

from protokv.state import icechunk as repository
from protokv.state.decompression_limit import DecompressionLimit
from protokv.state.writer import Writer
from tests.state.conftest import READS, failure
from tests.state.form_tests import FormTests
from tests.state.form_tests import moment as at
from tests.state.s3 import BUCKET, S3Server
from tests.state.test_faults import A, commits, watch

__all__ = ["commits"]

REF = "refs/branch.main/ref.json"


_numbers = itertools.count()


@pytest.fixture
def address(store):
    return f"s3://{BUCKET}/{next(_numbers)}/video"


def key_of(address: str) -> str:
    return address.removeprefix(f"s3://{BUCKET}/")


def collect(address: str, now: datetime) -> None:
    repository.collect(repository.open_repository(address), DecompressionLimit(address), now)


def kinds(keys) -> Counter[str]:
    return Counter(key.split("/")[2] for key in keys)


class TestIcechunk(FormTests):
    # `.zarr` has the same hierarchy, and every example takes a second here.
    test_any_tensors_under_any_names_come_back_bit_for_bit = None

    @pytest.fixture
    def at(self, store):
        return lambda: f"s3://{BUCKET}/{next(_numbers)}/a"


# Transactions


def test_only_the_chunks_that_changed_travel(make_state, same_state, store, address, monkeypatch):
    monkeypatch.setattr(hierarchy, "CHUNK_BYTES", 4096)
    keys = torch.randn(4, 8, 64, 32)
    save_state(make_state(tensors={"near.keys": keys, "bank.mass": torch.randn(4, 8, 64)}), address)
    uploaded = kinds(one.key for one in store.requests if one.method == "PUT")
    assert uploaded["chunks"] == keys.nbytes // 4096 + 2
    keys = keys.clone()
    keys[2, 3, 1, 2] += 1
    changed = make_state(tensors={"near.keys": keys, "bank.mass": load_state(address).tensors["bank.mass"]})
    store.reset()
    save_state(changed, address)
    sent = [one for one in store.requests if one.method == "PUT"]
    # One chunk, the three objects that name it, and the branch.
    assert kinds(one.key for one in sent) == {"chunks": 1, "manifests": 1, "snapshots": 1, "transactions": 1, "refs": 1}
    assert sum(one.sent for one in sent) < 4096 + 16_000
    assert sent[-1].key == f"{key_of(address)}/{REF}"
    assert same_state(load_state(address), changed)


def test_the_same_state_again_is_no_commit(make_state, store, address):
    save_state(make_state(), address)
    store.reset()
    save_state(make_state(), address)
    assert not [one for one in store.requests if one.method == "PUT"]


def test_former_tensors_and_chunks_leave_nothing_behind(make_state, same_state, store, address, monkeypatch):
    """The repository has the arrays, groups and chunks of one that never had others."""
    monkeypatch.setattr(hierarchy, "CHUNK_BYTES", 64)
    long, short = torch.arange(100), torch.arange(40)
    warmup = {"warmup.keys": torch.ones(9), "warmup.deep.er": torch.ones(2)}
    several = {"near.step": long, **warmup, "offset": torch.ones(())}
    for now in (several, {"near.step": short}, several, {"near.step": long.to(torch.int8)}, {"warmup": short}):
        state = make_state(tensors=now)
        save_state(state, address)
        fresh = f"{address}{next(_numbers)}"
        save_state(state, fresh)
        assert listed(address) == listed(fresh)
        assert same_state(load_state(address), state)


def listed(address: str) -> list[str]:
    store = repository.open_repository(address).readonly_session("main").store

    async def keys() -> list[str]:
        return sorted([key async for key in store.list()])

    return sync(keys())


def test_one_of_many_writers_wins_each_round(make_state, same_state, store, address):
    """The first round begins without a repository, the second on the winner's commit."""
    for step in (1, 2):
        barrier, outcomes = threading.Barrier(6), {}

        def write(who: int, step=step, barrier=barrier, outcomes=outcomes) -> None:
            state = at(make_state, step, tensors={"near.step": torch.tensor([who])})
            try:
                with Writer(address) as writer:
                    barrier.wait(60)
                    writer.commit(state, wait=True)
                outcomes[who] = state
            except StateError as error:
                outcomes[who] = error

        writers = [threading.Thread(target=write, args=(who,)) for who in range(6)]
        for one in writers:
            one.start()
        for one in writers:
            one.join()
        won = [one for one in outcomes.values() if not isinstance(one, StateError)]
        lost = [one for one in outcomes.values() if isinstance(one, StateError)]
        assert len(won) == 1, lost
        assert all(isinstance(one, StateLocked) and "another writer" in one.message for one in lost)
        assert same_state(load_state(address), won[0])


@contextmanager
def refusing(store: S3Server, n: int, lasting: bool) -> Iterator[list[str]]:
    """Refuse request number `n`, from 1, and those after it if that is lasting; yield the keys of all."""
    seen: list[str] = []

    def refuse(method: str, key: str) -> int | None:
        seen.append(key)
        return 403 if len(seen) == n or (lasting and len(seen) > n) else None

    store.before = refuse
    yield seen
    store.before = lambda method, key: None


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize(
    ("every", "lasting"),
    [(7, True), pytest.param(1, True, marks=pytest.mark.slow), pytest.param(1, False, marks=pytest.mark.slow)],
)
def test_a_writer_that_dies_at_any_request_leaves_the_old_or_the_new_state(
    existing, every, lasting, make_state, same_state, store, address, monkeypatch
):
    """The store refuses the n-th request, and those after it if that is lasting, for every seventh n or every one."""
    monkeypatch.setattr(repository, "collect", lambda repo, limit: None)
    old, committed = None, []
    for n in itertools.count(1, every):
        path = address if existing else f"{address}{n}"
        if existing and old is None:
            old = replace(at(make_state, 1), tensors={"a": torch.arange(3)})
            save_state(old, path)
        new = replace(at(make_state, 2 + n), tensors={"a": torch.arange(4 + n)})
        with refusing(store, n, lasting) as seen:
            error = failure(save_state, new, path)
        try:
            committed.append(same_state(load_state(path), new))
        except StateNotFound:
            assert not existing
            committed.append(False)
        else:
            assert committed[-1] or same_state(load_state(path), old)
        old = replace(new, complete=True)
        save_state(old, path)
        assert same_state(load_state(path), old)
        # Some requests may fail: that of what is only looked up, and that of garbage.
        assert error is not None or committed[-1]
        assert error is None or "\n" not in error.message
        if len(seen) < n:
            break
    assert not lasting or committed == sorted(committed)
    assert committed[-1]
    assert not committed[0]
    assert len(seen) > 8
    print(len(seen), "requests")


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [True, False])
def test_a_run_whose_requests_fail_leaves_one_of_its_commits_and_goes_on(lasting, commits, same_state, store, address):
    for n in itertools.count(1):
        path = f"{address}{n}"
        with refusing(store, n, lasting) as seen:
            error = failure(lambda path=path: [*watch(path, A)])
        assert error is None or not isinstance(error, StateCorrupt)
        with suppress(StateNotFound):
            found = load_state(path)
            assert any(same_state(found, one) for one in commits[:4])
            with refusing(store, n, lasting) as loading:
                refused = failure(load_state, path)
            assert len(loading) < n or (refused and not isinstance(refused, StateCorrupt | StateNotFound))
        assert [*watch(path, A)]
        assert same_state(load_state(path), commits[3])
        if len(seen) < n:
            break
    print(len(seen), "requests of a run,", len(loading), "of a load")


def test_a_commit_whose_answer_is_lost_is_found(make_state, same_state, store, address):
    save_state(at(make_state, 1), address)
    lost = []

    def lose(method: str, key: str) -> int | None:
        if method == "PUT" and key.endswith(REF) and not lost:
            lost.append(key)
            return 500
        return None

    with Writer(address) as committer:
        store.after = lose
        committer.commit(at(make_state, 2), wait=True)
        assert lost
        committer.commit(at(make_state, 3), wait=True)
    assert same_state(load_state(address), at(make_state, 3))


# Earlier commits


def test_garbage_is_collected_an_hour_after_it_was_needed(make_state, same_state, store, address, monkeypatch):
    """A reader of a replaced state or a retired commit has that hour to finish."""
    with Writer(address, keep=2) as committer:
        for step in (4, 5, 6, 7):
            committer.commit(at(make_state, step), wait=True)
    everything = store.objects(key_of(address))
    now = datetime.now(UTC)
    collect(address, now + timedelta(minutes=59))
    assert set(store.objects(key_of(address))) == set(everything)
    collect(address, now + timedelta(minutes=61))
    left = store.objects(key_of(address))
    assert kinds(left)["snapshots"] == 3  # two commits, and the empty one of every repository
    assert moments(address) == [12.0, 14.0]
    for step in (6, 7):
        assert same_state(load_state(address, at_s=2.0 * step), at(make_state, step))
    # Every commit retires one more, and the writer collects it.
    monkeypatch.setattr(repository, "GRACE", timedelta(0))
    with Writer(address, keep=2) as committer:
        for step in (8, 9, 10):
            committer.commit(at(make_state, step), wait=True)
            assert kinds(store.objects(key_of(address)))["snapshots"] <= 4
    assert moments(address) == [18.0, 20.0]


def test_a_writer_that_may_not_list_or_delete_commits_all_the_same(make_state, same_state, store, address, monkeypatch):
    monkeypatch.setattr(repository, "GRACE", timedelta(0))
    refused = []

    def refuse(method: str, key: str) -> int | None:
        if method in ("POST", "DELETE") or (method == "GET" and not key):
            refused.append(method)
            return 403
        return None

    save_state(at(make_state, 0), address)
    store.before = refuse
    with Writer(address, keep=2) as committer:
        for step in (1, 2, 3):
            committer.commit(at(make_state, step), wait=True)
    assert refused
    assert same_state(load_state(address), at(make_state, 3))


def test_a_reader_whose_state_is_collected_meanwhile_reads_the_newer_one(make_state, same_state, address, monkeypatch):
    save_state(at(make_state, 1), address)
    real, steps = hierarchy.Hierarchy.tensors, iter((2,))

    def read_late(*arguments, **options):
        for step in steps:
            monkeypatch.setattr(repository, "GRACE", timedelta(0))
            save_state(at(make_state, step), address)
        return real(*arguments, **options)

    monkeypatch.setattr(hierarchy.Hierarchy, "tensors", read_late)
    assert load_state(address).clock.steps in (1, 2)


# Damaged, hostile, missing and unreachable repositories


def test_every_damaged_object_is_reported_or_does_no_harm(make_state, same_state, store, address):
    state = make_state(tensors={"near.keys": torch.randn(2, 3, 50, 7), "bank.mass": torch.arange(500)})
    save_state(state, address)
    harmed, kinds_seen = Counter(), set()
    for key, data in store.objects(key_of(address)).items():
        flipped = bytearray(data)
        flipped[len(flipped) // 2] ^= 0x55
        kind = key.split("/")[2]
        # The first object of a kind is damaged in every way, the others in one.
        for damage in (bytes(flipped), None, data[: len(data) // 2])[: 1 if kind in kinds_seen else 3]:
            store.delete(key) if damage is None else store.put(key, damage)
            errors = [error for read in READS if (error := failure(read, address)) is not None]
            if not errors:
                assert same_state(load_state(address), state)
            for error in errors:
                # Without its branch there is no repository.
                assert isinstance(error, StateCorrupt) or (isinstance(error, StateNotFound) and key.endswith(REF))
                assert "\n" not in error.message
                assert len(error.message) < 500
                harmed[kind] += 1
        store.put(key, data)
        kinds_seen.add(kind)
    assert set(harmed) == {"chunks", "manifests", "refs", "snapshots"}
    assert same_state(load_state(address), state)


def test_a_chunk_that_points_elsewhere_is_not_followed(make_state, address, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(4000))
    state = make_state(tensors={"near.step": torch.arange(500)})
    save_state(state, address)
    session = repository.open_repository(address).writable_session("main")
    session.store.set_virtual_ref(
        "near/step/c/0", f"file://{tmp_path}/secret", offset=0, length=4000, validate_container=False
    )
    session.commit("elsewhere")
    with pytest.raises(StateCorrupt):
        load_state(address)


def test_other_objects_are_neither_read_nor_overwritten(make_state, store, address):
    store.put(f"{key_of(address)}/notes.txt", b"mine")
    with pytest.raises(StateNotFound):
        load_state(address)
    with pytest.raises(StateError, match="no state of ours"):
        save_state(make_state(), address)
    assert list(store.objects(key_of(address)).values()) == [b"mine"]


def test_the_repository_of_somebody_else_is_left_alone(make_state, address):
    session = repository.make_repository(address).writable_session("main")
    zarr.open_group(session.store, mode="a").attrs["title"] = "sea temperatures"
    theirs = session.commit("theirs")
    for read in READS:
        with pytest.raises(StateCorrupt):
            read(address)
    for write in (check_target, lambda path: save_state(make_state(), path)):
        with pytest.raises(StateError, match="no state of ours"):
            write(address)
    assert repository.open_repository(address).lookup_branch("main") == theirs


@pytest.mark.parametrize("call", [load_state, check_target, moments])
@pytest.mark.parametrize(("bucket", "why"), [(BUCKET, "AccessDenied"), ("nobucket", "video: NoSuchBucket")])
def test_a_store_that_refuses_and_a_missing_bucket_are_one_clear_line(call, bucket, why, store):
    if bucket == BUCKET:
        store.before = lambda method, key: 403
    with pytest.raises(StateError, match=why) as caught:
        call(f"s3://{bucket}/video")
    assert "credentials" in caught.value.hint
    assert not isinstance(caught.value, (StateCorrupt, StateNotFound))


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_one_clear_line(monkeypatch, store):
    """Icechunk tries for half a minute."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StateError, match="Connection refused") as caught:
        load_state("s3://bucket/video")
    assert "network" in caught.value.hint


@pytest.mark.parametrize(
    "address", ["s3://bucket", "s3://bucket/", "ftp://host/a", "s3:///a", "memory://a", "s3://b/a?x=1", "file:///tmp/a"]
)
def test_an_address_that_names_no_place_is_refused(address, make_state):
    for call in (load_state, check_target, lambda path: save_state(make_state(), path)):
        with pytest.raises(StateError, match="does not name a place"):
            call(address)


def test_the_scheme_chooses_google_or_azure(monkeypatch):
    assert "GcsObjectStoreBackend(bucket=b, prefix=a/c)" in repr(repository.storage_of("gs://b/a/c/"))
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StateError, match="storage account"):
        repository.storage_of("az://b/a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    assert "AzureObjectStoreBackend(account=acc, container=b, prefix=a)" in repr(repository.storage_of("az://b/a"))
