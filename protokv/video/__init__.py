"""Read video: one `Source` for every kind of input, and the steps that a model is fed with.

`open_source` opens a source; `sample` and `group_steps` turn its frames into steps by time stamps. Frames are numpy
arrays. Knows no models and no memory, and imports a decoder only when it is needed.
"""

from __future__ import annotations

from protokv.video.registry import Decoder, open_source
from protokv.video.sampling import Step, group_steps, read_steps, sample
from protokv.video.source import Damage, Frame, Source, SourceInfo

__all__ = [
    "Damage", "Decoder", "Frame", "Source", "SourceInfo", "Step", "group_steps", "open_source", "read_steps",
    "sample",
]  # fmt: skip
