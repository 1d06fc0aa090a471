"""Markup and notes become plain text, said once; every line is in one step, where its middle is."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.video.source import SubtitleLine
from protokv.words import Subtitles
from protokv.words.cues import _MOST_OF_STEP, clean_lines

times = st.integers(-20, 400).map(lambda tenths: tenths / 10)


spoken = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(" ".join)
lines = st.builds(
    lambda start_s, tenths, text: SubtitleLine(start_s, start_s + tenths / 10, text), times, st.integers(0, 50), spoken
)


@given(st.lists(lines, max_size=12), st.lists(st.integers(1, 99), max_size=9, unique=True))
def test_steps_cut_a_track_at_the_middles_of_its_lines(found: list[SubtitleLine], cuts: list[int]) -> None:
    track = Subtitles(found)
    edges = [0.0, *(cut / 2 for cut in sorted(cuts)), 60.0]
    in_order = sorted(found, key=lambda line: (line.start_s, line.end_s))
    for start_s, end_s in pairwise(edges):
        middles = [(round((line.start_s + line.end_s) / 2, 6), line.text) for line in in_order]
        wanted = [text for at, text in middles if (start_s <= at or start_s == 0) and at < end_s]
        assert track.between(start_s, end_s) == wanted
    assert track.lost is None


def test_a_bound_cuts_a_step_and_says_what_is_left_out() -> None:
    full = Subtitles([SubtitleLine(0, 1, "abcd " * 300), SubtitleLine(0, 2, "efgh " * 30_000)])
    first, second = full.between(0, 3)
    assert _MOST_OF_STEP - 5 <= len(first) + len(second) <= _MOST_OF_STEP
    assert {*first.split(), *second.split()} == {"abcd", "efgh"}
    assert "a step has more" in str(full.lost)


def said(text: str) -> str:
    return " / ".join(line.text for line in clean_lines([SubtitleLine(0, 1, text)]))


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


def test_captions_that_roll_up_are_said_once() -> None:
    rolling = [
        SubtitleLine(0.1, 2.5, " \nso<00:00:00.300><c> today</c><00:00:00.560><c> we</c>"),
        SubtitleLine(2.5, 2.51, "so today we\n "),
        SubtitleLine(2.51, 5.0, "so today we\ntalk<00:00:02.600><c> of</c><00:01:03.000><c> sta</c><00:01:04.000>rs"),
        SubtitleLine(5.0, 5.01, "talk of stars\n "),
        SubtitleLine(5.01, 7.0, "talk of stars\n[Music]"),
        SubtitleLine(7.5, 8.0, "talk of stars"),
    ]
    assert list(clean_lines(rolling)) == [
        SubtitleLine(0.1, 2.5, "so today we"),
        SubtitleLine(2.51, 5.0, "talk of stars"),
        # Said again after a pause.
        SubtitleLine(7.5, 8.0, "talk of stars"),
    ]


def test_layers_and_rows_that_grow_are_said_once_in_any_order() -> None:
    layers = [
        SubtitleLine(3, 4, "b\nc"),
        SubtitleLine(0, 1, "a"),
        SubtitleLine(0, 1, "a"),
        SubtitleLine(1, 2, "a\nb"),
        SubtitleLine(2, 3, "b"),
    ]
    assert [line.text for line in clean_lines(layers)] == ["a", "b", "c"]


def test_a_text_made_to_do_harm_takes_no_quadratic_time() -> None:
    for piece in ("<v ", "[", "(\n", "\n", "- ", "<00:00:00.000>", "<c", "&", "<c.a "):
        said(piece * 20_000)  # else minutes
