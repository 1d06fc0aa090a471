"""Markup, effects and notes become plain text, and captions that roll up are said once."""

from __future__ import annotations

import pytest

from protokv.video.source import Line
from protokv.words import Cue
from protokv.words.plain import make_cues


def said(text: str) -> str:
    return " / ".join(cue.text for cue in make_cues([Line(0, 1, text)]))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<i>Hello</i> <b>there</b>", "Hello there"),
        ('see <a href="https://x.test">the &lt;video&gt;</a>', "see the <video>"),
        ('<font size="0" color="#000000">Hi</font>', "Hi"),
        ("<v.loud Mara Lee>no &amp; yes", "Mara Lee: no & yes"),
        ("<c.yellow.bg_blue>one</c>\n<ruby>two<rt>2</rt></ruby>", "one two2"),
        ("[music]", ""),
        ("[MARA SIGHS] Well, [ __ ]", "Well,"),
        ("(door\nslams)\n- Yes\n-No", "Yes No"),
        ("♪ la la ♪", "la la"),
        (">> so f(x) is a[0], and x < y", "so f(x) is a[0], and x < y"),
        ("-5 degrees (or so)", "-5 degrees (or so)"),
        ("a\u202eb\x1b[31mc\x07", "ab [31mc"),
        ("with\u200cin", "with\u200cin"),
        (" \n \n", ""),
    ],
)
def test_text_is_plain(text: str, wanted: str) -> None:
    assert said(text) == wanted


def test_captions_that_roll_up_are_said_once_with_the_times_of_their_words() -> None:
    rolling = [
        Line(0.1, 2.5, " \nso<00:00:00.300><c> today</c><00:00:00.560><c> we</c>"),
        Line(2.5, 2.51, "so today we\n "),
        Line(2.51, 5.0, "so today we\ntalk<00:00:02.600><c> of</c><00:01:03.000><c> sta</c><00:01:04.000>rs"),
        Line(5.0, 5.01, "talk of stars\n "),
        Line(5.01, 7.0, "talk of stars\n[Music]"),
        Line(7.5, 8.0, "talk of stars"),
    ]
    assert list(make_cues(rolling)) == [
        Cue(0.1, 2.5, "so today we", ((0.1, "so"), (0.3, "today"), (0.56, "we"))),
        Cue(2.51, 5.0, "talk of stars", ((2.51, "talk"), (2.6, "of"), (63.0, "stars"))),
        # Said again after a pause.
        Cue(7.5, 8.0, "talk of stars"),
    ]


def test_layers_and_rows_that_grow_are_said_once_in_any_order() -> None:
    lines = [Line(3, 4, "b\nc"), Line(0, 1, "a"), Line(0, 1, "a"), Line(1, 2, "a\nb"), Line(2, 3, "b")]
    assert [cue.text for cue in make_cues(lines)] == ["a", "b", "c"]


def test_a_text_made_to_do_harm_takes_no_quadratic_time() -> None:
    for piece in ("<v ", "[", "(\n", "\n", "- ", "<00:00:00.000>", "<c", "&", "<c.a "):
        said(piece * 20_000)  # else minutes
