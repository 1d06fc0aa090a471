"""When two texts are the same answer."""

from __future__ import annotations

import pytest

from protokv.replay.texts import is_expected, token_f1


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [("Red.", "red", True), ("  the  Ring", "the ring", True), ("yes", "no", False), ("", "red", False)],
)
def test_answers_are_compared_as_words(answer: str, expected: str, right: bool) -> None:
    assert is_expected(answer, expected) is right


@pytest.mark.parametrize(
    ("answer", "expected", "share"),
    [
        ("the red ring", "Red ring.", 1.0),
        ("red", "red ring", 2 / 3),
        ("blue", "red", 0.0),
        ("", "", 1.0),
        ("", "red", 0.0),
    ],
)
def test_shared_words_count_by_precision_and_recall(answer: str, expected: str, share: float) -> None:
    assert token_f1(answer, expected) == pytest.approx(share)
