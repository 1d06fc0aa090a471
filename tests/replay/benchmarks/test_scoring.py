"""Official rules as the published code has them, loose where it is loose."""

import pytest

from protokv.replay.benchmarks import BENCHMARKS

# Data set and type -> answer, what is expected, and whether it is right.
ANSWERS = {
    # The letter anywhere.
    "ovo-bench EPM": [
        ("B", "B", True),
        ("B. green", "B", True),
        ("A Boy", "B", True),
        ("b", "B", False),
    ],
    "ovo-bench REC": [("3 times, at 10 s", "310", True), ("3.", "3", True), ("13", "3", False)],
    "ovo-bench SSR": [("Yes, he does.", "Yes", True), ("yes", "Yes", False)],
    "ovo-bench CRR": [("N", "No", True), ("Not yet", "No", True)],
    # The first character.
    "streamingbench Counting": [
        ("B.", "B", True),
        ("Both of them", "B", True),
        (" B", "B", False),
        ("(B)", "B", False),
        ("", "B", False),
    ],
    # The first capital A to D after common prefixes.
    "videomme short": [
        ("The best answer is B", "B", True),
        ("A man in a Black coat", "A", True),
        ("It is Blue", "B", True),
        ("The answer is C.", "C", True),
    ],
    # The character before ")", or all of it.
    "mlvu ego": [
        ("B) green", "B", True),
        ("(B) green", "B", True),
        ("B", "B", True),
        ("B. green", "B", False),
        ("green :)", "B", False),
    ],
    # Until a judge has read it.
    "rvs-ego Scene Summary": [
        ("Chopping of vegetables", "Chopping vegetables.", True),
        ("a dog", "Chopping vegetables.", False),
        ("the red ring", "Red ring.", True),
        ("red", "red ring", True),
        ("red", "a red and blue ring", False),
    ],
}


@pytest.mark.parametrize("named", ANSWERS)
def test_an_answer_scores_by_the_rule_of_its_data_set(named: str) -> None:
    dataset, _, kind = named.partition(" ")
    for answer, expected, right in ANSWERS[named]:
        assert BENCHMARKS[dataset].is_right(answer, expected, kind) == right, answer


def test_means_are_those_that_papers_print() -> None:
    tasks = {
        "EPM": 0.6,
        "ASI": 0.4,
        "HLD": 0.2,
        "OCR": 0.9,
        "ACR": 0.9,
        "ATR": 0.9,
        "STU": 0.3,
        "FPD": 0.3,
        "OJR": 0.3,
    }
    found = BENCHMARKS["ovo-bench"].means(tasks)
    shares = {
        "backward": 0.4,
        "backward without HLD": 0.5,
        "real-time": 0.6,
        "mean of real-time and backward": 0.5,
    }
    assert found == pytest.approx(shares)
    found = BENCHMARKS["ovo-bench"].means(tasks | {"REC": 0.1, "SSR": 0.2, "CRR": 0.3})
    assert found["mean of the three categories (official)"] == pytest.approx((0.4 + 0.6 + 0.2) / 3)
    seven = dict.fromkeys((kind.name for kind in BENCHMARKS["mlvu"].types), 0.5)
    assert BENCHMARKS["mlvu"].means(seven) == {"M-Avg (official)": 0.5}
    assert BENCHMARKS["mlvu"].means(dict.fromkeys(list(seven)[1:], 0.5)) == {}
    lengths = BENCHMARKS["videomme"].means({"short": 0.3, "medium": 0.6, "long": 0.9})
    assert lengths == {"overall (mean of lengths)": pytest.approx(0.6)}
