"""StreamingBench, real-time visual understanding: four options, asked at a time of the video.

Source: github.com/THUNLP-MT/StreamingBench at 8929923, `src/data/questions_real.json` or `questions_real_stream.json`
(the same questions one entry per video), prompt of `src/benchmark/StreamingBench.py`, rule of `src/data/count.py`: the
first character of the answer is the letter. That code does not count an empty answer; here it is wrong.

The published code never reaches its schedule of frame rates, so the protocol is one frame per second. Its script shows
the whole video before the question (`CONTEXT_TIME=-1`); the paper's main table shows the last 60 seconds. Here the
stream is watched from its beginning. The time of asking is `time_stamp`, even for the more than 200 questions that lie
outside the `time` of their entry. Clock times are sums of powers of 60 in any form (`00:24`, `0:07:40`), as in the
published code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

from protokv.errors import ConfigError
from protokv.replay.benchmarks.base import Annotations, Benchmark, QuestionType
from protokv.replay.benchmarks.choices import check_letter, list_options, strip_letter
from protokv.replay.benchmarks.files import find_annotations, number_records, read_field, read_records
from protokv.replay.questions import Question

_PROMPT: Final = """You are an advanced video question-answering AI assistant. You have been provided with some frames from the video and a multiple-choice question related to the video. Your task is to carefully analyze the video and provide the best answer to question, choosing from the four options provided. Respond with only the letter (A, B, C, or D) of the correct option.

Question: {question}

Options:
{options}

The best option is:"""  # noqa: E501

_TASKS: Final = (
    "Object Recognition", "Causal Reasoning", "Clips Summarize", "Attribute Recognition", "Event Understanding",
    "Text-Rich Understanding", "Prospective Reasoning", "Spatial Understanding", "Action Recognition", "Counting",
)  # fmt: skip


class StreamingBench(Benchmark):
    """The ten real-time tasks."""

    name = "streamingbench"
    types = tuple(QuestionType(name, "real-time", retrospective=False) for name in _TASKS)
    templates = (_PROMPT,)
    source = "https://github.com/THUNLP-MT/StreamingBench"
    fps = 1.0

    def load(self, root: Path) -> Annotations:
        """Read either form; entries about one video become one stream."""
        path = find_annotations(root, ("questions_real.json", "questions_real_stream.json"), self.name)
        videos: dict[str, list[Question]] = defaultdict(list)
        for entry, where in number_records(read_records(path), path):
            video = read_field(entry, "video_path", str, where)
            for number, row in enumerate(read_field(entry, "questions", list, where)):
                at = f"{where} question {number}"
                time_s = parse_clock(read_field(row, "time_stamp", str, at), at)
                options = tuple(strip_letter(str(option)) for option in read_field(row, "options", list, at))
                text = read_field(row, "question", str, at)
                letter = check_letter(read_field(row, "answer", str, at).strip(), options, at)
                kind = read_field(row, "task_type", str, at).removesuffix(" Perception")
                name, prompt = str(len(videos[video])), _PROMPT.format(question=text, options=list_options(options))
                videos[video].append(Question(name, text, letter, kind, time_s, "query", self.name, prompt))
        return Annotations.group(videos)

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Compare the first character."""
        return prediction[:1] == expected


def parse_clock(text: str, where: str) -> float:
    """Return the seconds of `0:07:40` or `00:12450`: its parts times powers of 60. ConfigError: it is no clock time."""
    if not re.fullmatch(r"\d+(:\d+)*", text.strip()):
        raise ConfigError(f"{where}: {text!r} is no clock time", hint="use the annotations as they were published")
    return float(sum(int(part) * 60**i for i, part in enumerate(reversed(text.strip().split(":")))))
