"""The header: every field checked, the format's bytes and versions, and whether a state fits a model."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from protokv.core.snapshot import Header
from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound
from protokv.storage.api import load_state, save_state


def test_the_bytes_of_the_format_do_not_change_unnoticed(make_state, tmp_path):
    tensors = {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_state(make_state(created_by="protokv test", tensors=tensors), tmp_path / "a.safetensors")
    digest = hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    assert digest == "a2116e7aa6f9d13813cbc74fdd49c4ae47fdba0d7d49cdc8e84dc8aafdb1636e"


def test_only_the_forms_that_there_are_can_be_asked_for(make_state, tmp_path):
    for name in ["a.npz", "a.zip", "a", "zarr"]:
        with pytest.raises(StateError, match="safetensors"):
            save_state(make_state(), tmp_path / name)


def test_a_missing_state_is_not_found_and_a_folder_is_no_state(tmp_path):
    for path in [tmp_path / "no.safetensors", tmp_path / "no" / "no.safetensors"]:
        with pytest.raises(StateNotFound, match=r"no\.safetensors"):
            load_state(path)
    with pytest.raises(StateCorrupt, match="folder"):
        load_state(tmp_path)


def walk(data, path=()):
    yield path, data
    if isinstance(data, dict):
        for key, value in data.items():
            yield from walk(value, (*path, key))


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "text", [], {}, 2**70, float("inf")])
def test_a_field_of_a_wrong_type_is_named(wrong, make_state):
    good = make_state().to_json()
    checked = [p for p, _ in walk(good) if p and p[0] not in ("memory", "source", "settings")]
    refused = 0
    for path in checked:
        bad = json.loads(json.dumps(good))
        place = bad
        for key in path[:-1]:
            place = place[key]
        if type(place[path[-1]]) is type(wrong) or (type(wrong) is float and wrong > 0):
            continue
        place[path[-1]] = wrong
        if path[-1] in ("stream_time_s", "fps") and wrong == 2**70:
            continue
        with pytest.raises((StateCorrupt, StateMismatch), match=path[-1]):
            Header.from_json(bad)
        refused += 1
    assert refused or isinstance(wrong, float)


def test_a_missing_or_unknown_field_is_named(make_state):
    good = make_state().to_json()
    for path in [p for p, _ in walk(good) if p and p[0] not in ("memory", "source", "settings")]:
        bad = json.loads(json.dumps(good))
        place = bad
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        with pytest.raises(StateCorrupt, match=path[-1]):
            Header.from_json(bad)
    with pytest.raises(StateCorrupt, match="novel"):
        Header.from_json({**good, "novel": 1})
