"""`RecentSteps`: the last steps of a session as the vision tower gave them; it has none unless
`recent_frames` says so.

A question reads these steps again after the memory, in place of the tokens that the memory has of
them, as in DSCache (arXiv 2605.01858) and SimpleStream (arXiv 2604.02317). The memory sees
everything as without this; for a question its exact tokens and prototypes of one token from the
time of these steps are hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.packing import check_tensor_shapes
from protokv.core.settings import MemoryConfig
from protokv.core.step import StepTokens
from protokv.core.tensors import MemoryShape, Specs, TensorDict, Tensors
from protokv.errors import ConfigError, StateCorrupt


class RecentSteps:
    """The last N steps, each with its stream positions `[T, P]`; saved as one, with a row of
    numbers for each.
    """

    def __init__(self, config: MemoryConfig, shape: MemoryShape) -> None:
        """Keep the steps of the last `recent_frames` of a config. ConfigError: its memory does not
        go with that.
        """
        if config.recent_frames and config.memory.retrieves:
            raise ConfigError(
                f"recent_frames: {config.name} chooses by the first forward, which must be that of "
                "the question",
                hint="use another memory, or leave recent_frames out",
            )
        self._shape = shape
        self.steps: deque[tuple[StepTokens, Tensor]] = deque(
            maxlen=-(-config.recent_frames // shape.frames_per_step)
        )

    def hide(self, context: Context) -> Context:
        """Return a context without the time of these steps."""
        return context.before(int(self.steps[0][1][:, 0].min())) if self.steps else context

    def specs(self) -> Specs:
        """Declare tokens, positions and rows of numbers, where steps are kept."""
        if not self.steps.maxlen:
            return ()
        declare = self._shape.axes(
            recent_token=None,
            embedding=None,
            recent_step=None,
            field=5,
            vision_layer=None,
            recent_visual_token=None,
        ).declare
        dtype = self._shape.dtype
        i64 = torch.int64
        deep = "vision_layer recent_visual_token embedding"
        added = "what is added to their visual tokens in the first layers"
        numbers = "tokens, rows, columns, first visual token, the one after the last"
        places = "their stream positions"
        read = "steps as the model reads them"
        return (
            declare("recent.embeddings", "recent_token embedding", dtype, read),
            declare("recent.positions", "recent_token component", i64, places, "position"),
            declare("recent.steps", "recent_step field", i64, numbers),
            declare("recent.deepstack", deep, dtype, added, optional=True),
        )

    def tensors(self) -> TensorDict:
        """Return all of them."""
        if not self.steps:
            return {
                spec.name: spec.allocate(torch.device("cpu"))
                for spec in self.specs()
                if not spec.optional
            }
        tokens, positions = zip(*self.steps, strict=True)
        found = {
            "recent.embeddings": torch.cat([one.embeddings for one in tokens]),
            "recent.positions": torch.cat(positions),
            "recent.steps": torch.tensor(
                [[len(one), *one.grid, *one.visual_span] for one in tokens]
            ),
        }
        deep = [one.deepstack for one in tokens if one.deepstack is not None]
        return found | ({"recent.deepstack": torch.cat(deep, 1)} if deep else {})

    def load(self, tensors: Tensors) -> None:
        """Take the steps of a state. StateCorrupt: the rows do not divide the tokens into steps, or
        tensors differ.
        """
        check_tensor_shapes(tensors, self.specs())
        if not tensors:
            return
        own = {name: tensor.to(self._shape.device, copy=True) for name, tensor in tensors.items()}
        rows = own.pop("recent.steps").tolist()
        deep = own.get("recent.deepstack")
        visual = [last - first for *_, first, last in rows]
        sound = sum(row[0] for row in rows) == len(own["recent.embeddings"])
        sound &= deep is None or sum(visual) == deep.shape[1]
        if not sound or not all(0 <= first < last <= length for length, _, _, first, last in rows):
            raise StateCorrupt("state: tensor recent.steps does not agree with the recent tokens")
        lengths = [row[0] for row in rows]
        embeddings = torch.split(own["recent.embeddings"], lengths)
        positions = torch.split(own["recent.positions"], lengths)
        added: Sequence[Tensor | None] = (
            [None] * len(rows) if deep is None else torch.split(deep, visual, 1)
        )
        for index, (_, height, width, first, last) in enumerate(rows):
            grid = (height, width)
            step = StepTokens(embeddings[index], grid, slice(first, last), added[index])
            self.steps.append((step, positions[index]))
