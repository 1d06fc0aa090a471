"""A short procedural stream, shared."""

from __future__ import annotations

import pytest

from protokv.replay.streams import Pressure, WorldStream


@pytest.fixture(scope="session")
def stream() -> WorldStream:
    return WorldStream(11, 40, Pressure(12.0), per_type=1)
