"""One object has what the commands show of a state, and asks it; the page of the format names all that is in one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.errors import StateNotFound
from protokv.ingestion import Every, ingest_events
from protokv.memories import MemoryConfig
from protokv.state.header import FORMAT_VERSION, NAMES, Header
from protokv.state.reader import Reader
from protokv.state.sources import Gap, WallClockLog
from protokv.video import Damage, SourceInfo
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "format.md"


def test_a_reader_tells_what_a_state_is_and_asks_any_of_its_commits(tmp_path: Path) -> None:
    path, config = tmp_path / "a.safetensors", MemoryConfig.of("sliding-window", budget=40)
    list(ingest_events(Prepared(1, 6), path, config, backbone=MockBackbone(), every=Every(n_steps=2), keep=2))
    reader = Reader.open(path)
    assert reader.model == reader.header.backbone.name
    assert reader.wall_clocks == reader.transcript.lines == []
    assert reader.commits_s == [2.0, reader.header.clock.stream_time_s]
    assert reader.file_bytes == path.stat().st_size
    past = reader.at(reader.commits_s[0])
    for one, time_s in zip((past, reader), reader.commits_s, strict=True):
        session = one.session(MockBackbone())
        assert session.clock.stream_time_s == time_s
        assert session.ask("what is first ?").stream_time_s == time_s
    with pytest.raises(StateNotFound, match="no commit at or before 0 s"):
        reader.at(0.0).session(MockBackbone())


def test_the_page_of_the_format_names_every_field_and_every_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for record in (Header, BackboneIdentity, StreamClock, SourceInfo, Damage, WallClockLog, Gap):
        assert not [one.name for one in fields(record) if f"`{one.name}`" not in text], record
    assert f"version {FORMAT_VERSION}, the only one" in text
    assert all(f"`{name}`" in text for name in NAMES.values())
