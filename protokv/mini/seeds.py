"""Which seeds of procedural worlds are for what: disjoint ranges, so that nothing is measured on what it was made with.

| range | for |
|---|---|
| DEMONSTRATION | samples, examples and the small studies that anybody runs for a first look |
| CARD | the held-out worlds of the model card, which are drawn from beyond all ranges too |
| ORDER_CARD, TIME_CARD | parts of CARD: the worlds of the card's tables of order, and of what happens over time |
| DEVELOPMENT | trying out rules, and fitting, such as the layers and shares of `protokv.extras.evidence` |
| STUDY | reported figures, and nothing else |

Training renders no world of any seed: its clips are drawn by generators that no world uses (`TRAINING_STREAM`).
"""

from __future__ import annotations

from typing import Final

DEMONSTRATION: Final = range(1_000)
CARD: Final = range(1_000_000, 4_000_000)
ORDER_CARD: Final = range(3_400_000, 3_410_000)
TIME_CARD: Final = range(3_410_000, 3_420_000)
DEVELOPMENT: Final = range(4_000_000, 5_000_000)
STUDY: Final = range(5_000_000, 6_000_000)

RANGES: Final = {"demonstration": DEMONSTRATION, "card": CARD, "development": DEVELOPMENT, "study": STUDY}

WORLD_STREAMS: Final = frozenset(range(1, 9))
"""The second word of the seed of every generator that makes a world or its questions; the first is the world's own."""
TRAINING_STREAM: Final = 11
"""The second word of the seed of the generators that draw training clips."""
