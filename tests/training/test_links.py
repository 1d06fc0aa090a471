"""The labels of links on videos made by hand, and what their losses ask."""

from __future__ import annotations

import numpy as np
import torch

from protokv.mini.questions import Fact
from protokv.mini.sprites import COLOUR_NAMES, SHAPES
from protokv.mini.vocabulary import encode
from samples.training.links import (
    BOUNDS,
    LINKS,
    PARTS,
    LinkLabels,
    find_beginnings,
    find_earlier_shapes,
    label_question,
    label_video,
    make_readings,
    measure_links,
)
from tests.training.by_hand import make_video


def _shapes(bits):
    return {SHAPES[i] for i in np.flatnonzero(bits)}


def test_tokens_tell_which_shapes_began_before_their_event_began():
    earlier = [_shapes(bits) for bits in find_earlier_shapes(make_video(), find_beginnings(make_video()))]
    assert earlier[:2] == [set(), set()]
    # The bar's second step is not after the ring; the ring and the bar began in one second.
    assert earlier[3:6] == [{"star"}] * 3
    assert earlier[6] == {"star", "ring", "bar"}


def test_visual_tokens_tell_their_shifted_time_and_lit_ones_their_bag():
    labels = LinkLabels()
    label_video(labels, 1, make_video(), 100, 3)
    found = labels.tensors(False, False)
    clock, bag = found["clock"], found["bag"]
    assert clock.videos.tolist() == [1] * 8
    assert clock.positions.tolist() == list(range(3, 11))
    assert [int(bits.sum()) for bits in clock.bits] == [int((t + 100 > BOUNDS).sum()) for t in make_video().times]
    assert bag.positions.tolist() == [3, 4, 6, 7, 8, 9]
    assert set(labels.tensors(True, True)) == set(labels.tensors(True, False)) == {"clock"}


def _told(text, evidence, shift=0):
    labels = LinkLabels()
    words = encode(text, "order")
    label_question(labels, 0, make_video(), shift, words, Fact("", evidence, 0.0), 40)
    return words, labels.tensors(False, False)


def test_the_second_shape_word_tells_which_is_later_and_when_the_first_was():
    words, found = _told("Which came first, the bar or the star?", (2, 3), shift=7)
    places = [40 + words.index(encode(shape)[0]) for shape in ("bar", "star")]
    assert found["when"].positions.tolist() == places
    assert found["when"].bits.sum(1).tolist() == [(BOUNDS < 12).sum(), (BOUNDS < 16).sum()]
    assert [_shapes(bits) for bits in found["bag_asked"].bits] == [{"star"}, {"star", "ring", "bar"}]
    assert found["later"].positions.tolist() == places[1:]
    assert found["later"].bits.tolist() == [[1.0]]
    assert found["other"].bits.sum().item() == (BOUNDS < 12).sum()
    looks = found["look"].bits.bool()
    assert [int(row[: len(COLOUR_NAMES)].nonzero()) for row in looks] == [2, 3]
    assert [int(row[len(COLOUR_NAMES) :].nonzero()) for row in looks] == [8, 4]
    assert not {"end", "part"} & set(found)
    _, swapped = _told("Which came first, the star or the bar?", (3, 2))
    assert swapped["later"].bits.tolist() == [[0.0]]


def test_the_shape_word_of_a_question_with_one_tells_its_part_of_the_stream():
    words, found = _told("In which tenth of the video was the ring?", (1,), shift=8)
    assert found["part"].positions.tolist() == found["end"].positions.tolist() == [40 + words.index(encode("ring")[0])]
    assert found["part"].bits.sum().item() == (PARTS < 13 / 20).sum()
    assert found["end"].bits.sum().item() == (BOUNDS < 20).sum()
    assert not {"later", "other"} & set(found)
    # A shape that is named and that the answer does not rest on is asked nothing.
    assert not _told("Was there a star?", (1,))[1]


def test_losses_are_of_the_named_layer_and_position_and_fall_with_the_right_reading():
    labels = LinkLabels()
    label_video(labels, 0, make_video(), 0, 3)
    found = labels.tensors(False, False)
    torch.manual_seed(0)
    tapped = {layer: torch.randn(1, 12, 16) for layer in (1, 3)}
    readings = make_readings(16, LINKS)
    bag = measure_links(LINKS, readings, tapped, found, ("bag", "later"))
    assert set(bag) == {"bag"}
    loss, right = bag["bag"]
    assert right.shape == (6, LINKS["bag"].size)
    state = torch.nn.functional.rms_norm(tapped[3][0, found["bag"].positions], (16,), None, 1e-6)
    told = readings["bag"](state)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(told, found["bag"].bits)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(right, (told > 0) == found["bag"].bits.bool())
