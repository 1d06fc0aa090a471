"""Files of subtitles as people and programs write them: every line with its times, in any encoding,
within bounds.
"""

from pathlib import Path

import pytest

from protokv.errors import SourceUnreadable
from protokv.video import text_tracks
from protokv.video.source import SubtitleLine
from protokv.words import files
from protokv.words.cues import make_cues
from protokv.words.files import read_subtitles

SPOKEN = "Schöne Grüße für die Gäste, ließ sie später hören."
SRT = (
    f"1\n00:00:01,000 --> 00:00:02,500\n{SPOKEN}\n\n2\n00:00:03,000 --> 00:00:04,000\nThe "
    "answer\n42\n"
)
ONE = SubtitleLine(1.0, 2.0, "one")
TWO = SubtitleLine(3.0, 4.0, "two")
DIALOGUE = "[Events]\nFormat: {}\nDialogue: {}\nDialogue: {}\nComment: {}\n"


def read(tmp_path: Path, text: str, suffix: str = "srt") -> list[SubtitleLine]:
    path = tmp_path / f"x.{suffix}"
    path.write_text(text, newline="")
    found = read_subtitles(path)
    assert (found.lost, found.note) == ("", "")
    return list(found.lines)


@pytest.mark.parametrize(
    ("encoding", "spoken"),
    [
        *((encoding, SPOKEN) for encoding in ("utf-8", "utf-8-sig", "utf-16", "cp1252")),
        ("cp1252", "Ça va très bien, mon frère, déjà là."),
        ("cp1250", "Zażółć gęślą jaźń, dziękuję, że jesteś tu."),
        ("cp1250", "Köszönöm, egy kicsit később jövünk, szőke hölgy."),
        ("cp1251", "Привет, как дела сегодня?"),
        ("cp932", "こんにちは、元気ですか"),
    ],
)
def test_a_file_is_read_in_its_encoding_and_a_guess_is_said(
    encoding: str, spoken: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.srt"
    path.write_bytes(SRT.replace(SPOKEN, spoken).encode(encoding))
    guess = "" if encoding.startswith("utf") else f"read as {encoding}, which is a guess"
    assert read_subtitles(path) == (
        (SubtitleLine(1.0, 2.5, spoken), SubtitleLine(3.0, 4.0, "The answer\n42")),
        "",
        guess,
    )


def test_a_byte_that_is_no_utf_8_costs_its_character_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.srt"
    path.write_bytes(SRT.replace("answer", "caf\udce9").encode(errors="surrogateescape"))
    lines = SubtitleLine(1.0, 2.5, SPOKEN), SubtitleLine(3.0, 4.0, "The caf\ufffd\n42")
    assert read_subtitles(path) == (lines, "", "UTF-8 but for 1 character")


ASS_ROWS = [
    f"0,0:00:0{n}.0,0:00:0{n + 1}.0,,,0,0,0,,{text}"
    for n, text in ((1, "o{\\i1}ne"), (3, "two"), (5, "no"))
]
MINIMAL_ROWS = [
    "0:00:01.00,0:00:02.00,0,one",
    "0:00:03.00,0:00:04.00,0,two",
    "0:00:05.00,0:00:06.00,0,no",
]
TEXTS = {
    "no blank row": (
        "1\n00:00:01,000 --> 00:00:02,000\none\n2\n00:00:03,000 --> 00:00:04,000\ntwo\n"
    ),
    "bare CR": "1\r00:00:01,000 --> 00:00:02,000\rone\r\r2\r00:00:03,000 --> 00:00:04,000\rtwo",
    "two CR": (
        "1\r\r\n00:00:01,000 --> 00:00:02,000\r\r\none\r\r\n\r\r\n2\r\r\n0:00:03,000 --> "
        "0:00:04,000\r\r\ntwo"
    ),
    "bytes of 0": (
        "\0\0001\n\00000:00:01,000 --> 00:00:02,000\0\none\0\n\n00:00:03,000 --> "
        "00:00:04,000\ntwo\n\0\0\0\0"
    ),
    "other arrows": (
        "1\n00:00:01,000 -> 00:00:02,000\none\n\n2\n00:00:03,000 -- > 00:00:04,000\ntwo"
    ),
    "short times": "0:00:01 --> 0:00:02\n{\\an8}one\n\n00:00:03.0 --> 00:00:04.00000\ntwo",
    "by hand": (
        "\n WEBVTT\n00:01.000 --> 00:02.000\none\n\nNOTE one\ntwo\n\n7\n00:03,000 --> 00:04,000 "
        "line:0\ntwo\n"
    ),
    "WebVTT": (
        "WEBVTT - x\nKind: y\n\nid\n00:00:01.000 --> 00:00:02.000\none\n\n00:00:03.000 --> "
        "00:00:04.000\ntwo"
    ),
    "ASS of any order": DIALOGUE.format("Start, End, Layer, Text", *MINIMAL_ROWS),
    "ASS": DIALOGUE.format(files._ASS_FIELDS, *ASS_ROWS),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_line_is_read_however_it_is_written(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == [ONE, TWO]


def test_words_keep_their_times_and_a_line_without_an_end_stays_a_while(tmp_path: Path) -> None:
    spoken = "so<00:00:00.300><c> today</c><00:00:00.560><c> we</c>"
    text = (
        f"WEBVTT\n\n00:00.100 --> 00:02.500\n \n{spoken}\n\n00:03.000 --> 00:03.000\n<v Mara>x, y\n"
    )
    assert read(tmp_path, text, "vtt") == [
        SubtitleLine(0.1, 2.5, spoken),
        SubtitleLine(3.0, 6.0, "<v Mara>x, y"),
    ]
    drawn = "0,0:00:01.00,0:00:02.00,,,0,0,0,,two\\Nrows{\\p1}m 0 0 l 1 1{\\p0}, here"
    assert read(
        tmp_path,
        DIALOGUE.format(files._ASS_FIELDS, drawn, drawn.replace("two", "{\\p1}"), drawn),
        "ass",
    ) == [
        SubtitleLine(1.0, 2.0, "two\nrows, here"),
        SubtitleLine(1.0, 2.0, ", here"),
    ]


HARM = [
    "{\\",
    "{\\p1",
    "\\p1",
    "{",
    "<b ",
    "<font a=",
    "<a b",
    "<v.a ",
    "<c.",
    "[a",
    "(\n",
    "a\n",
    "- -\n",
    "<00:00:00.000>",
    "&",
]


@pytest.mark.parametrize("unit", HARM)
@pytest.mark.parametrize("form", ["srt", "vtt", "ass"])
def test_a_line_made_to_do_harm_takes_no_quadratic_time(
    form: str, unit: str, tmp_path: Path
) -> None:
    """Eight times as much text takes far less than 64 times as long: it takes an hour else."""
    said = unit * (1_000_000 // len(unit))
    begun = "0:00:01.0,0:00:02.0,0,"
    if form == "ass":
        line = begun + said.replace("\n", " ")
        text = DIALOGUE.format("Start, End, Layer, Text", line, line, "")
    else:
        text = f"00:00:01.000 --> 00:00:02.000\n{said}\n"
        text = f"WEBVTT\n\n{text}" if form == "vtt" else text
    found = read(tmp_path, text, form)
    assert all(len(line.text) <= text_tracks._MOST_OF_LINE for line in found)
    list(make_cues(found))


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("srt", "a<b and b>c", "a<b and b>c"),
        ("srt", "<i>x</i> if x<i and i>y", "x if x<i and i>y"),
        ("srt", "<v you> and <c red>", "<v you> and <c red>"),
        ("srt", '<font color="red">a</font> <B>b</B> <br/>{\\an8}c', "a b c"),
        ("srt", "&lt;b&gt; 1 < 2", "<b> 1 < 2"),
        ("vtt", "<b>a</b> <c.red>b</c> <lang de>c</lang> 1 &lt; 2", "a b c 1 < 2"),
        ("ass", "a<b and b>c <i>d</i>", "a<b and b>c <i>d</i>"),
        ("ass", "{\\pos(1,2)}a{\\p1}m 0 0{\\p0}b{\\i1}c", "abc"),
        ("srt", "first\0DTG1", "first"),
        ("vtt", "first\0DTG1\nsecond", "first second"),
        ("ass", "first\0DTG1", "first"),
    ],
)
def test_tags_are_tags_only_where_a_format_has_them_and_nothing_stands_behind_a_zero(
    form: str, text: str, said: str, tmp_path: Path
) -> None:
    if form == "ass":
        line = f"0:00:01.0,0:00:02.0,0,{text}"
        file = DIALOGUE.format("Start, End, Layer, Text", line, line, "")
    else:
        file = ("WEBVTT\n\n" if form == "vtt" else "1\n") + f"00:01.000 --> 00:02.000\n{text}\n"
    found = read(tmp_path, file, form)
    assert [cue.text for cue in make_cues(found[:1])] == [said]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\1\2" * 999,
        b"#EXTM3U\nhttp://there/x.vtt\n",
        b"<html>no</html>",
        b"WEBVTT\n\n9 --> 10\nx\n",
        # These take minutes if their time is quadratic.
        b"-" * 200_000,
        b"1" + b" " * 200_000,
        b"- " * 100_000,
        b"1 " + b"-" * 200_000,
        b"\r" * 200_000,
    ],
    ids=range(10),
)
def test_what_holds_no_line_is_one_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.vtt").write_bytes(data)
    with pytest.raises(SourceUnreadable, match=r"x\.vtt holds no subtitles"):
        read_subtitles(tmp_path / "x.vtt")


@pytest.mark.parametrize(
    ("text", "n", "lost"),
    [
        ("WEBVTT\n\nNOTE nobody speaks\n", 0, ""),
        (
            "WEBVTT\n00:01.000 --> 00:02.000\none\n\n00:03.000 --> later\ntwo\n\nx 4 --> 5\n3",
            1,
            "the times of 2 lines",
        ),
        (
            DIALOGUE.format("Start, End, Text", "0:00:01,0:00:02,one", "0:00:03,soon,two", "x"),
            1,
            "the times of 1 line",
        ),
        (
            "WEBVTT\n\n" + "".join(f"00:0{n}.000 --> 00:09.000\na{n}\n\n" for n in range(9)),
            5,
            "only the first 5 lines",
        ),
        ("WEBVTT\n\n00:01.000 --> 00:02.000\n" + "word " * 10_000, 1, "only its first"),
    ],
)
def test_what_is_missing_or_beyond_a_bound_is_said(
    text: str, n: int, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_TRACK_LINES", 5)
    monkeypatch.setattr(files, "MOST_CHARACTERS", 10_000)
    (tmp_path / "x.vtt").write_text(text)
    found = read_subtitles(tmp_path / "x.vtt")
    assert len(found.lines) == n
    assert sum(len(line.text) for line in found.lines) < 10_000
    assert lost in found.lost
    assert bool(found.lost) == bool(lost)
