"""These tests run on deterministic kernels, with poisoned allocations."""

from __future__ import annotations

from collections.abc import Iterable

from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.memories import MemoryConfig
from tests.conftest import random_frames
from tests.deterministic import _memory_that_is_not_written_holds_nan

__all__ = ["_memory_that_is_not_written_holds_nan"]


def watched(backbone: Backbone, config: MemoryConfig, frames: Iterable[int]) -> Session:
    """Return a session that watched random frames of these seeds."""
    session = Session.start(backbone, config)
    for frame in frames:
        session.watch(random_frames(frame))
    return session
