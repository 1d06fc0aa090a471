"""Text tracks of containers and files of subtitles: their lines, at the times of the pictures, within bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv.errors import SourceNotFound, SourceUnreadable
from protokv.video import open_source
from protokv.video.derived import Part
from protokv.video.source import Line
from protokv.words.tracks import read_file
from tests.words.subtitled import write_subtitled

SAID = [(0.4, 1.2, "x < y"), (2.0, 3.5, "two\\Nrows {\\i1}here{\\i0}"), (4.0, 5.0, "{\\p1}m 0 0 l 1 1{\\p0}")]
SPOKEN = "Schöne Grüße für die Gäste, ließ sie später hören."
SRT = f"1\n00:00:01,000 --> 00:00:02,500\n{SPOKEN}\n\n2\n00:00:03,000 --> 00:00:04,000\nThe answer\n42\n"


@pytest.mark.parametrize(
    ("suffix", "codec", "late_ms"), [("mp4", "mov_text", 700), ("mkv", "ass", 3000), ("webm.mkv", "webvtt", 0)]
)
def test_a_track_has_the_same_lines_in_every_container_codec_and_process(
    suffix: str, codec: str, late_ms: int, tmp_path: Path
) -> None:
    said = SAID if codec == "ass" else SAID[1:2]
    path = write_subtitled(tmp_path / f"x.{suffix}", {"eng": said, "deu": said[:1]}, codec, late_ms=late_ms)
    with open_source(path) as source, Part(open_source(path), 1.0) as part:
        assert source.texts == part.texts
        assert [one.language for one in source.texts] == ["eng", "deu"]
        number = source.texts[0].number
        lines, lost = source.lines(number)
        assert not lost
        assert [line[:2] for line in lines] == [pytest.approx(one[:2]) for one in said[:2]]
        assert "two\nrows" in lines[-1].text
        assert codec != "ass" or lines[0].text == "x < y"
        assert [line.start_s for line in part.lines(number).lines] == pytest.approx([one[0] - 1 for one in said[:2]])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_a_file_is_read_in_its_encoding(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "x.srt"
    path.write_bytes(SRT.encode(encoding))
    lines = (Line(1.0, 2.5, SPOKEN), Line(3.0, 4.0, "The answer\n42"))
    assert read_file(path).lines == lines


def test_times_may_have_no_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "x.srt"
    path.write_text("0\n00:00:01,500 --> 00:00:04\none at 0:00:07\n\n1\n1:00:04 --> 1:00:07\ntwo\n")
    assert read_file(path).lines == (Line(1.5, 4.0, "one at 0:00:07"), Line(3604.0, 3607.0, "two"))


def test_bad_files_are_one_error_and_long_ones_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.vtt"
    with pytest.raises(SourceNotFound):
        read_file(path)
    for junk in (b"\0\1\2" * 999, b"#EXTM3U\n#EXTINF:1,\nhttp://there/x.vtt\n", b"<html>no</html>"):
        path.write_bytes(junk)
        with pytest.raises(SourceUnreadable, match=r"x\.vtt holds no subtitles"):
            read_file(path)
    monkeypatch.setattr("protokv.video.text_tracks.MOST_LINES", 5)
    path.write_text("WEBVTT\n\n" + "".join(f"00:0{n}.000 --> 00:09.000\na{n}\n\n" for n in range(9)))
    assert len(read_file(path).lines) == 5
    for home in ("protokv.video.text_tracks", "protokv.words.tracks"):
        monkeypatch.setattr(f"{home}.MOST_BYTES", 10_000)
    path.write_text("WEBVTT\n\n00:01.000 --> 00:02.000\n" + "word " * 10_000)
    (line,), lost = read_file(path)
    assert len(line.text) < 10_000
    assert "is read" in lost or "are read" in lost
