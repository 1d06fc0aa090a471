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
