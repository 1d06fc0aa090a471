"""When an answer is the expected one."""

from __future__ import annotations

import pytest

from protokv.replay.judge import is_expected


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [("Red.", "red", True), ("  the  Ring", "the ring", True), ("yes", "no", False), ("", "red", False)],
)
def test_answers_are_compared_as_words(answer: str, expected: str, right: bool) -> None:
    assert is_expected(answer, expected) is right
