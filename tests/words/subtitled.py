"""Clips with text tracks, made on the spot."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.subtitles.subtitle import SubtitleSet

MS = Fraction(1, 1000)
HEADER = b"""[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name
Style: Default

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""

Said = Sequence[tuple[float, float, str]]


def write_subtitled(
    path: Path,
    tracks: dict[str, Said],
    codec: str = "subrip",
    *,
    seconds: int = 6,
    late_ms: int = 0,
) -> Path:
    """Write a clip of gray frames with a text track for each language; `late_ms` is the time stamp
    of its beginning.
    """
    with av.open(str(path), "w") as output:
        video: Any = output.add_stream("libx264", rate=5)
        video.width = 64
        video.height = 48
        video.pix_fmt = "yuv420p"
        video.time_base = video.codec_context.time_base = MS
        packets = []
        for language, said in tracks.items():
            text: Any = output.add_stream(codec)
            text.metadata["language"] = language
            text.time_base = text.codec_context.time_base = MS
            text.codec_context.subtitle_header = HEADER
            for n, (start_s, end_s, words) in enumerate(said):
                ass = f"{n},0,Default,,0,0,0,,{words}".encode()
                long_ms = round(1000 * (end_s - start_s))
                packet = text.codec_context.encode_subtitle(
                    SubtitleSet.create(ass, 0, long_ms, 0, 1)
                )
                packet.stream = text
                packet.time_base = MS
                packet.duration = long_ms
                packet.pts = packet.dts = late_ms + round(1000 * start_s)
                packets.append(packet)
        for n in range(5 * seconds):
            frame = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), 8 * n, np.uint8), "rgb24"
            ).reformat(format="yuv420p")
            frame.pts = late_ms + 200 * n
            frame.time_base = MS
            packets += video.encode(frame)
        packets += video.encode(None)
        output.mux(sorted(packets, key=lambda packet: packet.dts * packet.time_base))
    return path
