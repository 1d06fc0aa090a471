"""The front door: one object has what the commands show of a state, and asks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv.errors import StateNotFound
from protokv.ingestion import Every, ingest
from protokv.memories import MemoryConfig
from protokv.state.reader import Reader
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    config = MemoryConfig.of("sliding-window", budget=40)
    list(ingest(Prepared(1, 6), path, config, backbone=MockBackbone(), every=Every(n_steps=2), keep=2))
    return path


def test_a_reader_tells_what_a_state_is_and_asks_any_of_its_commits(path: Path) -> None:
    reader = Reader.open(path)
    assert (reader.config.budget, reader.model) == (40, reader.header.backbone.name)
    assert [one["complete"] for one in reader.sources] == [True]
    assert reader.wall_clocks == []
    assert reader.commits_s == [2.0, reader.header.clock.stream_time_s]
    assert reader.file_bytes == path.stat().st_size
    assert reader.transcript.lines == []
    past = reader.at(reader.commits_s[0])
    for one, time_s in zip((past, reader), reader.commits_s, strict=True):
        session = one.session(MockBackbone())
        assert session.clock.stream_time_s == time_s
        assert session.ask("what is first ?").stream_time_s == time_s
    with pytest.raises(StateNotFound, match="no commit at or before 0 s"):
        reader.at(0.0).session(MockBackbone())
