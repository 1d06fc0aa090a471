"""MLVU, the seven multiple-choice tasks of its development set, asked when the whole video was
seen.

Source: github.com/JUNJIE99/MLVU at fd060c1, seven files `1_plotQA.json` to `7_topic_reasoning.json`
(CC BY-NC-SA 4.0); the two generation tasks, `8_sub_scene.json` and `9_summary.json`, are not asked.
Prompt and rule of `evaluation/multiple_choice_evaluation/choice_bench.py`: the character before the
first ")" is the letter, or the whole answer if there is none. That code begins the model's answer
with "Best Option: ("; here these words end the question. The official average, M-Avg, is the mean
of the seven tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

import msgspec

from protokv.replay.benchmarks.base import AskedQuestions, Benchmark, BenchmarkVideo, QuestionType
from protokv.replay.benchmarks.files import (
    find_annotations,
    find_dataset_file,
    list_choices,
    read_annotations,
)
from protokv.replay.questions import ReplayQuestion

_PROMPT = """Carefully watch this video and pay attention to every detail. Based on your \
observations, select the best option that accurately addresses the question.
Question: {question}
Options:
{options}
Only give the best option.
Best Option: ("""

_NO_LETTER = "@"
"""The answer where no candidate is right."""

# File -> the type of its questions, and the group of it in the paper of MLVU.
_TASKS = {
    "1_plotQA": ("plotQA", "single detail"),
    "2_needle": ("findNeedle", "single detail"),
    "3_ego": ("ego", "single detail"),
    "4_count": ("count", "multi detail"),
    "5_order": ("order", "multi detail"),
    "6_anomaly_reco": ("anomaly_reco", "holistic"),
    "7_topic_reasoning": ("topic_reasoning", "holistic"),
}


class _Row(msgspec.Struct):
    video: str
    question: str
    candidates: list[Any]
    answer: str


class Mlvu(Benchmark):
    """Seven tasks, one file each."""

    name = "mlvu"
    types = tuple(QuestionType(kind, group) for kind, group in _TASKS.values())
    templates = (_PROMPT,)
    source = "https://github.com/JUNJIE99/MLVU"
    averages: ClassVar = {"M-Avg (official)": [kind for kind, _ in _TASKS.values()]}

    def read(self, root: Path, notes: Counter[str]) -> AskedQuestions:
        """Read the files that are there; a missing one is noted."""
        # At least one of them must be there.
        find_annotations(root, [f"{task}.json" for task in _TASKS], self.name)
        for task, (kind, _) in _TASKS.items():
            path = find_dataset_file(root, [f"{task}.json"])
            if path is None:
                notes[f"{task}.json is missing"] = 1
                continue
            for number, row in enumerate(read_annotations(path, list[_Row])):
                options = [str(option) for option in row.candidates]
                video = f"{task}/{row.video}"
                # The authors' code takes the last letter of candidates that stand twice.
                letters = {option: ascii_uppercase[i] for i, option in enumerate(options)}
                letter = letters.get(row.answer, _NO_LETTER)
                notes["questions whose answer is none of their candidates"] += letter == _NO_LETTER
                choices = list_choices(options, "({}) {}")
                question = ReplayQuestion(
                    f"{task}-{number}",
                    row.question,
                    letter,
                    kind,
                    math.inf,
                    "end",
                    self.name,
                    _PROMPT.format(question=row.question, options=choices),
                )
                yield BenchmarkVideo(video, video), question

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Compare the character before ")", or the whole answer."""
        end = prediction.find(")")
        letter = prediction if end < 0 else prediction[max(0, end - 1) : end]
        return letter == expected
