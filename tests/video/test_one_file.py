"""FFmpeg reads the named file and no other, whatever the file and its name say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from protokv.errors import SourceUnreadable
from protokv.video import open_source
from protokv.video.registry import Decoder
from tests.video.conftest import DECODERS, Clip, burn, number_in, write

PLAYLIST = (
    "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:2.0,\n"
)

# What names other files: {folder} has a video `other.ts`, a named pipe `other.pipe` and a subtitle
# `movie.sub`.
TEXTS = {
    "list.m3u8": PLAYLIST + "file://{folder}/other.ts\n#EXT-X-ENDLIST\n",
    "pipe.m3u8": PLAYLIST + "{folder}/other.pipe\n#EXT-X-ENDLIST\n",
    "list.mp4": PLAYLIST + "other.ts\n#EXT-X-ENDLIST\n",
    "script.mkv": "ffconcat version 1.0\nfile '{folder}/other.ts'\n",
    "film.mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static">'
    "<Period><AdaptationSet>"
    '<Representation id="1" mimeType="video/mp4"><BaseURL>file://{folder}/other.ts</BaseURL>'
    "</Representation>"
    "</AdaptationSet></Period></MPD>",
    "call.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video 5004 RTP/AVP 96\n",
    "movie.idx": "# VobSub index file, v7\nsize: 720x576\nid: en, index: 0\n"
    "timestamp: 00:00:01:000, filepos: 000000000\n",
    "text.txt": "FFmpeg would draw this text as a film\n" * 99,
}
SEQUENCE = ("pat%03d.jpg", "pat%03d.mp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("others")
    write(Clip([40 * i for i in range(50)], suffix="ts"), made / "other.ts")
    os.mkfifo(made / "other.pipe")
    (made / "movie.sub").write_bytes(b"\0\0\1\xba" + bytes(2044))
    for name, text in TEXTS.items():
        (made / name).write_text(text.format(folder=made))
    # A playlist that also looks like a transport stream to a reader that does not know playlists by
    # their content.
    both = (
        TEXTS["list.m3u8"].format(folder=made).encode().ljust(188, b"\n")
        + (made / "other.ts").read_bytes()
    )
    (made / "both.ts").write_bytes(both)
    for number, name in enumerate(("pat000.jpg", SEQUENCE[0], "pat001.jpg")):
        Image.fromarray(burn(number, 64, 48)).save(made / name)
    write(Clip([0, 40, 80]), made / SEQUENCE[1])
    return made


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_names_other_files_is_refused_in_one_line(decoder: Decoder, folder: Path) -> None:
    for name in TEXTS:
        with pytest.raises(SourceUnreadable) as caught:
            open_source(folder / name, decoder)
        assert name in caught.value.message
        assert "\n" not in caught.value.message
        assert "a playlist is read from its address alone" in caught.value.hint


def test_a_picture_named_like_a_sequence_is_read_and_its_neighbours_are_not(folder: Path) -> None:
    with open_source(folder / SEQUENCE[0]) as source:
        assert [number_in(frame.image) for frame in source.frames()] == [1]


READ_ALL = """
import sys
from protokv.errors import SourceError
from protokv.video import open_source
for decoder in sys.argv[2:]:
    open("BEGIN", "a")
    try:
        with open_source(sys.argv[1], decoder) as source:
            print(len([frame.image for frame in source.frames()]))
    except SourceError as error: print(error.message)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("name", [*TEXTS, *SEQUENCE, "both.ts", "other.ts"])
def test_no_other_file_and_no_connection_is_opened(name: str, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    trace = f"strace -f -qq -e trace=%file,%network -o {log} {sys.executable} -c".split()
    command = [*trace, READ_ALL, name, *DECODERS]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert len(out.stdout.splitlines()) == len(DECODERS), out.stderr
    lines = log.read_text().partition("BEGIN")[2].splitlines()
    touched = {Path(text).name for line in lines for text in re.findall(r'"([^"]*)"', line)}
    assert touched & {one.name for one in folder.iterdir()} - {"BEGIN"} == {name}
    assert not [line for line in lines if "connect(" in line or "AF_INET" in line]
