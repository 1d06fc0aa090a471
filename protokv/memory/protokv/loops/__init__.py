"""Loops over single numbers, compiled for a CPU: what vectors do in rounds and passes, done one after the other.

They serve where numba is installed (the extra `compiled`) and the numbers are in the memory of the host; elsewhere
tensor operations do the same, and are what the loops are tested against. Owns who is served; knows nothing of what the
loops do. Modules in here import numba, so they are imported where they serve.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from protokv.memory.sorting import has_data_here


def serve(tensor: Tensor) -> bool:
    """Whether loops may go over the numbers of this tensor. `NUMBA_DISABLE_JIT=1`, numba's own switch, turns them off:
    they would be run by Python."""
    return has_data_here(tensor) and _is_installed() and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")


@cache
def _is_installed() -> bool:
    return find_spec("numba") is not None
