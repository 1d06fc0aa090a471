"""The conclusion of a report says which memory is best, and never calls a difference clear that may be chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protokv.replay.report import summarise
from protokv.replay.rows import Row
from tests.replay.rows import ROW


def answers(memory: str, right: float, *, budget: int = 64, delay_s: float = 30.0, videos: int = 10) -> list[Row]:
    """Return ten answers about each video, of which a share is right."""
    row = replace(ROW, memory=memory, budget=budget, delay_s=delay_s)
    return [
        replace(row, video=str(v), question_id=str(q), correct=q < 10 * right) for v in range(videos) for q in range(10)
    ]


def conclusion(*rows: list[Row]) -> Any:
    return summarise([row for part in rows for row in part])["conclusion"]


def test_a_clear_winner_is_named_with_its_interval_its_lead_and_the_full_cache_beside_it() -> None:
    found = conclusion(answers("full", 1.0), answers("durable", 0.9), answers("paper", 0.2), answers("rekv", 0.5))
    assert found["text"] == (
        "After 30 s, with 64 tokens, durable answers best: 90% right (95% interval 83 to 94), which is 40 points "
        "(30 to 50) more than rekv and clearly more than paper (20%). The full cache, which keeps every token, has "
        "100%: clearly more."
    )
    assert not found["details"]


def test_a_lead_that_may_be_chance_is_called_so() -> None:
    lucky = answers("paper", 0.5)
    lucky[5] = replace(lucky[5], correct=True)
    found = conclusion(answers("durable", 0.5), lucky, answers("rekv", 0.1))
    assert "no memory is clearly the best: paper has 51% right" in found["text"]
    assert "the difference to durable (50%) may be chance; clearly worse: rekv (10%)" in found["text"]


def test_the_longest_delay_that_all_memories_share_decides() -> None:
    found = conclusion(
        answers("durable", 0.2, delay_s=0.0), answers("durable", 0.9), answers("durable", 1.0, delay_s=99.0),
        answers("paper", 0.9, delay_s=0.0), answers("paper", 0.1),
    )  # fmt: skip
    assert found["text"].startswith("After 30 s, with 64 tokens, durable answers best: 90%")


def test_one_video_makes_no_difference_clear_that_a_few_answers_decide() -> None:
    found = conclusion(answers("durable", 0.7, videos=1), answers("paper", 0.5, videos=1))
    assert "may be chance" in found["text"]


def test_several_budgets_are_one_sentence_and_one_more_for_each() -> None:
    small = {"budget": 8}
    same = conclusion(
        answers("durable", 0.9), answers("paper", 0.2), answers("durable", 0.8, **small), answers("paper", 0.1, **small)
    )
    assert same["text"] == (
        "After 30 s, durable clearly answers best at every budget: "
        "90% right with 64 tokens and 80% right with 8 tokens."
    )
    assert len(same["details"]) == 2
    tied = conclusion(
        answers("durable", 0.9), answers("paper", 0.9), answers("durable", 0.8, **small), answers("paper", 0.1, **small)
    )
    assert "durable is at every budget the best memory or not clearly worse than it" in tied["text"]
    assert tied["text"].endswith("no other memory is.")
    turned = conclusion(
        answers("durable", 0.9), answers("paper", 0.1), answers("durable", 0.1, **small), answers("paper", 0.9, **small)
    )
    assert turned["text"] == (
        "After 30 s, the memory with the most right answers depends on the budget: durable with 64 tokens (90%) and "
        "paper with 8 tokens (90%)."
    )


def test_a_single_memory_or_the_full_cache_alone_wins_nothing() -> None:
    assert "no other memory was measured" in conclusion(answers("durable", 0.9))["text"]
    assert conclusion(answers("full", 0.9))["budgets"] == []


def test_memories_that_share_no_budget_are_not_compared() -> None:
    found = conclusion(answers("durable", 0.9), answers("durable, S = 4", 0.2, budget=8))
    assert found["text"] == (
        "No two memories were measured at one budget. After 30 s: durable 90% right with 64 tokens and "
        '"durable, S = 4" 20% right with 8 tokens.'
    )
