"""Text tracks of containers: their lines, at the times of the pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv.video import open_source
from protokv.video.source import Part
from tests.words.subtitled import write_subtitled

SAID = [(0.4, 1.2, "x < y"), (2.0, 3.5, "two\\Nrows {\\i1}here{\\i0}"), (4.0, 5.0, "{\\p1}m 0 0 l 1 1{\\p0}")]


@pytest.mark.parametrize(
    ("suffix", "codec", "late_ms"), [("mp4", "mov_text", 700), ("mkv", "ass", 3000), ("webm.mkv", "webvtt", 0)]
)
def test_a_track_has_the_same_lines_in_every_container_and_codec(
    suffix: str, codec: str, late_ms: int, tmp_path: Path
) -> None:
    said = SAID if codec == "ass" else SAID[1:2]
    path = write_subtitled(tmp_path / f"x.{suffix}", {"eng": said, "deu": said[:1]}, codec, late_ms=late_ms)
    with open_source(path) as source, Part(open_source(path), 1.0) as part:
        assert source.texts == part.texts
        assert [one.language for one in source.texts] == ["eng", "deu"]
        number = source.texts[0].number
        lines, lost, _ = source.lines(number)
        assert not lost
        # The video begins late_ms after its words, or both begin where the container does.
        late_s = next(source.frames()).time_s
        assert late_s == pytest.approx(0.7 if suffix == "mp4" else 0.0)
        lines = tuple(line.shift(-late_s) for line in lines)
        assert [line[:2] for line in lines] == [pytest.approx(one[:2]) for one in said[:2]]
        assert "two\nrows" in lines[-1].text
        assert codec != "ass" or lines[0].text == "x < y"
        assert [line.start_s for line in part.lines(number).lines] == pytest.approx(
            [one[0] - 1 + late_s for one in said[:2]]
        )


def test_webvtt_of_mkvtoolnix_is_read_and_a_track_that_gives_no_line_says_so(tmp_path: Path) -> None:
    path = write_subtitled(tmp_path / "x.mkv", {"eng": SAID[1:2]}, "webvtt")
    # FFmpeg does not know this name, under which packets are bare text; names may end in bytes of 0.
    path.write_bytes(path.read_bytes().replace(b"D_WEBVTT/SUBTITLES", b"S_TEXT/WEBVTT".ljust(18, b"\0")))
    with open_source(path) as source:
        assert [(one.codec, one.language) for one in source.texts] == [("webvtt", "eng")]
        (line,), lost, _ = source.lines(source.texts[0].number)
    assert (line[:2], lost) == (pytest.approx((2.0, 3.5)), "")
    assert "two\nrows" in line.text
    path = write_subtitled(tmp_path / "drawn.mkv", {"eng": SAID[2:]}, "ass")
    with open_source(path) as source:
        assert source.lines(source.texts[0].number) == ((), "none of its 1 packets holds text", "")
