"""StreamingBench, real-time visual understanding: four options, asked at a time of the video.

Source: github.com/THUNLP-MT/StreamingBench at 8929923, `src/data/questions_real.json` or
`questions_real_stream.json` (the same questions one entry per video), prompt of
`src/benchmark/StreamingBench.py`, rule of `src/data/count.py`: the first character of the answer is
the letter. That code does not count an empty answer; here it is wrong.

The published code never reaches its schedule of frame rates, so the protocol is one frame per
second. Its script shows the whole video before the question (`CONTEXT_TIME=-1`); the paper's main
table shows the last 60 seconds. Here the stream is watched from its beginning. The time of asking
is `time_stamp`, even for the more than 200 questions that lie outside the `time` of their entry.
Clock times are sums of powers of 60 in any form (`00:24`, `0:07:40`), as in the published code.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec

from protokv.replay.benchmarks.base import AskedQuestions, Benchmark, BenchmarkVideo, QuestionType
from protokv.replay.benchmarks.files import (
    find_annotations,
    list_choices,
    read_annotations,
    strip_letters,
)
from protokv.replay.questions import ReplayQuestion

_PROMPT = """You are an advanced video question-answering AI assistant. You have been \
provided with some frames from the video and a multiple-choice question related to the video. \
Your task is to carefully analyze the video and provide the best answer to question, choosing \
from the four options provided. Respond with only the letter (A, B, C, or D) of \
the correct option.

Question: {question}

Options:
{options}

The best option is:"""

_TASKS = (
    "Object Recognition",
    "Causal Reasoning",
    "Clips Summarize",
    "Attribute Recognition",
    "Event Understanding",
    "Text-Rich Understanding",
    "Prospective Reasoning",
    "Spatial Understanding",
    "Action Recognition",
    "Counting",
)


class _Question(msgspec.Struct):
    question: str
    options: list[Any]
    answer: str
    task_type: str
    time_stamp: Annotated[str, msgspec.Meta(pattern=r"^\s*\d+(:\d+)*\s*$")]

    @property
    def time_s(self) -> float:
        """Seconds of `0:07:40` or `00:12450`: the parts times powers of 60."""
        parts = reversed(self.time_stamp.split(":"))
        return float(sum(int(part) * 60**i for i, part in enumerate(parts)))


class _Entry(msgspec.Struct):
    video_path: str
    questions: list[_Question]


class StreamingBench(Benchmark):
    """The ten real-time tasks."""

    name = "streamingbench"
    types = tuple(QuestionType(name, "real-time", retrospective=False) for name in _TASKS)
    templates = (_PROMPT,)
    source = "https://github.com/THUNLP-MT/StreamingBench"
    fps = 1.0

    def read(self, root: Path, notes: Counter[str]) -> AskedQuestions:
        """Read either form; entries about one video become one stream."""
        path = find_annotations(
            root, ("questions_real.json", "questions_real_stream.json"), self.name
        )
        asked = Counter[str]()
        for entry in read_annotations(path, list[_Entry]):
            video = entry.video_path
            for row in entry.questions:
                choices = list_choices(strip_letters(row.options))
                question = ReplayQuestion(
                    str(asked[video]),
                    row.question,
                    row.answer.strip(),
                    row.task_type.removesuffix(" Perception"),
                    row.time_s,
                    "query",
                    self.name,
                    _PROMPT.format(question=row.question, options=choices),
                )
                asked[video] += 1
                yield BenchmarkVideo(video, video), question

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Compare the first character."""
        return prediction[:1] == expected
