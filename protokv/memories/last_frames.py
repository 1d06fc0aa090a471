"""`LastFramesMemory`: a question sees the last N steps and nothing older. The baseline without
memory.

Source: SimpleStream (EvolvingLMMs-Lab, 2026), arXiv 2604.02317, which gives the last N frames (4 by
default) and the question to the plain model. The same: an answer depends on the prompt prefix and
the last N steps alone. What differs: the source encodes the N frames anew for each question, and a
frame sees those before it. A memory gets keys once, when a step arrives; so here a step is encoded
after the prompt prefix alone (`context`), and steps meet when a question reads them (`recall`).
With N = 1 both are equal; with `recent_frames` of the same frames this is the source.
`SlidingWindow` with a budget of N steps encodes a step after the window, so its keys carry older
steps into it. `samples/studies/delay/` measures how near both come to the source.

With `positions="compact"` a step is encoded and read directly after the prompt prefix, as in the
source, except for the temporal positions that sampling leaves out between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from torch import Tensor

from protokv.core.context import Context, PositionFacts, SlotContext
from protokv.core.near import NearWindow
from protokv.core.settings import MOST_BUDGET, MemoryConfig
from protokv.core.slots import KVSlots
from protokv.memories.window import SlidingWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFramesConfig(MemoryConfig):
    """The last steps and nothing else.

    Attributes:
        last_steps: N, the steps that a question sees; fewer if N steps exceed the budget.
    """

    name: ClassVar[str] = "last-frames"

    last_steps: Annotated[int, 1, MOST_BUDGET] = 4


class LastFramesMemory(SlidingWindow[LastFramesConfig]):
    """The last N whole steps that fit the budget; of a step larger than the budget, its last
    tokens.
    """

    one_by_one = True

    def _allocate(self, capacity: int) -> tuple[KVSlots, NearWindow]:
        slots = KVSlots(self._shape, far=0, near=capacity)
        return slots, NearWindow(
            slots, self._shape.position_components, steps=self._config.last_steps
        )

    def context(self) -> Context:
        """Return the prompt prefix alone."""
        everything = self._slots.context(self._near.positions)
        sink = slice(0, everything.far.start)
        return _PrefixContext(
            everything.keys[:, :, sink],
            everything.values[:, :, sink],
            everything.bias[:, :, sink],
            slice(sink.stop, sink.stop),
            lambda: everything.positions()[:, :, sink],
            newest=lambda: (
                int(self._near.positions[self._near.step >= 0, 0].max()) if len(self._near) else -1
            ),
        )

    def recall(self) -> Context:
        """Return the prompt prefix and the last steps."""
        return super().context()


@dataclass(frozen=True, slots=True)
class _PrefixContext(SlotContext):
    """The prompt prefix. Compact, a new step stands after it as if the stream began there."""

    # returns the time of the newest token of the stream, -1 before the first
    newest: Callable[[], int] = lambda: -1
    shift: int = 0

    def far_span(self) -> int:
        """Return 0: no token is older than the shown ones."""
        return 0

    def compact(self, anchoring: PositionFacts, span: int | Tensor | None = None) -> _PrefixContext:
        """Return the same slots, shifted so that the token after the newest one comes first."""
        return replace(self, shift=max(0, self.newest() + 1 - anchoring.origin))


LastFramesConfig.memory = LastFramesMemory
