"""Damaged and hostile files: one StateError each, or the state that was saved; never anything else."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protokv.core.digest import canonical, document_digest
from protokv.errors import StateCorrupt, StateError
from protokv.storage.api import load_state, read_header, save_state


@pytest.fixture(scope="module")
def good(make_state, tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "a.safetensors"
    save_state(make_state(), path)
    return path.read_bytes()


def parts(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def built(outer, body, *, seal=True):
    """A file of these parts, its inner digest made right again where `seal`."""
    if seal and "__metadata__" in outer:
        document = json.loads(outer["__metadata__"]["protokv"])
        document.pop("digest")
        document["digest"] = document_digest(document)
        outer = {**outer, "__metadata__": {"protokv": canonical(document)}}
    head = json.dumps(outer).encode()
    return len(head).to_bytes(8, "little") + head + body


def refused(path, data, match=None):
    path.write_bytes(data)
    with pytest.raises(StateError, match=match) as caught:
        load_state(path)
    assert "\n" not in caught.value.message
    assert caught.value.message.isascii() or str(path) in caught.value.message
    return caught.value


@st.composite
def mutations(draw, size):
    kind = draw(st.sampled_from(["flip", "cut", "insert", "remove", "overwrite", "repeat", "append"]))
    at = draw(st.integers(0, size - 1) | st.integers(0, min(size - 1, 1200)))
    some = draw(st.binary(min_size=1, max_size=16))
    return kind, at, some, draw(st.integers(0, 7))


def mutated(data, kind, at, some, bit):
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "insert":
        return data[:at] + some + data[at:]
    if kind == "remove":
        return data[:at] + data[at + len(some) :]
    if kind == "overwrite":
        return data[:at] + some + data[at + len(some) :]
    if kind == "repeat":
        return data[:at] + data[at : at + 40] + data[at:]
    return data + some


@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_file_is_refused_or_loads_equal(data, good, make_state, same_state, tmp_path):
    bytes_ = good
    for change in data.draw(st.lists(mutations(len(good)), min_size=1, max_size=3)):
        at = min(change[1], len(bytes_) - 1)
        if at < 0:
            break
        bytes_ = mutated(bytes_, change[0], at, *change[2:])
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes_)
    try:
        found = load_state(path)
    except StateError:
        return
    assert same_state(found, make_state())


def test_a_flipped_bit_anywhere_in_the_tensors_is_found_and_the_tensor_named(good, tmp_path):
    outer, body = parts(good)
    start = len(good) - len(body)
    for name, entry in outer.items():
        if name == "__metadata__":
            continue
        for at in range(*entry["data_offsets"], 7):
            error = refused(tmp_path / "a.safetensors", mutated(good, "flip", start + at, b"", at % 8), name)
            assert isinstance(error, StateCorrupt)


def test_a_flipped_bit_anywhere_in_the_header_is_found(good, make_state, same_state, tmp_path):
    length = int.from_bytes(good[:8], "little")
    for at in range(8 + length):
        path = tmp_path / "a.safetensors"
        path.write_bytes(mutated(good, "flip", at, b"", at * 5 % 8))
        try:
            found = load_state(path)
        except StateError:
            continue
        # What JSON does not care about: the padding, the case of an escape.
        assert same_state(found, make_state()), at


def test_every_cut_is_refused(good, tmp_path):
    for size in [*range(0, len(good), 5), *range(len(good) - 9, len(good))]:
        refused(tmp_path / "a.safetensors", good[:size])


def test_the_header_of_another_state_does_not_pass(good, make_state, tmp_path):
    save_state(make_state(seed=3), tmp_path / "b.safetensors")
    other = (tmp_path / "b.safetensors").read_bytes()
    body = parts(good)[1]
    refused(tmp_path / "a.safetensors", other[: -len(body)] + body, "not those that were saved")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2, 3, 12]},
        {"shape": [2, 3, -11]},
        {"shape": [2, 3, 1e1]},
        {"shape": [True, 3, 22]},
        {"shape": [2**62, 2**62, 0]},
        {"shape": [2**32, 2**32, 66]},
        {"shape": [1] * 100},
        {"shape": "2"},
        {"shape": [3, 2, 11]},
        {"shape": [3, 2, 11, 1]},
        {"dtype": "I32"},
        {"dtype": "F8_E4M3", "shape": [2, 3, 44]},
        {"dtype": "F4"},
        {"dtype": ["F32"]},
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [-264, 0]},
        {"data_offsets": [264, 0]},
        {"data_offsets": [0, 264]},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_an_entry_that_lies_is_refused(change, good, tmp_path):
    """Most of them by the library, which is what reads them."""
    outer, body = parts(good)
    outer["bank.mass"] = {**outer["bank.mass"], **change}
    assert isinstance(refused(tmp_path / "a.safetensors", built(outer, body)), StateCorrupt)


def test_missing_superfluous_and_overlapping_tensors_are_refused(good, tmp_path):
    path = tmp_path / "a.safetensors"
    outer, body = parts(good)
    refused(path, built({k: v for k, v in outer.items() if k != "warmup.keys"}, body), "digests")
    refused(path, built({**outer, "more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, body), "digests")
    refused(path, built({**outer, "more": outer["near.step"]}, body), "invalid offset")
    refused(path, built(outer, body + b"more"), "not fully covered|InComplete|incomplete")


def test_a_truth_value_that_is_neither_is_refused_although_its_digest_is_right(good, tmp_path):
    from protokv.core.digest import tensor_digest

    outer, body = parts(good)
    begin, end = outer["bank.alive"]["data_offsets"]
    body = body[:begin] + b"\x02" * (end - begin) + body[end:]
    document = json.loads(outer["__metadata__"]["protokv"])
    document["digests"]["bank.alive"] = tensor_digest("BOOL", (3,), torch.full((3,), 2, dtype=torch.uint8).numpy())
    outer["__metadata__"]["protokv"] = json.dumps(document)
    refused(tmp_path / "a.safetensors", built(outer, body), r"bank\.alive: a truth value")


HOSTILE = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'"text"',
    b"[" * 60000,
    b'{"a":' * 60000,
    b'{"__metadata__":{"protokv":"{}"}}',
    b'{"__metadata__":{"protokv":"[]"}}',
    b'{"__metadata__":{"protokv":"' + b"[" * 60000 + b'"}}',
    b'{"__metadata__":{"protokv":7}}',
    b'{"__metadata__":7}',
    b'{"__metadata__":{"protokv":"{}","protokv":"{}"}}',
    b'{"__metadata__":{"protokv":"{}"},"a":NaN}',
    b'{"__metadata__":{"protokv":"{}"},"a":1' + b"0" * 9000 + b"}",
    b'{"__metadata__":{"protokv":"\\ud800"}}',
    b'\xff\xfe{"a":1}',
    b'{"format":"pt"}',
]


@pytest.mark.parametrize("head", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_json_is_refused(head, tmp_path):
    refused(tmp_path / "a.safetensors", len(head).to_bytes(8, "little") + head)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory", {"a": [[[[[[[[[[[[1]]]]]]]]]]]]}),
        ("source", 5),
        ("complete", 1),
        ("created_by", None),
        ("clock", {}),
        ("clock", None),
        ("backbone", [1]),
        ("settings", None),
        ("format_version", "1"),
        ("format_version", 0),
        ("\x1b[31m\u202e\nevil", 1),
    ],
)
def test_a_sealed_header_with_wrong_fields_is_refused_with_the_field(field, value, good, tmp_path):
    outer, body = parts(good)
    document = json.loads(outer["__metadata__"]["protokv"])
    document["header"][field] = value
    outer["__metadata__"]["protokv"] = json.dumps(document)
    error = refused(tmp_path / "a.safetensors", built(outer, body), "evil" if "evil" in field else field)
    assert "\x1b" not in error.message


@pytest.mark.parametrize("other", [{}, {"dtype": "F64"}, {"shape": [1]}, {"data_offsets": [0, 8]}], ids=str)
def test_a_tensor_that_is_named_twice_is_one_of_them_or_refused(other, good, make_state, same_state, tmp_path):
    outer, body = parts(good)
    head, path = json.dumps(outer), tmp_path / "a.safetensors"
    twice = head[:-1] + ', "offset": ' + json.dumps({**outer["offset"], **other}) + "}"
    data = len(twice).to_bytes(8, "little") + twice.encode() + body
    if other:
        refused(path, data)
    else:
        path.write_bytes(data)
        assert same_state(load_state(path), make_state())


@pytest.mark.parametrize("length", [0, 1, 2**20 + 1, 2**31, 2**63, 2**64 - 1])
def test_a_lying_header_length_is_refused_without_allocating(length, good, tmp_path):
    tracemalloc.start()
    try:
        refused(tmp_path / "a.safetensors", length.to_bytes(8, "little") + good[8:])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_loading_takes_no_more_memory_than_the_file_has_bytes(make_state, tmp_path):
    path = tmp_path / "a.safetensors"
    save_state(make_state(tensors={"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20, dtype=torch.bool)}), path)
    tracemalloc.start()
    try:
        load_state(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size + (64 << 10)
    finally:
        tracemalloc.stop()


def test_a_plain_safetensors_file_is_said_to_be_no_state(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    for read in (load_state, read_header):
        with pytest.raises(StateCorrupt, match="no state"):
            read(tmp_path / "a.safetensors")


def test_a_pickle_and_a_pipe_are_refused_without_being_run(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "b.safetensors")
    for name in ("a.safetensors", "b.safetensors"):
        with pytest.raises(StateCorrupt):
            load_state(tmp_path / name)
