"""Reading video: one `Source` for every decoder, and the steps that a model is fed with.

`open_source` chooses the decoder; `sample` and `steps` go from frames to steps by timestamps. Frames are numpy
arrays; nothing here knows of models or memory, and nothing is decoded or imported before it is needed.
"""

from __future__ import annotations

import os
from typing import Literal

from protokv.errors import ConfigError, SourceUnreadable
from protokv.video.sampling import Sample, Step, read_steps, sample, steps
from protokv.video.source import Damage, Frame, Source, SourceInfo

__all__ = [
    "Damage",
    "Decoder",
    "Frame",
    "Sample",
    "Source",
    "SourceInfo",
    "Step",
    "open_source",
    "read_steps",
    "sample",
    "steps",
]

Decoder = Literal["auto", "decord", "pyav"]


def open_source(path: str | os.PathLike[str], decoder: Decoder = "auto") -> Source:
    """Open a video file.

    `auto` is decord where it is installed and known to read such a file, PyAV otherwise; `decord` and `pyav`
    ask for one. Whichever is used, frames and times are the same.

    Raises:
        SourceNotFound: Nothing is there.
        SourceUnreadable: No video can be read from it, or not by this decoder.
        ConfigError: There is no such decoder.
    """
    from protokv.video.container import probe
    from protokv.video.decord_source import DecordSource, unsuited
    from protokv.video.pyav_source import PyAVSource

    if decoder not in ("auto", "decord", "pyav"):
        raise ConfigError(f"expected the decoder auto, decord or pyav, got {decoder!r}")
    found = probe(path)
    if decoder == "pyav" or (decoder == "auto" and unsuited(found)):
        return PyAVSource(found)
    try:
        return DecordSource(found)
    except SourceUnreadable:
        if decoder == "decord":
            raise
        return PyAVSource(found)
