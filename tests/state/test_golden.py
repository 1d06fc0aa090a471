"""The bytes of the format do not change unnoticed, and its page names everything that is in them."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.state.digest import NAMES
from protokv.state.header import FORMAT_VERSION, Header
from protokv.state.wall_clock import Gap, WallClockLog
from protokv.state.writer import save_state
from protokv.video import Damage, SourceInfo

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "format.md"

# With another version of the format the digests are other ones. Libraries decide on the bytes of a .pt and a zarr.json.
DIGESTS = {".safetensors": "0e4c71544dccc093", ".zarr": "2cd96f8f6ecc3635"}


@pytest.mark.parametrize("suffix", DIGESTS)
def test_the_bytes_of_the_format_do_not_change_unnoticed(suffix, make_state, tmp_path):
    tensors = {str(dtype).removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype) for dtype in NAMES}
    path = tmp_path / f"a{suffix}"
    save_state(make_state(created_by="protokv test", tensors=tensors), path)
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("c.*")):
        found.update(file.name.encode() + file.read_bytes())
    assert found.hexdigest()[:16] == DIGESTS[suffix]


def test_the_page_names_every_field_and_every_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for record in (Header, BackboneIdentity, StreamClock, SourceInfo, Damage, WallClockLog, Gap):
        assert not [one.name for one in fields(record) if f"`{one.name}`" not in text], record
    assert f"version {FORMAT_VERSION}, the only one" in text
    assert all(f"`{name}`" in text for name in NAMES.values())
