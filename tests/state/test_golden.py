"""States of every released format version load, keep their content, and read as the page of the format says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import xxhash

from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.memories.durable.quantized import dequantize_centers
from protokv.state.describe import describe
from protokv.state.digest import NAMES
from protokv.state.forms import load_forms
from protokv.state.header import FORMAT_VERSION, Header, State
from protokv.state.reader import load_state, read_header
from protokv.state.wall_clock import Gap, WallClockLog
from protokv.state.writer import save_state
from protokv.video import Damage, SourceInfo
from tests.state.golden.make import CONTENTS, FOLDER, STEPS, content
from tests.state.reader import read

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "format.md"
HELD: dict[str, str] = json.loads(CONTENTS.read_text())


@pytest.mark.parametrize("name", HELD)
def test_a_state_of_any_version_passes_every_check_and_keeps_its_content(name):
    assert read_header(FOLDER / name).format_version == int(name[1 : name.index("-")])
    document = describe(FOLDER / name, values=True)
    assert document["stream"]["steps"] == STEPS
    assert len(document["verified"]) >= 3
    assert content(FOLDER / name) == HELD[name]


def test_the_current_version_has_small_files_of_every_form_but_pt():
    # A .pt is a pickle, so none is kept here. It has the header and the tensors of the other forms.
    assert {path.name for path in FOLDER.glob("v*")} == set(HELD)
    current = {Path(name).suffix for name in HELD if name.startswith(f"v{FORMAT_VERSION}-")}
    assert current == set(load_forms()) - {".pt"}, "raise FORMAT_VERSION and run python -m tests.state.golden.make"
    assert all(sum(f.stat().st_size for f in [p, *p.rglob("*")] if f.is_file()) < 100_000 for p in FOLDER.glob("v*"))


def check_reader(path: Path, state: State) -> None:
    """Compare what the reader of the page reads with a loaded state, and its digests with the bytes they are over."""
    found = read(str(path))
    assert found.header == state.to_json()
    assert hashlib.sha256(found.document[1]).hexdigest() == found.document[0]
    assert all(xxhash.xxh3_128_hexdigest(data) == digest for digest, data in found.sealed)
    assert sum(len(data) for _, data in found.sealed) >= sum(tensor.nbytes for tensor in state.tensors.values())
    assert found.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        kind, shape, numbers = found.tensors[name]
        assert (kind, shape) == (NAMES[tensor.dtype], list(tensor.shape))
        assert torch.tensor(numbers, dtype=tensor.dtype).reshape(shape).equal(tensor)


@pytest.mark.parametrize("name", HELD)
def test_a_reader_written_from_the_page_reads_what_the_library_loads(name: str) -> None:
    check_reader(FOLDER / name, load_state(FOLDER / name))


def test_centres_of_8_bits_are_what_the_page_makes_of_codes_and_exponents() -> None:
    path = FOLDER / "v1-durable.safetensors"
    state, tensors = load_state(path), read(str(path)).tensors
    for kind in ("key", "value"):
        codes, exponents = (tensors[f"bank.{kind}_{part}"] for part in ("codes", "exponents"))
        per_group = codes.shape[-1] // exponents.shape[-1]
        ours = [code * 2.0 ** exponents.numbers[i // per_group] for i, code in enumerate(codes.numbers)]
        theirs = dequantize_centers(state.tensors[f"bank.{kind}_codes"], state.tensors[f"bank.{kind}_exponents"])
        assert ours == theirs.flatten().tolist()


@pytest.mark.parametrize("suffix", [".safetensors", ".zarr"])
def test_that_reader_reads_every_type(suffix: str, make_state: Callable[..., State], tmp_path: Path) -> None:
    state, path = make_state(), tmp_path / f"a{suffix}"
    state.tensors.update({str(one).removeprefix("torch."): torch.arange(7).to(one) for one in NAMES})
    save_state(state, path)
    check_reader(path, state)


def test_the_page_names_every_field_and_every_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for record in (Header, BackboneIdentity, StreamClock, SourceInfo, Damage, WallClockLog, Gap):
        assert not [one.name for one in fields(record) if f"`{one.name}`" not in text], record
    assert f"version {FORMAT_VERSION}, the only one" in text
    assert all(f"`{name}`" in text for name in NAMES.values())
