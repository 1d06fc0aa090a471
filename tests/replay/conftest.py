"""A short procedural stream, shared."""

from __future__ import annotations

import pytest

from protokv.replay.worlds import Worlds, WorldStream


@pytest.fixture(scope="session")
def stream() -> WorldStream:
    return WorldStream(11, Worlds(length_s=30, distractor_rate=12.0, before=0, per_type=1))
