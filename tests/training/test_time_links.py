"""The labels of what happens to a shape over time, on a video made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from protokv.mini.phrases import EVERY_TEMPLATE, TIME_TYPES
from protokv.mini.sprites import COLOUR_NAMES
from protokv.mini.vocabulary import encode
from samples.training.batches import encode_question
from samples.training.links import BOUNDS, LinkLabels
from samples.training.time_links import label_beginnings, label_followed, label_over_time
from tests.training.by_hand import BAR, RING, STAR, make_video


def test_lit_tokens_tell_which_event_begins_and_are_of_the_latest_one_or_not():
    labels = LinkLabels()
    label_beginnings(labels, 2, make_video(), 3)
    found = labels.tensors(False, False)
    lit = [3 + i for i in (0, 1, 3, 4, 5, 6)]
    for name in ("onset", "latest", "lit"):
        assert found[name].videos.tolist() == [2] * 6
        assert found[name].positions.tolist() == lit
    marked = {name: [tuple(np.flatnonzero(row)) for row in found[name].bits] for name in ("onset", "latest")}
    assert marked["onset"] == [(STAR,), (), (RING,), (BAR,), (), (STAR,)]
    assert marked["latest"] == [(), (), (RING,), (BAR,), (BAR,), (STAR,)]
    assert found["lit"].bits.tolist() == [[1.0]] * 6
    told = [row.nonzero().flatten().tolist() for row in found["marks"].bits]
    n = len(COLOUR_NAMES)
    assert told == [[0, n + 4], [], [1, n], [2, n + 8], [], [3, n + 4]]


def test_the_shape_word_of_a_question_over_time_tells_how_often_the_places_and_the_last_time():
    words = encode("How many times did the star appear?", "time")
    video = make_video()
    video.events[-1] = video.events[-1]._replace(place=7)

    def tell(video):
        labels = LinkLabels()
        label_over_time(labels, 0, video, 20, words, STAR, 40)
        return labels.tensors(False, False)

    found = tell(video)
    assert set(found) == {"looks", "until", "times", "opening", "closing"}
    looks = found["looks"].bits[0].bool()
    assert looks[: len(COLOUR_NAMES)].nonzero().flatten().tolist() == [0, 3]
    assert looks[len(COLOUR_NAMES) :].nonzero().flatten().tolist() == [4, 7]
    assert all(own.positions.tolist() == [40 + words.index(encode("star")[0])] for own in found.values())
    assert found["times"].bits.tolist() == [[1.0, 0.0, 0.0]]
    assert found["until"].bits[0].sum() == (BOUNDS < 29).sum()
    assert (int(found["opening"].bits.argmax()), int(found["closing"].bits.argmax())) == (4, 7)
    assert set(tell(replace(video, slow=frozenset({STAR})))) == {"looks", "until", "opening", "closing"}


def test_shape_words_that_may_be_asked_about_over_time_are_those_of_all_such_questions_and_of_where():
    def tell(text):
        labels = LinkLabels()
        label_followed(labels, 1, encode_question(text, "yes")[0], 50)
        found = labels.tensors(False, False)
        return found["follows"].bits.flatten().tolist() if found else None

    for kind, templates in EVERY_TEMPLATE.items():
        for template in templates:
            told = tell(template.format(shape="star", other="ring", colour="red", place="center"))
            named = ("{shape}" in template) + ("{other}" in template)
            if kind in TIME_TYPES:
                assert told == [1.0], template
            elif kind != "where":
                assert told == ([0.0] * named or None), template
    assert tell("Where did the star appear?") == [1.0]
    assert tell("What was the position of the star?") == [0.0]
    labels = LinkLabels()
    label_followed(labels, 1, encode_question("Was the star seen before the ring?", "yes")[0], 50)
    assert labels.tensors(False, False)["follows"].positions.tolist() == [53, 57]
