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
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import ascii_uppercase

from protokv.replay.benchmarks.base import (
    AskedQuestions,
    Benchmark,
    BenchmarkVideo,
    QuestionType,
    average_question_types,
)
from protokv.replay.benchmarks.files import (
    AnnotationRecord,
    find_annotations,
    list_choices,
    read_annotations,
)
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

    def read(self, root: Path, notes: Counter[str]) -> AskedQuestions:
        """Read all entries; each probe of a forward task is a question of its own."""
        for row in read_annotations(
            find_annotations(root, ("ovo_bench_new.json", "ovo_bench.json"), self.name)
        ):
            video = row.read("video")
            for question in _questions(row):
                yield BenchmarkVideo(video, video), question

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Find the letter, the number, or yes or no anywhere in the answer."""
        if kind == "REC":
            return "".join(re.findall(r"\d+", prediction)) == expected
        return expected in prediction or (kind in _FORWARD and prediction == expected[0])

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return the three categories, backward without HLD, and the two totals in use."""
        backward, real_time, forward = (
            average_question_types(shares, tasks) for tasks in (_BACKWARD, _REAL_TIME, _FORWARD)
        )
        found = {
            "backward": backward,
            "backward without HLD": average_question_types(shares, _BACKWARD[:2]),
            "real-time": real_time,
            "forward": forward,
        }
        if backward is not None and real_time is not None:
            found["mean of real-time and backward"] = (real_time + backward) / 2
            if forward is not None:
                found["mean of the three categories (official)"] = (
                    real_time + backward + forward
                ) / 3
        return {name: value for name, value in found.items() if value is not None}


def _questions(row: AnnotationRecord) -> Iterator[ReplayQuestion]:
    kind = row.read("task")
    name = str(row.read("id", int, str))
    if kind in _FORWARD:
        for number, probe in enumerate(row.read_all("test_info", "probe")):
            text, template, answer = _probe(kind, row, probe)
            prompt = template.format(question=text).strip()
            at_s = _time_of_asking(probe)
            yield ReplayQuestion(
                f"{name}-{number}", text, answer, kind, at_s, "query", OvoBench.name, prompt
            )
        return
    if kind not in (*_BACKWARD, *_REAL_TIME):
        raise row.refuse(f"task {kind!r} is none of OVO-Bench")
    options = [str(option) for option in row.read("options", list)]
    gold = row.read("gt", int)
    text = row.read("question")
    if not 0 <= gold < len(options):
        raise row.refuse(f"gt {gold} is none of {len(options)} options")
    prompt = _CHOICE.format(question=text, options=list_choices(options, "{}. {};", " ")).strip()
    yield ReplayQuestion(
        name,
        text,
        ascii_uppercase[gold],
        kind,
        _time_of_asking(row),
        "query",
        OvoBench.name,
        prompt,
    )


def _probe(kind: str, row: AnnotationRecord, probe: AnnotationRecord) -> tuple[str, str, str]:
    """Return the question of a probe, its template and its answer."""
    if kind == "REC":
        return (
            f"How many times did they {row.read('activity')}?",
            _COUNT,
            str(probe.read("count", int)),
        )
    answer = "Yes" if probe.read("type", int) else "No"
    return (
        (probe.read("step"), _STEP, answer)
        if kind == "SSR"
        else (row.read("question"), _CLUE, answer)
    )


def _time_of_asking(row: AnnotationRecord) -> float:
    return float(math.ceil(row.read("realtime", int, float)))
