"""Small clips made on the spot, the frame number burnt into the picture as 16 black or white
blocks.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.subtitles.subtitle import SubtitleSet
from numpy.typing import NDArray

MakeClip = Callable[..., Path]
Said = Sequence[tuple[float, float, str]]  # beginning and end in seconds, and the words

ROWS = 4
COLUMNS = 4
BITS = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
DECODERS = ["pyav", *(["decord"] if importlib.util.find_spec("decord") else [])]


def burn(number: int, width: int, height: int) -> NDArray[np.uint8]:
    image = np.full((height, width, 3), 40, np.uint8)
    blocks = np.uint8(255) * (number >> BITS & 1).astype(np.uint8)
    shown = blocks.repeat(height // ROWS, 0).repeat(width // COLUMNS, 1)
    image[: shown.shape[0], : shown.shape[1]] = shown[..., None]
    return image


def number_in(image: NDArray[np.uint8]) -> int:
    """Invert `burn`."""
    height = image.shape[0] // ROWS
    width = image.shape[1] // COLUMNS
    centres = image[height // 2 :: height, width // 2 :: width][:ROWS, :COLUMNS]
    return int(((centres.mean(2) > 127) << BITS).sum())


ASS_HEADER = b"""[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name
Style: Default

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""


@dataclass(frozen=True)
class Clip:
    """`ticks` are the presentation times of frames 0, 1, ... in `base`."""

    ticks: Sequence[int]
    base: Fraction = Fraction(1, 1000)
    suffix: str = "mp4"
    codec: str = "libx264"
    pixels: str = "yuv420p"
    width: int = 128
    height: int = 96
    gop: int = 12
    options: dict[str, str] = field(default_factory=dict)
    mux: dict[str, str] = field(default_factory=dict)
    still: bool = False
    pixel: Fraction | None = None  # width of a pixel by its height
    audio_s: float = 0.0
    pids: tuple[int, int] | None = None  # PIDs of pictures and sound in MPEG-TS
    words: Mapping[str, Said] = field(default_factory=dict)  # a text track by its language
    words_codec: str = "subrip"

    @property
    def times_s(self) -> list[float]:
        return [float((t - self.ticks[0]) * self.base) for t in self.ticks]


def write(clip: Clip, path: Path) -> Path:
    with av.open(str(path), "w", options=clip.mux) as output:
        stream: Any = output.add_stream(clip.codec, rate=25, options=clip.options)
        stream.width = clip.width
        stream.height = clip.height
        stream.pix_fmt = clip.pixels
        stream.time_base = stream.codec_context.time_base = clip.base
        stream.codec_context.gop_size = clip.gop
        stream.codec_context.thread_count = 1
        if clip.pixel:
            stream.codec_context.sample_aspect_ratio = clip.pixel
        sound: Any = output.add_stream("aac", rate=8000, layout="mono") if clip.audio_s else None
        if clip.pids:
            stream.id, sound.id = clip.pids
        lines = [add_words(output, clip, language) for language in clip.words]
        output.mux([packet for packets in lines for packet in packets])
        for number, ticks in enumerate(clip.ticks):
            picture = burn(7 if clip.still else number, clip.width, clip.height)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=clip.pixels)
            frame.pts = ticks
            frame.time_base = clip.base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if sound is not None:
            for begin in range(0, round(clip.audio_s * 8000), 1024):
                silence = av.AudioFrame.from_ndarray(
                    np.zeros((1, 1024), np.float32), "fltp", "mono"
                )
                silence.pts = begin
                silence.sample_rate = 8000
                silence.time_base = Fraction(1, 8000)
                output.mux(sound.encode(silence))
            output.mux(sound.encode(None))
    return path


def add_words(output: Any, clip: Clip, language: str) -> list[av.Packet]:
    """Add a text track to a file, and return its packets. Times count from the first frame."""
    text = output.add_stream(clip.words_codec)
    text.metadata["language"] = language
    text.time_base = text.codec_context.time_base = Fraction(1, 1000)
    text.codec_context.subtitle_header = ASS_HEADER
    packets = []
    for number, (start_s, end_s, words) in enumerate(clip.words[language]):
        ass = f"{number},0,Default,,0,0,0,,{words}".encode()
        long_ms = round(1000 * (end_s - start_s))
        packet = text.codec_context.encode_subtitle(SubtitleSet.create(ass, 0, long_ms, 0, 1))
        packet.stream = text
        packet.time_base = text.time_base
        packet.duration = long_ms
        packet.pts = packet.dts = clip.ticks[0] + round(1000 * start_s)
        packets.append(packet)
    return packets


def join(folder: Path, *clips: Clip) -> Path:
    """Write the bytes of some clips one behind the other into one file."""
    data = b"".join(write(clip, folder / "part.ts").read_bytes() for clip in clips)
    (path := folder / "joined.ts").write_bytes(data)
    return path


def remux(
    source: Path,
    target: Path,
    change: Callable[[int, av.Packet], Iterable[av.Packet]],
    **options: str,
) -> Path:
    """Write a copy with what `change` makes of each packet and its number in decoding order."""
    with av.open(str(source)) as original, av.open(str(target), "w", options=options) as copy:
        stream = original.streams.video[0]
        out = copy.add_stream_from_template(stream)
        for number, packet in enumerate(one for one in original.demux(stream) if one.size):
            for one in change(number, packet):
                one.stream = out
                copy.mux(one)
    return target


def encode(
    path: Path | str,
    size: tuple[int, int],
    images: Iterable[Any],
    rate: int,
    codec: str = "libx264",
    *,
    pixels: str = "rgb24",
    form: str | None = None,
    mux: Mapping[str, str] | None = None,
    **options: str,
) -> None:
    """Write pictures of this width and height, so many a second: RGB `[height, width, 3]`, or of
    other pixels, which the codec keeps.
    """
    with av.open(str(path), "w", format=form, options=dict(mux or {})) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size
        if pixels != "rgb24":
            stream.pix_fmt = pixels
        for image in images:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(image, format=pixels)))
        output.mux(stream.encode(None))


STEADY = [40 * i for i in range(61)]
UNEVEN = np.cumsum([0] + [20, 100, 33, 250, 7] * 13).tolist()

CLIPS = {
    "constant rate": Clip(STEADY, options={"bf": "0", "sc_threshold": "0"}),
    "variable rate": Clip(UNEVEN),
    "reordered frames": Clip(
        STEADY, options={"bf": "3", "b-pyramid": "normal", "sc_threshold": "0"}, gop=37
    ),
    "open groups": Clip(
        STEADY, codec="libx265", options={"x265-params": "open-gop=1:keyint=11:log-level=none"}
    ),
    "open groups of h264": Clip(
        STEADY, options={"x264-params": "open-gop=1:keyint=11:bframes=3:scenecut=0"}
    ),
    "late start": Clip([1730 + 40 * i for i in range(33)]),
    "matroska in milliseconds": Clip([round(i * 1000 / 30) for i in range(45)], suffix="mkv"),
    "transport stream": Clip(STEADY, suffix="ts", base=Fraction(1, 25000)),
    "fragmented": Clip(STEADY, mux={"movflags": "frag_keyframe+empty_moov"}),
    "avi": Clip(list(range(40)), base=Fraction(1, 25), suffix="avi", options={"bf": "2"}),
    "raw": Clip(list(range(40)), base=Fraction(1, 25), suffix="h264"),
    "asf": Clip(STEADY, suffix="asf", options={"bf": "2"}),
    "gray": Clip(STEADY, pixels="gray"),
    "10 bits": Clip(STEADY, pixels="yuv420p10le"),
    "interlaced": Clip(STEADY, options={"x264-params": "tff=1", "flags": "+ildct+ilme"}),
    "odd size": Clip(STEADY, pixels="yuv444p", width=131, height=97),
    "one frame": Clip([0]),
    "a still": Clip(STEADY, still=True),
    "every frame a key frame": Clip(STEADY, codec="mjpeg", pixels="yuvj420p", suffix="mkv"),
    "longer sound": Clip(STEADY, audio_s=6.0),
}


@pytest.fixture(scope="session")
def make_clip(tmp_path_factory: pytest.TempPathFactory) -> MakeClip:
    folder = tmp_path_factory.mktemp("clips")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            clip = CLIPS[name]
            made[name] = write(clip, folder / f"{name.replace(' ', '-')}.{clip.suffix}")
        return made[name]

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "clip_name" in metafunc.fixturenames:
        metafunc.parametrize("clip_name", list(CLIPS))
