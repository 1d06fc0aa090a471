"""Which pictures of a file are watched, and their shape: as players show them."""

import base64
import math
import re
import zlib
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import PIL.ExifTags
import PIL.Image
import pytest
from PIL import ImageCms, ImageOps

from protokv.errors import SourceUnreadable
from protokv.texts import Keywords
from protokv.video import open_source
from protokv.video.registry import Decoder
from tests.conftest import wide, widen
from tests.video.conftest import DECODERS, Clip, MakeClip, burn, encode, number_in, remux, write
from tests.video.test_stream import piped

STEADY = [40 * i for i in range(20)]

# Display matrices (a, b, c, d): (x, y) goes to (a x + c y, b x + d y), and flips are moved back.
SIGNS = [(x, y) for x in (1, -1) for y in (1, -1)]
MATRICES = [(x, 0, 0, y) for x, y in SIGNS] + [(0, y, x, 0) for x, y in SIGNS]


def with_matrix(path: Path, target: Path, *matrix: float) -> Path:
    """Write a copy with this display matrix of its first track."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (round(one * 65536).to_bytes(4, "big", signed=True) for one in matrix)
    data[at : at + 36] = a + b + bytes(4) + c + d + bytes(12) + (1 << 30).to_bytes(4, "big")
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_display_matrix_turns_and_mirrors(
    matrix: tuple[int, int, int, int], decoder: Decoder, make_clip: MakeClip, tmp_path: Path
) -> None:
    with open_source(make_clip("constant rate")) as plain:
        # Frame 7 looks the same from no two sides.
        image = list(plain.frames())[7].image
    a, b, c, d = matrix
    image = image[::d, ::a] if a else image.transpose(1, 0, 2)[::b, ::c]
    with open_source(
        with_matrix(make_clip("constant rate"), tmp_path / "x.mp4", *matrix), decoder
    ) as source:
        assert np.array_equal(list(source.frames())[7].image, image)
        assert (source.info.height, source.info.width) == image.shape[:2]
        assert source.notes == ()


def test_an_odd_angle_is_noted(make_clip: MakeClip, tmp_path: Path) -> None:
    sin = math.sin(math.radians(30))
    cos = math.cos(math.radians(30))
    path = with_matrix(make_clip("constant rate"), tmp_path / "x.mp4", cos, sin, -sin, cos)
    with open_source(path) as source:
        # FFmpeg's angle is cut to whole degrees.
        assert re.match("it asks to be turned by about (29|30) degrees", source.notes[0])
        assert next(source.frames()).image.shape == (96, 128, 3)


@pytest.mark.parametrize("tag", widen(range(1, 9), (3, 6)))
@pytest.mark.parametrize("suffix", ["png", "apng.png", "tiff", "webp", "jpg", "avi"])
def test_a_picture_is_turned_as_its_exif_says_in_a_file_and_in_a_pipe(
    suffix: str, tag: int, tmp_path: Path
) -> None:
    """Also beside a profile of colours, whose objects in PyAV crash."""
    exif = PIL.Image.Exif()
    exif[PIL.ExifTags.Base.Orientation] = tag
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    picture = PIL.Image.fromarray(burn(0b0110_0001_0111, 96, 64))
    how: Keywords = {"exif": exif, "icc_profile": profile, "lossless": True, "quality": 95}
    how |= {"save_all": True, "append_images": [picture]} if suffix == "apng.png" else {}
    path = tmp_path / f"x.{'jpg' if suffix == 'avi' else suffix}"
    picture.save(path, **how)
    with PIL.Image.open(path) as one:
        shown = np.asarray(ImageOps.exif_transpose(one).convert("RGB"))
    if suffix == "avi":
        path = remux(path, path.with_suffix(".avi"), lambda number, packet: [packet])
    with piped(path.read_bytes()) as address:
        # FFmpeg reads these two from files alone.
        for place in (path, address)[: 1 if suffix in ("tiff", "apng.png") else 2]:
            with open_source(place) as source:
                images = [frame.image for frame in source.frames()]
                assert len(images) == (2 if suffix == "apng.png" else 1)
                for image in images:
                    assert (source.info.height, source.info.width, 3) == shown.shape == image.shape
                    assert np.abs(image.astype(int) - shown).mean() < 3.0
                assert source.damage.ok


@pytest.mark.parametrize("suffix", widen(["mp4", "mkv", "ts"], ["mp4"]))
@pytest.mark.parametrize(
    ("pixel", "size"), [("2/1", (256, 96)), ("1/2", (128, 192)), ("64/45", (182, 96))]
)
def test_pixels_are_square_as_players_show_them(
    suffix: str, pixel: str, size: tuple[int, int], tmp_path: Path
) -> None:
    path = write(Clip(STEADY, suffix=suffix, pixel=Fraction(pixel)), tmp_path / f"x.{suffix}")
    with open_source(path) as source:
        frames = list(source.frames())
        assert {
            (source.info.height, source.info.width, 3),
            *(frame.image.shape for frame in frames),
        } == {(*size[::-1], 3)}
        assert [number_in(frame.image) for frame in frames] == list(range(20))


def combine(path: Path, *tracks: tuple[Clip, int]) -> Path:
    """Write a file of the tracks of some clips, each with its disposition."""
    with ExitStack() as opened:
        output = opened.enter_context(av.open(str(path), "w"))
        parts = []
        for number, (clip, disposition) in enumerate(tracks):
            part = write(clip, path.with_name(f"{number}.mkv"))
            source = opened.enter_context(av.open(str(part)))
            stream = output.add_stream_from_template(source.streams.video[0])
            stream.disposition = disposition
            parts.append((source, stream))
        for source, stream in parts:
            for packet in source.demux():
                if packet.size:
                    packet.stream = stream
                    output.mux(packet)
    return path


SMALL = Clip(STEADY, width=64, height=48)
LARGE = Clip(STEADY)
COVER = Clip([0], codec="mjpeg", pixels="yuvj420p", width=256, height=192)


@pytest.mark.parametrize("suffix", widen(["mp4", "mkv"], ["mp4"]))
@pytest.mark.parametrize(
    ("tracks", "taken"),
    [
        (((SMALL, 0), (LARGE, 1)), 1),
        (((SMALL, 1), (LARGE, 0)), 0),
        (((SMALL, 1), (LARGE, 1)), 1),
        (((LARGE, 0), (SMALL, 0)), 0),
        (((COVER, 0), (SMALL, 0)), 1),
        (((COVER, 0), (SMALL, 1)), 1),
        (((COVER, 1), (SMALL, 0)), 1),
        (((SMALL, 0), (COVER, 0)), 0),
    ],
)
def test_the_default_track_is_watched_else_the_largest_and_a_cover_last(
    suffix: str, tracks: tuple[tuple[Clip, int], ...], taken: int, tmp_path: Path
) -> None:
    clip, _ = tracks[taken]
    with open_source(combine(tmp_path / f"x.{suffix}", *tracks)) as source:
        assert (source.info.width, source.info.height) == (clip.width, clip.height)
        assert [number_in(frame.image) for frame in source.frames()] == list(range(20))
        assert source.damage.ok
        size = f"{clip.width} x {clip.height}"
        assert source.notes == (f"2 video tracks: track {taken} of {size} pixels is watched",)


# Bars of grey as they are shown, and the signals of their light with FFmpeg's number of the
# transfer. The light of a page's white is 203 nits, and the last bar has twice that.
SHOWN = (0.1, 0.3, 0.5, 0.7, 0.9)
SIGNALS = {
    "BT.709": (1, (*SHOWN, 1.0)),
    "BT.2020": (14, (*SHOWN, 1.0)),
    # SMPTE ST 2084, and ITU-R BT.2100
    "PQ": (16, (0.139, 0.309, 0.416, 0.493, 0.554, 0.654)),
    "HLG": (18, (0.089, 0.267, 0.446, 0.603, 0.708, 0.861)),
}


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("PQ", "mp4"),
        *wide(("HLG", "mkv"), ("BT.709", "mp4"), ("BT.2020", "ts")),
    ],
)
def test_light_up_to_the_white_of_a_page_is_as_bright_as_without_high_dynamic_range(
    name: str, suffix: str, tmp_path: Path
) -> None:
    transfer, signal = SIGNALS[name]
    space = "1" if name == "BT.709" else "9"
    planes = np.full((96, 96), 512, np.uint16)
    planes[:64] = np.rint(64 + 876 * np.repeat(signal, 16))
    how: Keywords = {"color_trc": str(transfer), "color_primaries": space, "colorspace": space}
    how |= {"x265-params": "log-level=none:qp=4"}
    path = tmp_path / f"x.{suffix}"
    encode(path, (96, 64), [planes] * 3, 5, "libx265", pixels="yuv420p10le", **how)
    with open_source(path) as source:
        images = [frame.image for frame in source.frames()]
    assert len(images) == 3
    *bars, white = images[-1][32, 8::16].mean(1)
    assert bars == pytest.approx(255 * np.array(SHOWN), abs=12)
    assert white > 245
    assert np.ptp(images[-1].astype(int), axis=2).max() <= 6


def test_a_picture_above_8k_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    PIL.Image.new("RGB", (9000, 4800)).save(tmp_path / "x.png")
    with pytest.raises(SourceUnreadable) as caught:
        open_source(tmp_path / "x.png")
    assert "--max-frame-pixels" in caught.value.hint
    with open_source(tmp_path / "x.png", max_pixels=43_315_200) as source:
        assert source.info.width == 9000


# An AVIF picture of 128 x 64 in two tiles.
GRID = (
    b"c-muNV30{GsVqn=%S>Yc0uY^>nP!-qnF!=FhUKP~Br-sNVn#|%5tPkPkeOV<fCl&qGD~v7EJh%9$jr%41~FV17?^<~"
    b"j8Jh9;9y{asbj1H(keg|F#bFstqjDznVETDCxPWeft*w(sG9Vm%oGL`K_-yP4Gd8QnGu3AnMJ8-P|F2UGIP^`#xMaP"
    b"$mpcZf}#Q-ZIfA$oDZZ$GK&jRp=ujI9zhdxfMTA+GDGJ^1|E=@TxLNoES!LzWdxee#MI2d3?hIwW~L;TfSuj|*6E)M"
    b"<a2R>+`ayPZ@dAAk(dC(E+!5IM@CTCOud+WN@rX4wj>7>HKHhL&Rwj1Jo6scX8<ArN9_"
)


def test_a_picture_in_tiles_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "grid.avif"
    path.write_bytes(zlib.decompress(base64.b85decode(GRID)))
    with pytest.raises(SourceUnreadable, match="is a picture in tiles"):
        open_source(path)


def test_an_encrypted_mp4_is_called_encrypted(tmp_path: Path) -> None:
    key = "76a6c65c5ea762046bd749a2e632ccbb"
    flags = "frag_keyframe+empty_moov"
    keys = {"encryption_scheme": "cenc-aes-ctr", "encryption_key": key, "encryption_kid": key}
    for mux in (keys, {**keys, "movflags": flags}):
        path = write(Clip(STEADY, mux=mux), tmp_path / "x.mp4")
        with pytest.raises(SourceUnreadable, match="is encrypted"):
            open_source(path)
    with piped(path.read_bytes()) as address, pytest.raises(SourceUnreadable, match="is encrypted"):
        open_source(address)
