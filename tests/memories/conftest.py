"""These tests run on deterministic kernels, with poisoned allocations."""

from tests.deterministic import _memory_that_is_not_written_holds_nan

__all__ = ["_memory_that_is_not_written_holds_nan"]
