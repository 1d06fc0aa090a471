"""How many prototypes there may be, and how much is done at once: a CPU works through a few thousand rows that stay in
its cache, any other device all rows.

Results are the same whichever it is: every row stands for itself, and sums are of whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from protokv.parts import cut

SLOT_BITS = 20
"""A bank has fewer prototypes than 2 to this power."""
# Rows of a sketch with their costs: about two megabytes.
_ROWS = 1024


def parts_of(rows: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Slices that make up `rows`; all but the last hold a multiple of `multiple` rows."""
    return cut(rows, max(1, _ROWS // multiple) * multiple, device)
