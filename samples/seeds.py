"""Disjoint ranges of seeds of procedural worlds, so that nothing is measured on worlds that it was
made with.

| range | for |
|---|---|
| DEMONSTRATION | samples, examples and the small studies that anybody runs for a first look |
| CARD | the held-out worlds of the model card, which also draws from beyond all ranges |
| ORDER_CARD, TIME_CARD | parts of CARD: its worlds of order and of time |
| DEVELOPMENT | trying out rules, and fitting, for example `protokv.stream.evidence` |
| STUDY | reported figures only |

The embedded models were trained on clips from generators that no world uses: the second word of
their seeds is 11, which is not in `WORLD_STREAMS`.
"""

from __future__ import annotations

from typing import Final

DEMONSTRATION: Final = range(1_000)
CARD: Final = range(1_000_000, 4_000_000)
ORDER_CARD: Final = range(3_400_000, 3_410_000)
TIME_CARD: Final = range(3_410_000, 3_420_000)
DEVELOPMENT: Final = range(4_000_000, 5_000_000)
STUDY: Final = range(5_000_000, 6_000_000)

RANGES: Final = {
    "demonstration": DEMONSTRATION,
    "card": CARD,
    "development": DEVELOPMENT,
    "study": STUDY,
}

WORLD_STREAMS: Final = frozenset((*range(1, 10), 30))
"""The second words of the seeds of generators for worlds and questions; the first word is the
world's seed.
"""
