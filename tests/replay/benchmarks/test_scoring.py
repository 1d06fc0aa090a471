"""Official rules as the published code has them, loose where it is loose."""

from __future__ import annotations

import pytest

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.judges import PROMPT_HASH
from protokv.replay.questions import token_f1

OPTIONS = ("red", "green", "blue", "white")


@pytest.mark.parametrize(
    ("dataset", "kind", "answer", "expected", "right"),
    [
        # OVO-Bench: the letter anywhere.
        ("ovo-bench", "EPM", "B", "B", True),
        ("ovo-bench", "EPM", "B. green", "B", True),
        ("ovo-bench", "EPM", "A Boy", "B", True),
        ("ovo-bench", "EPM", "b", "B", False),
        ("ovo-bench", "REC", "3 times, at 10 s", "310", True),
        ("ovo-bench", "REC", "3.", "3", True),
        ("ovo-bench", "REC", "13", "3", False),
        ("ovo-bench", "SSR", "Yes, he does.", "Yes", True),
        ("ovo-bench", "SSR", "yes", "Yes", False),
        ("ovo-bench", "CRR", "N", "No", True),
        ("ovo-bench", "CRR", "Not yet", "No", True),
        # StreamingBench: the first character.
        ("streamingbench", "Counting", "B.", "B", True),
        ("streamingbench", "Counting", "Both of them", "B", True),
        ("streamingbench", "Counting", " B", "B", False),
        ("streamingbench", "Counting", "(B)", "B", False),
        ("streamingbench", "Counting", "", "B", False),
        # VideoMME: the first capital A to D after common prefixes.
        ("videomme", "short", "The best answer is B", "B", True),
        ("videomme", "short", "A man in a Black coat", "A", True),
        ("videomme", "short", "It is Blue", "B", True),
        ("videomme", "short", "The answer is C.", "C", True),
        # MLVU: the character before ")", or all of it.
        ("mlvu", "ego", "B) green", "B", True),
        ("mlvu", "ego", "(B) green", "B", True),
        ("mlvu", "ego", "B", "B", True),
        ("mlvu", "ego", "B. green", "B", False),
        ("mlvu", "ego", "green :)", "B", False),
        # RVS, until a judge has read it.
        ("rvs-ego", "Scene Summary", "Chopping of vegetables", "Chopping vegetables.", True),
        ("rvs-ego", "Scene Summary", "a dog", "Chopping vegetables.", False),
        ("rvs-movie", "Action Caption", "yes", "Yes.", True),
    ],
)  # fmt: skip
def test_an_answer_scores_by_the_rule_of_its_data_set(
    dataset: str, kind: str, answer: str, expected: str, right: bool
) -> None:
    assert BENCHMARKS[dataset].is_right(answer, expected, kind) == right


def test_prompts_are_those_that_rows_were_made_with() -> None:
    assert {name: benchmark.prompt_hash for name, benchmark in BENCHMARKS.items()} == {
        "rvs-ego": "bf085a6e12c9", "rvs-movie": "bf085a6e12c9", "ovo-bench": "5a28140e3bba",
        "streamingbench": "45ade95776e1", "videomme": "28b657a26654", "mlvu": "5fa5819d2a36",
    }  # fmt: skip
    assert PROMPT_HASH == "a40699f04950"


def test_means_are_those_that_papers_print() -> None:
    tasks = {"EPM": 0.6, "ASI": 0.4, "HLD": 0.2, "OCR": 0.9, "ACR": 0.9, "ATR": 0.9, "STU": 0.3, "FPD": 0.3, "OJR": 0.3}
    found = BENCHMARKS["ovo-bench"].means(tasks)
    assert found["backward"] == pytest.approx(0.4)
    assert found["backward without HLD"] == pytest.approx(0.5)
    assert found["mean of real-time and backward"] == pytest.approx(0.5)
    assert "forward" not in found
    found = BENCHMARKS["ovo-bench"].means(tasks | {"REC": 0.1, "SSR": 0.2, "CRR": 0.3})
    assert found["mean of the three categories (official)"] == pytest.approx((0.4 + 0.6 + 0.2) / 3)
    seven = [kind.name for kind in BENCHMARKS["mlvu"].types]
    assert BENCHMARKS["mlvu"].means(dict.fromkeys(seven, 0.5)) == {"M-Avg (official)": 0.5}
    assert BENCHMARKS["mlvu"].means(dict.fromkeys(seven[1:], 0.5)) == {}
    assert BENCHMARKS["videomme"].means({"short": 0.3, "medium": 0.6, "long": 0.9}) == {
        "overall (mean of lengths)": pytest.approx(0.6)
    }


@pytest.mark.parametrize(
    ("answer", "expected", "share"),
    [("the red ring", "Red ring.", 1.0), ("red", "red ring", 2 / 3), ("blue", "red", 0.0), ("", "", 1.0)],
)
def test_shared_words_count_by_precision_and_recall(answer: str, expected: str, share: float) -> None:
    assert token_f1(answer, expected) == pytest.approx(share)
