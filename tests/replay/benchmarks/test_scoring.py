"""Official rules as the published code has them, loose where it is loose."""

import tomllib
from pathlib import Path

import pytest

from protokv.replay.benchmarks import BENCHMARKS

ANSWERS = tomllib.loads((Path(__file__).parent / "answers.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("named", ANSWERS)
def test_an_answer_scores_by_the_rule_of_its_data_set(named: str) -> None:
    dataset, _, kind = named.partition(" ")
    for said, rows in ANSWERS[named].items():
        for answer, expected in rows:
            right = BENCHMARKS[dataset].is_right(answer, expected, kind)
            assert right is (said == "right"), answer


def test_means_are_those_that_papers_print() -> None:
    real_time = dict.fromkeys(("OCR", "ACR", "ATR", "STU", "FPD", "OJR"), 0.6)
    tasks = {"EPM": 0.6, "ASI": 0.4, "HLD": 0.2} | real_time
    shares = {
        "backward": 0.4,
        "backward without HLD": 0.5,
        "real-time": 0.6,
        "mean of real-time and backward": 0.5,
    }
    assert BENCHMARKS["ovo-bench"].means(tasks) == pytest.approx(shares)
    found = BENCHMARKS["ovo-bench"].means(tasks | dict.fromkeys(("REC", "SSR", "CRR"), 0.2))
    assert found["mean of the three categories (official)"] == pytest.approx((0.4 + 0.6 + 0.2) / 3)
    assert BENCHMARKS["mlvu"].means({"plotQA": 0.5}) == {}
    lengths = BENCHMARKS["videomme"].means({"short": 0.3, "medium": 0.6, "long": 0.9})
    assert lengths == {"overall (mean of lengths)": pytest.approx(0.6)}
