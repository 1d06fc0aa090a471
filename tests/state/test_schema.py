"""The header: every field is checked, and the bytes of the format do not change."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from protokv.errors import StateCorrupt, StateError, StateMismatch
from protokv.state.api import load_state, save_state
from protokv.state.snapshot import Header


def test_the_bytes_of_the_format_do_not_change_unnoticed(make_state, tmp_path):
    tensors = {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_state(make_state(created_by="protokv test", tensors=tensors), tmp_path / "a.safetensors")
    digest = hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    assert digest == "a2116e7aa6f9d13813cbc74fdd49c4ae47fdba0d7d49cdc8e84dc8aafdb1636e"


def test_an_unknown_form_is_refused(make_state, tmp_path):
    for name in ["a.npz", "a.zip", "a", "zarr"]:
        with pytest.raises(StateError, match="safetensors"):
            save_state(make_state(), tmp_path / name)


def test_a_folder_is_no_state(tmp_path):
    with pytest.raises(StateCorrupt, match="folder"):
        load_state(tmp_path)


def fields(good):
    """Yield a copy of the header, an object in it and the name of a field, for every field that is checked."""

    def walk(data, path=()):
        for key, value in data.items():
            yield (*path, key)
            if isinstance(value, dict):
                yield from walk(value, (*path, key))

    for *outer, name in walk(good):
        if (outer or [name])[0] not in ("memory", "source", "settings"):
            place = copy = json.loads(json.dumps(good))
            for key in outer:
                place = place[key]
            yield copy, place, name


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "text", [], {}, 2**70, float("inf")])
def test_a_field_of_a_wrong_type_is_named(wrong, make_state):
    refused = 0
    for bad, place, name in fields(make_state().to_json()):
        number = name in ("stream_time_s", "fps") and wrong == 2**70
        if number or type(place[name]) is type(wrong) or (type(wrong) is float and wrong > 0):
            continue
        place[name] = wrong
        with pytest.raises((StateCorrupt, StateMismatch), match=name):
            Header.from_json(bad)
        refused += 1
    assert refused or isinstance(wrong, float)


def test_a_missing_or_unknown_field_is_named(make_state):
    good = make_state().to_json()
    for bad, place, name in fields(good):
        del place[name]
        with pytest.raises(StateCorrupt, match=name):
            Header.from_json(bad)
    with pytest.raises(StateCorrupt, match="novel"):
        Header.from_json({**good, "novel": 1})
