"""The labels of links on a video made by hand, their losses, and the attention that training
teaches.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from samples.training.batches import encode_question
from samples.training.gaze import measure_gaze, measure_miss, read_gaze
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
from samples.training.model import make_model
from samples.training.tests.helpers import BAR, RING, STAR, make_video
from samples.training.time_links import label_beginnings, label_followed, label_over_time
from samples.training.traces import measure_traces
from samples.training.visual_tokens import N_PREFIX, VisualTokens, make_positions
from samples.training.vocabulary import encode
from samples.worlds.phrases import TEMPLATES, TIME_TYPES
from samples.worlds.pictures import COLOUR_NAMES, SHAPES
from samples.worlds.questions import Fact
from tests.tolerance import near


def _shapes(bits):
    return {SHAPES[i] for i in np.flatnonzero(bits)}


def test_tokens_tell_which_shapes_began_before_their_event_began():
    earlier = [
        _shapes(bits) for bits in find_earlier_shapes(make_video(), find_beginnings(make_video()))
    ]
    assert earlier[:2] == [set(), set()]
    # The bar's second step is not after the ring; the ring and the bar began in one second.
    assert earlier[3:6] == [{"star"}] * 3
    assert earlier[6] == {"star", "ring", "bar"}


def test_visual_tokens_tell_their_shifted_time_and_lit_ones_their_bag():
    labels = LinkLabels()
    label_video(labels, 1, make_video(), 100, 3)
    found = labels.tensors(False, False)
    clock = found["clock"]
    bag = found["bag"]
    assert clock.videos.tolist() == [1] * 8
    assert clock.positions.tolist() == list(range(3, 11))
    assert [int(bits.sum()) for bits in clock.bits] == [
        int((t + 100 > BOUNDS).sum()) for t in make_video().times
    ]
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
    assert [_shapes(bits) for bits in found["bag_asked"].bits] == [
        {"star"},
        {"star", "ring", "bar"},
    ]
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
    assert (
        found["part"].positions.tolist()
        == found["end"].positions.tolist()
        == [40 + words.index(encode("ring")[0])]
    )
    assert found["part"].bits.sum().item() == (PARTS < 13 / 20).sum()
    assert found["end"].bits.sum().item() == (BOUNDS < 20).sum()
    assert not {"later", "other"} & set(found)
    # A named shape that is not evidence has no labels.
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


def test_lit_tokens_tell_which_event_begins_and_are_of_the_latest_one_or_not():
    labels = LinkLabels()
    label_beginnings(labels, 2, make_video(), 3)
    found = labels.tensors(False, False)
    lit = [3 + i for i in (0, 1, 3, 4, 5, 6)]
    for name in ("onset", "latest", "lit"):
        assert found[name].videos.tolist() == [2] * 6
        assert found[name].positions.tolist() == lit
    marked = {
        name: [tuple(np.flatnonzero(row)) for row in found[name].bits]
        for name in ("onset", "latest")
    }
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
    assert all(
        own.positions.tolist() == [40 + words.index(encode("star")[0])] for own in found.values()
    )
    assert found["times"].bits.tolist() == [[1.0, 0.0, 0.0]]
    assert found["until"].bits[0].sum() == (BOUNDS < 29).sum()
    assert (int(found["opening"].bits.argmax()), int(found["closing"].bits.argmax())) == (4, 7)
    assert set(tell(replace(video, slow=frozenset({STAR})))) == {
        "looks",
        "until",
        "opening",
        "closing",
    }


def test_shape_words_asked_about_over_time_are_those_of_all_such_questions_and_of_where():
    def tell(text):
        labels = LinkLabels()
        label_followed(labels, 1, encode_question(text, "yes")[0], 50)
        found = labels.tensors(False, False)
        return found["follows"].bits.flatten().tolist() if found else None

    for kind, templates in TEMPLATES.items():
        for template in templates:
            told = tell(
                template.format(
                    shape="star", other="ring", colour="red", place="center", name="Mara"
                )
            )
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


def test_each_kind_of_token_has_its_own_mean_and_words_weigh_most():
    lit = torch.tensor([[True, False, True]])
    present = torch.tensor([[True, True, False]])
    words = torch.tensor([[True, True, True, False]])
    changed = torch.tensor([0]), torch.tensor([N_PREFIX + 4])
    moved = torch.zeros(1, N_PREFIX + 7, 8)
    for position, size in (
        (N_PREFIX, 1.0),
        (N_PREFIX + 1, 2.0),
        (N_PREFIX + 3, 3.0),
        (N_PREFIX + 4, 4.0),
    ):
        moved[0, position] = size
    # One video token and one word are padding.
    moved[0, N_PREFIX + 2] = moved[0, N_PREFIX + 6] = 100.0
    loss, told = measure_traces(moved, lit, present, words, changed)
    mean = 9.0 / (N_PREFIX + 2)
    assert told == pytest.approx(
        {"trace_lit": 1.0, "trace_unlit": 2.0, "trace_words": mean**0.5, "trace_changed": 4.0}
    )
    assert loss.item() == pytest.approx(2 * (1 + 4) + 30 * mean + 0.03 * 16)


def test_the_gaze_of_a_row_is_attention_turned_pair_by_pair():
    torch.manual_seed(0)
    model = make_model(4, layers=2)
    tokens = VisualTokens(
        torch.randn(2, 5, 128),
        torch.tensor([[0, 1, 1, 7, 9], [3, 4, 5, 6, 6]]),
        torch.tensor([[0, 8, 1, 2, 5], [4, 4, 7, 3, 0]]),
        torch.tensor([10, 8]),
        present=torch.tensor([[True] * 5, [True] * 4 + [False]]),
        seen=torch.tensor([[True, False, True, True, True]] * 2),
        bias=torch.rand(2, 5),
    )
    questions = torch.randint(1, 20, (2, 2, 3))
    nv = N_PREFIX + 5
    state = torch.randn(2, nv + 6, 128)
    rows = torch.tensor([0, 1, 1]), nv + torch.tensor([1, 0, 5])
    gaze = read_gaze(model, 1, state, tokens, questions, rows)
    assert gaze.shape == (3, 4, nv)

    layer = model.model.language_model.layers[1]
    rope = model.config.text_config.rope_parameters
    component = [i for i, n in enumerate(rope["mrope_section"]) for _ in range(n)]
    places = make_positions(tokens, 2, 3)

    def turned(projection, video, position):
        x = projection(layer.input_layernorm(state[video, position])).view(-1, 32)
        pairs = torch.complex(x[:, :16], x[:, 16:])
        angles = torch.stack(
            [
                places[component[i], video, position] * rope["rope_theta"] ** (-i / 16)
                for i in range(16)
            ]
        )
        return pairs * torch.polar(torch.ones(16), angles)

    for own, (video, position) in zip(
        gaze, zip(*(r.tolist() for r in rows), strict=True), strict=True
    ):
        q = turned(layer.self_attn.q_proj, video, position)
        scores = torch.full((4, nv), -torch.inf)
        for key in range(nv):
            i = key - N_PREFIX
            if i >= 0 and not (tokens.present[video, i] and tokens.seen[video, i]):
                continue
            k = turned(layer.self_attn.k_proj, video, key)
            for head in range(4):
                scores[head, key] = (q[head] * k[head // 2].conj()).sum().real / 32**0.5
            scores[:, key] += tokens.bias[video, i] if i >= 0 else 0
        # A norm, a projection, a rotation, the product over a head and a softmax.
        torch.testing.assert_close(
            own.exp(), scores.softmax(-1), **near(scores.softmax(-1), 2 * 128 + 6 + 32 + nv)
        )


def test_a_gaze_is_lost_unless_it_rests_evenly_and_misses_what_it_does_not_see():
    wanted = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    even = torch.tensor([[[0.5, 0.0, 0.5, 0.0]] * 2]).log()
    uneven = torch.tensor([[[0.9, 0.0, 0.1, 0.0]] * 2]).log()
    spread = torch.tensor([[[0.25] * 4, [0.5, 0.0, 0.25, 0.25]]]).log()
    torch.testing.assert_close(measure_gaze(even, wanted), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        measure_gaze(uneven, wanted), torch.tensor(-0.5 * math.log(0.9 * 0.1) - math.log(2))
    )
    torch.testing.assert_close(measure_miss(uneven, wanted), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        measure_miss(spread, wanted), torch.tensor(-math.log((0.5 + 0.75) / 2))
    )
