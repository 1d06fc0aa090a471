"""Types of questions: every one of the embedded model is known, and what is unknown is not taken on trust."""

from __future__ import annotations

import pytest

from protokv.mini.phrases import TYPES as OF_THE_WORLD
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.benchmarks.registry import find_type, find_types, order_groups


def test_every_type_of_the_embedded_model_is_registered() -> None:
    assert set(OF_THE_WORLD) <= {kind.name for kind in find_types()}
    assert not find_type("count").retrospective
    assert find_type("which_first").group == "order"


def test_a_name_of_two_data_sets_is_the_type_of_the_one_that_is_asked() -> None:
    assert find_type("count").group == "other"
    assert find_type("count", "mlvu").group == "multi detail"
    assert find_type("EPM", "mlvu").group == "other"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_groups_of_a_data_set_are_those_of_its_types_in_their_order(name: str) -> None:
    assert set(order_groups(name)) == {kind.group for kind in BENCHMARKS[name].types} | {"other"}
    assert order_groups(name)[-1] == "other"
    assert order_groups("ovo-bench")[:3] == ("backward", "real-time", "forward")


def test_an_unknown_type_may_change_with_time_and_a_question_without_one_is_asked() -> None:
    assert not find_type("mood").retrospective
    assert find_type("").retrospective
    assert find_type("mood").group == find_type("").group == "other"
