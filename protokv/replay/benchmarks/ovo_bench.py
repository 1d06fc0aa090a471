"""OVO-Bench: twelve tasks that look back, at the present, or forward from a time of the video.

Source: github.com/JoeLeelyf/OVO-Bench at c34093f, `data/ovo_bench_new.json` (1,640 entries, 3,035
queries, CC BY-NC-SA 4.0), prompts of `constant.py`, rules of `utils/OVOBenchScore.py`. Backward and
real-time tasks are multiple choice; the official rule counts an answer as right if the letter
occurs anywhere in it. Forward tasks are probes at several times: REC counts (all digits of the
answer joined), SSR and CRR are answered with yes or no.

A query may see the video up to its `realtime`, rounded up to a second. All keys of HLD are "Unable
to answer", so a model that always refuses has all of them: backward stands with and without it.
Papers print two different totals, the mean of the three categories (the official one) and the mean
of real-time and backward alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from protokv.replay.benchmarks.base import AskedQuestions, Benchmark, BenchmarkVideo, QuestionType
from protokv.replay.benchmarks.files import find_annotations, list_choices, read_annotations
from protokv.replay.questions import ReplayQuestion

_BACKWARD = ("EPM", "ASI", "HLD")
_REAL_TIME = ("OCR", "ACR", "ATR", "STU", "FPD", "OJR")
_FORWARD = ("REC", "SSR", "CRR")

_CHOICE = """
Question: {question}
Options:
{options}

Respond only with the letter corresponding to your chosen option (e.g., A, B, C). 
Do not include any additional text or explanation in your response.
"""
_COUNT = """
You're watching a video in which people may perform a certain type of action repetively. 
The person performing this kind of action are referred to as 'they' in the following statement.
You're task is to count how many times have different people in the video perform this kind of \
action in total.
One complete motion counts as one. 
Now, answer the following question: {question}
Provide your answer as a single number (e.g., 0, 1, 2, 3…) indicating the total count.
Do not include any additional text or explanation in your response.
"""
_STEP = """
You're watching a tutorial video which contain a sequential of steps. 
The following is one step from the whole procedures: 
{question}
Your task is to determine if the man or woman in the video is currently performing this step.
Answer only with “Yes” or “No”.
Do not include any additional text or explanation in your response.
"""
_CLUE = """
You're responsible of answering questions based on the video content. 
The following question are relevant to the latest frames, i.e. the end of the video.
{question}
Decide whether existing visual content, especially latest frames, i.e. frames that near the \
end of the video, provide enough information for answering the question.
Answer only with “Yes” or “No”.
Do not include any additional text or explanation in your response.
"""


_Task = Literal["EPM", "ASI", "HLD", "OCR", "ACR", "ATR", "STU", "FPD", "OJR", "REC", "SSR", "CRR"]


class _Probe(msgspec.Struct):
    realtime: float
    count: int = 0
    step: str = ""
    type: int = 0


class _Entry(msgspec.Struct):
    task: _Task
    id: int | str
    video: str
    question: str = ""
    activity: str = ""
    # Choices have these.
    realtime: float = math.inf
    options: list[Any] = []
    gt: Annotated[int, msgspec.Meta(ge=0, lt=len(ascii_uppercase))] = 0
    # Forward tasks have probes.
    test_info: list[_Probe] = []


class OvoBench(Benchmark):
    """All twelve tasks."""

    name = "ovo-bench"
    types = (
        *(QuestionType(name, "backward") for name in _BACKWARD),
        *(QuestionType(name, "real-time", retrospective=False) for name in _REAL_TIME),
        *(QuestionType(name, "forward", retrospective=False) for name in _FORWARD),
    )
    templates = (_CHOICE, _COUNT, _STEP, _CLUE)
    source = "https://github.com/JoeLeelyf/OVO-Bench"
    averages: ClassVar = {
        "backward": _BACKWARD,
        "backward without HLD": ("EPM", "ASI"),
        "real-time": _REAL_TIME,
        "forward": _FORWARD,
        "mean of real-time and backward": ("real-time", "backward"),
        "mean of the three categories (official)": ("real-time", "backward", "forward"),
    }

    def read(self, root: Path, notes: Counter[str]) -> AskedQuestions:
        """Read all entries; each probe of a forward task is a question of its own."""
        path = find_annotations(root, ("ovo_bench_new.json", "ovo_bench.json"), self.name)
        for row in read_annotations(path, list[_Entry]):
            for question in _list_probes(row) if row.task in _FORWARD else [_make_choice(row)]:
                yield BenchmarkVideo(row.video, row.video), question

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Find the letter, the number, or yes or no anywhere in the answer."""
        if kind == "REC":
            return "".join(re.findall(r"\d+", prediction)) == expected
        return expected in prediction or (kind in _FORWARD and prediction == expected[0])


def _list_probes(row: _Entry) -> Iterator[ReplayQuestion]:
    for number, probe in enumerate(row.test_info):
        answer = "Yes" if probe.type else "No"
        if row.task == "REC":
            text = f"How many times did they {row.activity}?"
            template = _COUNT
            answer = str(probe.count)
        elif row.task == "SSR":
            text = probe.step
            template = _STEP
        else:
            text = row.question
            template = _CLUE
        yield _ask(row, f"{row.id}-{number}", text, answer, probe.realtime, template)


def _make_choice(row: _Entry) -> ReplayQuestion:
    options = list_choices([str(option) for option in row.options], "{}. {};", " ")
    letter = ascii_uppercase[row.gt]
    return _ask(row, str(row.id), row.question, letter, row.realtime, _CHOICE, options)


def _ask(
    row: _Entry, name: str, text: str, answer: str, time_s: float, template: str, options: str = ""
) -> ReplayQuestion:
    prompt = template.format(question=text, options=options).strip()
    # The prefix of a query ends at its time, rounded up.
    at_s = time_s if time_s == math.inf else float(math.ceil(time_s))
    return ReplayQuestion(name, text, answer, row.task, at_s, "query", OvoBench.name, prompt)
