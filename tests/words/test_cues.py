"""Markup and notes become plain text, said once; every cue is in one step, where its middle or its
words are.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.video.source import SubtitleLine
from protokv.words.cues import _MOST_OF_STEP, Cue, Subtitles, make_cues

times = st.integers(-20, 400).map(lambda tenths: tenths / 10)


@st.composite
def cues(draw: st.DrawFn) -> Cue:
    start_s = draw(times)
    length_s = draw(st.integers(0, 50)) / 10
    said = draw(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
    starts = sorted(draw(st.lists(st.integers(0, 50), min_size=len(said), max_size=len(said))))
    words = tuple((start_s + at / 10, word) for at, word in zip(starts, said, strict=True))
    return Cue(start_s, start_s + length_s, " ".join(said), words if draw(st.booleans()) else ())


def literal(cue: Cue, start_s: float, end_s: float) -> str:
    """What of one cue belongs to a step, by the definition."""
    said = cue.words or (((cue.start_s + cue.end_s) / 2, cue.text),)
    return " ".join(
        word for time_s, word in said if (start_s <= time_s or start_s == 0) and time_s < end_s
    )


@given(st.lists(cues(), max_size=12), st.lists(st.integers(1, 99), max_size=9, unique=True))
def test_steps_cut_a_track_as_the_definition_says_and_give_every_word_once(
    found: list[Cue], cuts: list[int]
) -> None:
    track = Subtitles(found)
    edges = [0.0, *(cut / 2 for cut in sorted(cuts)), 60.0]
    given_texts = [track.between(start_s, end_s) for start_s, end_s in pairwise(edges)]
    in_order = sorted(found, key=lambda cue: (cue.start_s, cue.end_s))
    assert given_texts == [
        [text for cue in in_order if (text := literal(cue, start_s, end_s))]
        for start_s, end_s in pairwise(edges)
    ]
    said = sorted(word for texts in given_texts for text in texts for word in text.split())
    assert said == sorted(word for cue in found for word in cue.text.split())
    assert track.lost is None


def test_a_bound_cuts_a_step_and_says_what_is_left_out() -> None:
    full = Subtitles([Cue(0, 1, "abcd " * 300), Cue(0, 2, "efgh " * 30_000)])
    first, second = full.between(0, 3)
    assert _MOST_OF_STEP - 5 <= len(first) + len(second) <= _MOST_OF_STEP
    assert {*first.split(), *second.split()} == {"abcd", "efgh"}
    assert "a step has more" in str(full.lost)


def said(text: str) -> str:
    return " / ".join(cue.text for cue in make_cues([SubtitleLine(0, 1, text)]))


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
        SubtitleLine(0.1, 2.5, " \nso<00:00:00.300><c> today</c><00:00:00.560><c> we</c>"),
        SubtitleLine(2.5, 2.51, "so today we\n "),
        SubtitleLine(
            2.51,
            5.0,
            "so today we\ntalk<00:00:02.600><c> of</c><00:01:03.000><c> sta</c><00:01:04.000>rs",
        ),
        SubtitleLine(5.0, 5.01, "talk of stars\n "),
        SubtitleLine(5.01, 7.0, "talk of stars\n[Music]"),
        SubtitleLine(7.5, 8.0, "talk of stars"),
    ]
    assert list(make_cues(rolling)) == [
        Cue(0.1, 2.5, "so today we", ((0.1, "so"), (0.3, "today"), (0.56, "we"))),
        Cue(2.51, 5.0, "talk of stars", ((2.51, "talk"), (2.6, "of"), (63.0, "stars"))),
        # Said again after a pause.
        Cue(7.5, 8.0, "talk of stars"),
    ]


def test_layers_and_rows_that_grow_are_said_once_in_any_order() -> None:
    lines = [
        SubtitleLine(3, 4, "b\nc"),
        SubtitleLine(0, 1, "a"),
        SubtitleLine(0, 1, "a"),
        SubtitleLine(1, 2, "a\nb"),
        SubtitleLine(2, 3, "b"),
    ]
    assert [cue.text for cue in make_cues(lines)] == ["a", "b", "c"]
