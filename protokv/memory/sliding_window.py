"""`SlidingWindow`: the last |M| visual tokens, exact, behind the prompt prefix. The baseline "SWA" of the ProtoKV paper
(arXiv 2606.26762).

The whole budget is the near window of `near`; what leaves it is forgotten.
"""

from __future__ import annotations

from protokv.memory.exact import ExactMemory


class SlidingWindow(ExactMemory):
    """W = budget exact tokens, whole steps leaving oldest first."""
