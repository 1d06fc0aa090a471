"""Read video: one `Source` for every kind of input, and the steps that a model is fed with.

`open_source` opens a source; `sample_frames` and `group_frames` turn its frames into steps by
times. Frames are numpy arrays. Knows no models and no memory, and imports a decoder only when it is
needed.
"""

from __future__ import annotations

from protokv.video.registry import Decoder, open_source
from protokv.video.sampling import VideoStep, group_frames, read_steps, sample_frames
from protokv.video.source import Frame, Source, SourceDamage, SourceInfo

__all__ = [
    "Decoder",
    "Frame",
    "Source",
    "SourceDamage",
    "SourceInfo",
    "VideoStep",
    "group_frames",
    "open_source",
    "read_steps",
    "sample_frames",
]
