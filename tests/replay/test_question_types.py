"""Types of questions: every one of the embedded model is known, and what is unknown is not taken on trust."""

from __future__ import annotations

from protokv.mini.phrases import TYPES as OF_THE_WORLD
from protokv.replay.question_types import GROUPS, TYPES, find_type


def test_every_type_of_the_embedded_model_is_registered() -> None:
    assert set(OF_THE_WORLD) <= TYPES.keys()
    assert not find_type("count").retrospective
    assert find_type("which_first").group == "order"


def test_groups_are_those_of_the_types() -> None:
    assert GROUPS == ("content", "order")
    assert {kind.group for kind in TYPES.values()} == {*GROUPS, "other"}


def test_an_unknown_type_may_change_with_time_and_a_question_without_one_is_asked() -> None:
    assert not find_type("mood").retrospective
    assert find_type("").retrospective
    assert find_type("mood").group == find_type("").group == "other"
