"""States of every released format version load, pass every check and keep their content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protokv.core.snapshot import FORMAT_VERSION
from protokv.inspection.states import describe
from protokv.storage.api import read_header
from protokv.storage.form import FORMS
from tests.storage.golden.make import CONTENTS, FOLDER, STEPS, content

HELD: dict[str, str] = json.loads(CONTENTS.read_text())


@pytest.mark.parametrize("name", HELD)
def test_a_state_of_any_version_passes_every_check_and_keeps_its_content(name):
    assert read_header(FOLDER / name).format_version == int(name[1 : name.index("-")])
    document = describe(FOLDER / name, values=True)
    assert document["stream"]["steps"] == STEPS
    assert len(document["verified"]) >= 6
    assert content(FOLDER / name) == HELD[name]


def test_the_current_version_has_small_files_of_every_form_but_pt():
    # A .pt is a pickle, so none is kept here. It has the header and the tensors of the other forms.
    assert {path.name for path in FOLDER.glob("v*")} == set(HELD)
    current = {Path(name).suffix for name in HELD if name.startswith(f"v{FORMAT_VERSION}-")}
    assert current == set(FORMS) - {".pt"}, "raise FORMAT_VERSION and run python -m tests.storage.golden.make"
    assert all(sum(f.stat().st_size for f in [p, *p.rglob("*")] if f.is_file()) < 100_000 for p in FOLDER.glob("v*"))
