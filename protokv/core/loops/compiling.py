"""`compiled`: how loops are compiled. Knows nothing of what they do.

What is done for every pair or number stands in the loop itself, though it be written twice: a call that is handed
arrays counts their references, which takes longer than the arithmetic here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])

# Sums in any order, and products added in one go: numbers are then added a vector at a time. Infinities stay what they
# are.
_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def compiled(loop: Loop) -> Loop:
    """The loop, compiled when it is first called with such arguments and kept in numba's cache: beside its file, or in
    the user's folder. Python's other threads run meanwhile. What is written is what is computed, in this order."""
    return _compile(loop, fastmath=False)


def compiled_in_any_order(loop: Loop) -> Loop:
    """The same, with sums in an order that the CPU likes; on one CPU it is always the same."""
    return _compile(loop, fastmath=_IN_ANY_ORDER)


def _compile(loop: Loop, **options: Any) -> Loop:
    made: Loop = numba.njit(nogil=True, error_model="numpy", **options)(loop)
    # Where there is no folder that may be written to, each process compiles anew.
    with suppress(RuntimeError):
        made.enable_caching()  # type: ignore[attr-defined]
    return made
