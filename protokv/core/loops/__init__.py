"""Loops over single numbers, compiled for a CPU: what vectors do in rounds and passes, done one after the other.

They serve banks that are large enough for it to pay, where numba is installed (the extra `compiled`) and the numbers
are in the memory of the host. Elsewhere tensor operations do the same, and are what the loops are tested against. Owns
who is served; knows nothing of what the loops do. Modules in here import numba, so they are imported where they serve.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from protokv.core.arrays import has_data_here

# Prototypes of a head. Starting the loops takes half a second of a process, which smaller banks hardly make up for.
LEAST = 128


def serve(mass: Tensor, *, start: bool = True) -> bool:
    """Whether loops serve a bank, told by what it holds of each prototype, `[..., K]`.

    `NUMBA_DISABLE_JIT=1`, numba's own switch, turns them off: Python would run them. Who computes once, as a question
    does, does not `start` them: it is served where others have.
    """
    return (
        mass.shape[-1] >= LEAST
        and has_data_here(mass)
        and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
        and (_is_installed() if start else "numba" in sys.modules)
    )


@cache
def _is_installed() -> bool:
    return find_spec("numba") is not None
