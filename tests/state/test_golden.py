"""States of every released format version load, keep their content."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.state.describe import describe
from protokv.state.digest import NAMES
from protokv.state.forms import load_forms
from protokv.state.header import FORMAT_VERSION, Header
from protokv.state.reader import read_header
from protokv.state.wall_clock import Gap, WallClockLog
from protokv.video import Damage, SourceInfo
from tests.state.golden.make import CONTENTS, FOLDER, STEPS, content

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


def test_the_page_names_every_field_and_every_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for record in (Header, BackboneIdentity, StreamClock, SourceInfo, Damage, WallClockLog, Gap):
        assert not [one.name for one in fields(record) if f"`{one.name}`" not in text], record
    assert f"version {FORMAT_VERSION}, the only one" in text
    assert all(f"`{name}`" in text for name in NAMES.values())
