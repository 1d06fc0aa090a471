"""OVO-Bench: twelve tasks that look back, at the present, or forward from a time of the video.

Source: github.com/JoeLeelyf/OVO-Bench at c34093f, `data/ovo_bench_new.json` (1,640 entries, 3,035 queries, CC BY-NC-SA
4.0), prompts of `constant.py`, rules of `utils/OVOBenchScore.py`. Backward and real-time tasks are multiple choice; the
official rule counts an answer as right if the letter occurs anywhere in it. Forward tasks are probes at several times:
REC counts (all digits of the answer joined), SSR and CRR are answered with yes or no.

A query may see the video up to its `realtime`, rounded up to a second. All keys of HLD are "Unable to answer", so a
model that always refuses has all of them: backward stands with and without it. Papers print two different totals, the
mean of the three categories (the official one) and the mean of real-time and backward alone.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

from protokv.errors import ConfigError
from protokv.replay.benchmarks.base import Annotations, Benchmark, QuestionType, average_types
from protokv.replay.benchmarks.choices import list_options
from protokv.replay.benchmarks.files import find_annotations, number_records, read_field, read_records
from protokv.replay.questions import Question

BACKWARD: Final = ("EPM", "ASI", "HLD")
REAL_TIME: Final = ("OCR", "ACR", "ATR", "STU", "FPD", "OJR")
FORWARD: Final = ("REC", "SSR", "CRR")

CHOICE: Final = """
Question: {question}
Options:
{options}

Respond only with the letter corresponding to your chosen option (e.g., A, B, C). 
Do not include any additional text or explanation in your response.
"""
COUNT: Final = """
You're watching a video in which people may perform a certain type of action repetively. 
The person performing this kind of action are referred to as 'they' in the following statement.
You're task is to count how many times have different people in the video perform this kind of action in total.
One complete motion counts as one. 
Now, answer the following question: {question}
Provide your answer as a single number (e.g., 0, 1, 2, 3…) indicating the total count.
Do not include any additional text or explanation in your response.
"""
STEP: Final = """
You're watching a tutorial video which contain a sequential of steps. 
The following is one step from the whole procedures: 
{question}
Your task is to determine if the man or woman in the video is currently performing this step.
Answer only with “Yes” or “No”.
Do not include any additional text or explanation in your response.
"""
CLUE: Final = """
You're responsible of answering questions based on the video content. 
The following question are relevant to the latest frames, i.e. the end of the video.
{question}
Decide whether existing visual content, especially latest frames, i.e. frames that near the end of the video, provide enough information for answering the question.
Answer only with “Yes” or “No”.
Do not include any additional text or explanation in your response.
"""  # noqa: E501


class OvoBench(Benchmark):
    """All twelve tasks."""

    name = "ovo-bench"
    types = (
        *(QuestionType(name, "backward") for name in BACKWARD),
        *(QuestionType(name, "real-time", retrospective=False) for name in REAL_TIME),
        *(QuestionType(name, "forward", retrospective=False) for name in FORWARD),
    )
    templates = (CHOICE, COUNT, STEP, CLUE)
    source = "https://github.com/JoeLeelyf/OVO-Bench"

    def load(self, root: Path) -> Annotations:
        """Read all entries; each probe of a forward task is a question of its own."""
        path = find_annotations(root, ("ovo_bench_new.json", "ovo_bench.json"), self.name)
        videos: dict[str, list[Question]] = defaultdict(list)
        for row, where in number_records(read_records(path), path):
            videos[read_field(row, "video", str, where)] += _questions(row, where)
        return Annotations.group(videos)

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Find the letter, the number, or yes or no anywhere in the answer."""
        if kind == "REC":
            return "".join(re.findall(r"\d+", prediction)) == expected
        return expected in prediction or (kind in FORWARD and prediction == expected[0])

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return the three categories, backward without HLD, and the two totals in use."""
        backward, real_time, forward = (average_types(shares, tasks) for tasks in (BACKWARD, REAL_TIME, FORWARD))
        found = {
            "backward": backward,
            "backward without HLD": average_types(shares, BACKWARD[:2]),
            "real-time": real_time,
            "forward": forward,
        }
        if backward is not None and real_time is not None:
            found["mean of real-time and backward"] = (real_time + backward) / 2
            if forward is not None:
                found["mean of the three categories (official)"] = (real_time + backward + forward) / 3
        return {name: value for name, value in found.items() if value is not None}


def _questions(row: Mapping[str, Any], where: str) -> Iterator[Question]:
    kind = read_field(row, "task", str, where)
    name = str(read_field(row, "id", (int, str), where))
    if kind in FORWARD:
        for number, probe in enumerate(read_field(row, "test_info", list, where)):
            at = f"{where} probe {number}"
            text, template, answer = _probe(kind, row, probe, at)
            prompt, at_s = template.format(question=text).strip(), _time_of_asking(probe, at)
            yield Question(f"{name}-{number}", text, answer, kind, at_s, "query", OvoBench.name, prompt)
        return
    if kind not in (*BACKWARD, *REAL_TIME):
        raise ConfigError(f"{where}: task {kind!r} is none of OVO-Bench", hint="use the annotations as published")
    options = tuple(str(option) for option in read_field(row, "options", list, where))
    gold = read_field(row, "gt", int, where)
    if not 0 <= gold < len(options):
        raise ConfigError(f"{where}: gt {gold} is none of {len(options)} options", hint="use the file as published")
    text = read_field(row, "question", str, where)
    prompt = CHOICE.format(question=text, options=list_options(options, "{}. {};", " ")).strip()
    answer, at_s = ascii_uppercase[gold], _time_of_asking(row, where)
    yield Question(name, text, answer, kind, at_s, "query", OvoBench.name, prompt)


def _probe(kind: str, row: Mapping[str, Any], probe: Mapping[str, Any], where: str) -> tuple[str, str, str]:
    """Return the question of a probe, its template and its answer."""
    if kind == "REC":
        activity = read_field(row, "activity", str, where)
        return f"How many times did they {activity}?", COUNT, str(read_field(probe, "count", int, where))
    answer = "Yes" if read_field(probe, "type", int, where) else "No"
    if kind == "SSR":
        return read_field(probe, "step", str, where), STEP, answer
    return read_field(row, "question", str, where), CLUE, answer


def _time_of_asking(row: Mapping[str, Any], where: str) -> float:
    return float(math.ceil(read_field(row, "realtime", (int, float), where)))
