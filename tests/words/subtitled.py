"""Clips with text tracks, made on the spot."""

from pathlib import Path

from tests.video.conftest import Clip, Said, write


def write_subtitled(
    path: Path,
    tracks: dict[str, Said],
    codec: str = "subrip",
    *,
    seconds: int = 6,
    late_ms: int = 0,
) -> Path:
    """Write a clip of five frames a second with a text track for each language; `late_ms` is the
    time stamp of its beginning.
    """
    ticks = [late_ms + 200 * n for n in range(5 * seconds)]
    clip = Clip(ticks, width=64, height=48, words=tracks, words_codec=codec)
    return write(clip, path)
