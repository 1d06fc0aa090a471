"""States of every format version, written by the code of that version, load for ever and hold what they held."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from protokv.core.digest import canonical, raw, tensor_digest
from protokv.core.snapshot import FORMAT_VERSION
from protokv.inspection.describe import describe
from protokv.storage.api import load, read_header, save
from protokv.storage.form import FORMS

FOLDER = Path(__file__).parent / "golden"

# What each holds: the header but for its version, and every tensor with its name, dtype, shape and bytes. States of
# one memory have one content in every form. Version 2 has more settings, and draws at random in another way; version 3
# differs in its digests alone.
CONTENTS = {
    "v1-durable.safetensors": "8d57988307452cca",
    "v1-paper.safetensors": "e3b94f491cd647dc",
    "v2-continuity.safetensors": "555158a74b9ccd85",
    "v2-durable.safetensors": "10eeca89eeecfcbf",
    "v2-paper.safetensors": "639c7273d5a69901",
    "v2-sliding-window.safetensors": "896e8e5a517b68a9",
    "v3-continuity.safetensors": "3d972900f20c436b",
    "v3-durable.safetensors": "a33ff3f187dde3cb",
    "v3-paper.safetensors": "4003c5a1f0b48411",
    "v3-sliding-window.safetensors": "c946b8b5ff09d84e",
    "v3-sliding-window.zarr": "c946b8b5ff09d84e",
}


def content(path: Path) -> str:
    """Digest of all that a state holds."""
    state = load(path)
    header = {name: value for name, value in state.to_json().items() if name not in ("format_version", "created_by")}
    tensors = {
        name: tensor_digest(str(tensor.dtype), tuple(tensor.shape), raw(tensor), 1)
        for name, tensor in state.tensors.items()
    }
    return hashlib.sha256(canonical({"header": header, "tensors": tensors}).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", CONTENTS)
def test_a_state_of_any_version_loads_and_holds_what_it_held(name):
    path = FOLDER / name
    assert read_header(path).format_version == int(name[1 : name.index("-")])
    assert load(path).format_version == FORMAT_VERSION
    assert content(path) == CONTENTS[name]


@pytest.mark.parametrize("name", CONTENTS)
def test_a_state_of_any_version_passes_every_check(name):
    document = describe(FOLDER / name, values=True)
    assert document["stream"]["steps"] == 14
    assert len(document["verified"]) >= 6


def test_no_golden_state_is_left_out_and_the_current_version_is_there_in_every_form_but_pt():
    # A .pt is a pickle, if a harmless one, and none is kept here. Its header and tensors are those of the other forms.
    assert {path.name for path in FOLDER.glob("v*")} == set(CONTENTS)
    current = {Path(name).suffix for name in CONTENTS if name.startswith(f"v{FORMAT_VERSION}-")}
    assert current == set(FORMS) - {".pt"}, "raise FORMAT_VERSION and run python -m tests.snapshot.golden.make"
    assert all(sum(f.stat().st_size for f in [p, *p.rglob("*")] if f.is_file()) < 100_000 for p in FOLDER.glob("v*"))


def test_the_generator_of_version_1_is_left_out():
    assert b'"bank.generator"' in (FOLDER / "v1-paper.safetensors").read_bytes()
    assert "bank.generator" not in load(FOLDER / "v1-paper.safetensors").tensors


@pytest.mark.parametrize("suffix", FORMS)
def test_a_migrated_state_is_saved_as_the_newest_version(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    save(load(FOLDER / "v1-paper.safetensors"), path)
    assert read_header(path).format_version == FORMAT_VERSION
    assert content(path) == CONTENTS["v1-paper.safetensors"]
