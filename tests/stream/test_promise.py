"""Of the answers that are given, at most the promised share is wrong; the others are withheld."""

from dataclasses import replace
from fractions import Fraction
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.errors import ConfigError
from protokv.ingestion import StandingQuestion
from protokv.ingestion.asking import StandingAsker
from protokv.memories import DurableConfig
from protokv.replay.calibrate import (
    calibrate_answers,
    save_calibrations,
    tabulate_promises,
)
from protokv.state.sources import StreamSegment
from protokv.stream.promise import (
    CONFIDENCE,
    UNKNOWN,
    Calibration,
    ScoredAnswer,
    count_needed_answers,
    find_promise_rule,
    measure_novelty,
)
from protokv.stream.session import Session
from protokv.video.source import SourceInfo
from tests.conftest import watched
from tests.replay.rows import ROW

if TYPE_CHECKING:
    from protokv.video import Source

INFO = SourceInfo("v.mp4", "file", "pyav", "mp4", "h264", "yuv420p", 4, 4, 0, 2.0)
TEXTS = ("What colour was the star?", "What colour was the disk?", "What colour was the ring?")


def make_calibration(
    chooses: list[tuple[float, bool]], tests: list[tuple[float, bool]]
) -> Calibration:
    ordered = [
        tuple(ScoredAnswer(*one) for one in sorted(half, key=lambda one: -one[0]))
        for half in (chooses, tests)
    ]
    return Calibration(
        model={},
        memory={},
        shares=(0.1, 0.5),
        videos=1,
        types={"": 1},
        questions=TEXTS,
        novelty=measure_novelty(TEXTS),
        chooses=ordered[0],
        tests=ordered[1],
    )


_HALF = st.lists(st.tuples(st.sampled_from([-3.0, -2.0, -1.0, 0.0]), st.booleans()), max_size=90)


@given(_HALF, _HALF, st.sampled_from([0.05, 0.2, 0.5]))
def test_a_threshold_passes_the_exact_binomial_test(
    chooses: list[tuple[float, bool]], tests: list[tuple[float, bool]], promise: float
) -> None:
    least = make_calibration(chooses, tests).find_threshold(promise)
    if least is None:
        return
    given = [wrong for sure, wrong in tests if sure >= least]
    n = len(given)
    share = Fraction(promise)
    chance = sum(comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(sum(given) + 1))
    assert chance <= 1 - CONFIDENCE + 1e-9


def test_nine_of_ten_calibrations_keep_their_promise() -> None:
    """Answers with a log probability of `-x` are wrong with the probability `x / 2`."""
    rng = np.random.default_rng(0)
    broken = 0
    for _ in range(300):
        drawn = rng.random(200)
        answers = [
            (-x, bool(wrong)) for x, wrong in zip(drawn, rng.random(200) < drawn / 2, strict=True)
        ]
        least = make_calibration(answers[:100], answers[100:]).find_threshold(0.15)
        # The mean of x / 2 below a threshold is a quarter of it.
        broken += least is not None and -least / 4 > 0.15
    assert broken <= 300 * (1 - CONFIDENCE)


def test_a_promise_needs_as_many_right_answers_as_are_said() -> None:
    for promise in (0.01, 0.05, 0.2):
        needed = count_needed_answers(promise)
        for n, found in ((needed, -1.0), (needed - 1, None)):
            right = [(-1.0, False)] * n
            assert make_calibration(right, right).find_threshold(promise) == found


def calibrate(session: Session, folder: Path, sure: float, *, wrong: int = 0) -> None:
    """Write a calibration of 40 answers of one log probability."""
    rows = [
        replace(
            ROW,
            memory=session.config.name,
            budget=session.config.budget,
            tokens_seen=session.clock.tokens_seen,
            config=session.config.to_dict(),
            model={"weights_digest": session.backbone.identity.weights_digest},
            question=TEXTS[number % 3],
            question_id=str(number),
            correct=number >= wrong,
            mean_logprob=sure,
        )
        for number in range(40)
    ]
    save_calibrations(folder / "mine.json", calibrate_answers(rows))


@pytest.fixture
def session(tiny: Backbone) -> Session:
    return watched(tiny, DurableConfig(budget=24), range(6))


def test_an_answer_is_given_above_the_threshold_and_withheld_below(
    session: Session, tmp_path: Path
) -> None:
    decoding = Decoding(max_new_tokens=3, top_logprobs=1)
    plain = session.ask(TEXTS[0], decoding)
    for sure, known in ((plain.mean_logprob - 0.1, True), (plain.mean_logprob + 0.1, False)):
        calibrate(session, tmp_path, sure)
        rule = find_promise_rule(session, tmp_path, 0.2)
        pieces = list(session.stream(TEXTS[0], decoding, promise=rule))
        answer = session.ask(TEXTS[0], decoding, promise=rule)
        assert pieces == [answer.text]
        assert answer.text == (plain.text if known else UNKNOWN)
        assert answer.promise is not None
        assert answer.promise.known is known
        assert (answer.chances is None) is not known
        assert answer.evidence is not None
        other = session.ask("How many dogs are there?", decoding, promise=rule)
        assert other.promise is not None
        assert other.promise.why == "not calibrated for such a question"


def test_another_share_of_kept_tokens_is_not_calibrated(session: Session, tmp_path: Path) -> None:
    calibrate(session, tmp_path, -100.0)
    rule = find_promise_rule(session, tmp_path, 0.2)
    session.clock = replace(session.clock, tokens_seen=2 * session.clock.tokens_seen)
    answer = session.ask(TEXTS[0], promise=rule)
    assert answer.promise is not None
    assert "this memory keeps" in answer.promise.why


def test_what_cannot_be_promised_is_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is calibrated for durable"):
        find_promise_rule(session, tmp_path, 0.2)
    calibrate(session, tmp_path, -1.0, wrong=40)
    with pytest.raises(ConfigError, match="mine cannot promise at most 20% wrong"):
        find_promise_rule(session, tmp_path, 0.2)
    other = watched(session.backbone, DurableConfig(budget=24, split=(1, 4)), range(2))
    with pytest.raises(ConfigError, match="nothing is calibrated"):
        find_promise_rule(other, tmp_path, 0.2)
    (tmp_path / "torn.json").write_text("[{")
    with pytest.raises(ConfigError, match="is no calibration"):
        find_promise_rule(session, tmp_path, 0.2)


def test_a_question_at_several_delays_counts_once() -> None:
    rows = [
        replace(ROW, question_id=str(n), delay_s=float(delay), mean_logprob=-1.0)
        for n in range(10)
        for delay in range(3)
    ]
    (made,) = calibrate_answers(rows)
    assert len(made.chooses) + len(made.tests) == 10
    assert calibrate_answers(rows[::-1]) == [made]


def test_a_withheld_answer_is_right_where_there_is_none() -> None:
    """Sure answers are right, unsure ones are wrong, and half of both have none."""
    choice = "Which? Options: A. red; B. Unable to answer;"
    ways = (("red", ""), ("Unknown.", ""), ("B", choice), ("A", choice))
    rows = [
        replace(
            ROW,
            config={"kind": "full", "budget": 64},
            question_id=str(n),
            expected=ways[n % 4][0],
            prompt=ways[n % 4][1],
            correct=n < 100,
            mean_logprob=-0.1 if n < 100 else -9.0,
        )
        for n in range(200)
    ]
    assert [row.is_unanswerable for row in rows[:4]] == [False, True, True, False]
    (made,) = calibrate_answers(rows)
    at_10_percent = list(tabulate_promises([made]))[2]
    assert at_10_percent["wrong"] == 0
    assert at_10_percent["unanswerable"] == 1
    assert 0.3 < at_10_percent["answered"] < 0.7
    bare = calibrate_answers([replace(row, correct=False) for row in rows])
    assert {row["unanswerable"] for row in tabulate_promises(bare)} == {None}


def test_rows_that_do_not_say_how_sure_they_are_cannot_calibrate() -> None:
    rows = [replace(ROW, question_id=str(n)) for n in range(4)]
    with pytest.raises(ConfigError, match="how sure"):
        calibrate_answers(rows)


def test_a_standing_question_has_its_promise_in_its_news(session: Session, tmp_path: Path) -> None:
    source = cast("Source", SimpleNamespace(info=INFO))
    asked = StandingQuestion(TEXTS[0], every_s=1.0, at_most_wrong=0.2, calibrations=str(tmp_path))
    with pytest.raises(ConfigError, match="nothing is calibrated"):
        StandingAsker(session, [asked], [], source, StreamSegment())
    calibrate(session, tmp_path, 0.0)
    (news,) = StandingAsker(session, [asked], [], source, StreamSegment()).ask_due(0.0)
    assert news.answer == UNKNOWN
    assert news.promise is not None
    assert (news.promise.known, news.promise.why) == (False, "not sure enough")
    assert news.evidence
