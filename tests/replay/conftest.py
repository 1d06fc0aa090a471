"""A short procedural stream, shared."""

from __future__ import annotations

import pytest

from protokv.replay.streams import Distractors, WorldStream


@pytest.fixture(scope="session")
def stream() -> WorldStream:
    return WorldStream(11, 40, Distractors(12.0), per_type=1)
