"""VideoMME: four options, asked when the whole video was seen; short, medium and long videos.

Source: huggingface.co/datasets/lmms-lab/Video-MME (900 videos, 2,700 questions), a Parquet table or
its JSON export; prompt and rule of the authors' `eval_your_results.py`
(github.com/MME-Benchmarks/Video-MME): without common prefixes, the first of A, B, C, D anywhere, so
"A man" is option A.

The setting with subtitles (`open_dataset`, `subtitles`) asks the same questions with the same
prompt. What is said enters the stream in its time and shares the budget with the pictures. The
authors put the subtitles of the sampled frames into the prompt instead, so their figures are of
another setting.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from protokv.replay.benchmarks.base import AskedQuestions, Benchmark, BenchmarkVideo, QuestionType
from protokv.replay.benchmarks.files import (
    find_annotations,
    list_choices,
    read_annotations,
    strip_letters,
)
from protokv.replay.questions import ReplayQuestion

_PROMPT = """Select the best answer to the following multiple-choice question based on the video. \
Respond with only the letter (A, B, C, or D) of the correct option.
{question}
{options}
The best answer is:"""

_DURATIONS = ("short", "medium", "long")

_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option is",
    "The correct option is",
    "Best answer:",
    "Best option:",
)


class _Row(msgspec.Struct):
    question_id: str
    videoID: str
    duration: str
    question: str
    options: list[Any]
    answer: str


class VideoMme(Benchmark):
    """The three lengths are its types."""

    name = "videomme"
    types = tuple(QuestionType(name, name) for name in _DURATIONS)
    templates = (_PROMPT,)
    source = "https://huggingface.co/datasets/lmms-lab/Video-MME"
    # The lengths have equally many questions.
    averages: ClassVar = {"overall (mean of lengths)": _DURATIONS}

    def read(self, root: Path, notes: Counter[str]) -> AskedQuestions:
        """Read the table; all questions are asked at the end."""
        names = ("test-00000-of-00001.parquet", "videomme.parquet", "videomme.json")
        for row in read_annotations(find_annotations(root, names, self.name), list[_Row]):
            choices = list_choices(strip_letters(row.options))
            question = ReplayQuestion(
                row.question_id,
                row.question,
                row.answer.strip(),
                row.duration,
                math.inf,
                "end",
                self.name,
                _PROMPT.format(question=row.question, options=choices),
            )
            yield BenchmarkVideo(row.videoID, row.videoID), question

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Compare the first capital A to D after the prefixes."""
        text = prediction.strip()
        for prefix in _PREFIXES:
            text = text.replace(prefix, "")
        return next((one for one in text if one in "ABCD"), "") == expected
