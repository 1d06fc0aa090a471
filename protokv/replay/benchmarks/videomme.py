"""VideoMME: four options, asked when the whole video was seen; short, medium and long videos.

Source: huggingface.co/datasets/lmms-lab/Video-MME (900 videos, 2,700 questions), a Parquet table or its JSON export;
prompt and rule of the authors' `eval_your_results.py` (github.com/MME-Benchmarks/Video-MME): without common
prefixes, the first of A, B, C, D anywhere, so "A man" is option A.

The setting with subtitles (`open_dataset`, `subtitles`) asks the same questions with the same prompt. What is said
enters the stream in its time and shares the budget with the pictures. The authors put the subtitles of the sampled
frames into the prompt instead, so their figures are of another setting.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from protokv.errors import ConfigError
from protokv.replay.benchmarks.base import Annotations, Benchmark, QuestionType, average_types
from protokv.replay.benchmarks.choices import check_letter, list_options, strip_letter
from protokv.replay.benchmarks.files import find_annotations, number_records, read_field, read_records
from protokv.replay.questions import Question

_PROMPT: Final = """Select the best answer to the following multiple-choice question based on the video. Respond with only the letter (A, B, C, or D) of the correct option.
{question}
{options}
The best answer is:"""  # noqa: E501

DURATIONS: Final = ("short", "medium", "long")

_PREFIXES: Final = (
    "The best answer is", "The correct answer is", "The answer is", "The answer", "The best option is",
    "The correct option is", "Best answer:", "Best option:",
)  # fmt: skip


class VideoMme(Benchmark):
    """The three lengths are its types."""

    name = "videomme"
    types = tuple(QuestionType(name, name) for name in DURATIONS)
    templates = (_PROMPT,)
    source = "https://huggingface.co/datasets/lmms-lab/Video-MME"

    def load(self, root: Path) -> Annotations:
        """Read the table; all questions are asked at the end."""
        names = ("test-00000-of-00001.parquet", "videomme.parquet", "videomme.json", "videomme.jsonl")
        path = find_annotations(root, names, self.name)
        videos: dict[str, list[Question]] = defaultdict(list)
        for row, where in number_records(read_records(path), path):
            options = tuple(strip_letter(str(option)) for option in read_field(row, "options", list, where))
            text = read_field(row, "question", str, where)
            letter = check_letter(read_field(row, "answer", str, where).strip(), options, where)
            kind = read_field(row, "duration", str, where)
            if kind not in DURATIONS:
                raise ConfigError(f"{where}: duration {kind!r} is none of {', '.join(DURATIONS)}")
            prompt = _PROMPT.format(question=text, options=list_options(options))
            name = str(read_field(row, "question_id", str, where))
            videos[read_field(row, "videoID", str, where)].append(
                Question(name, text, letter, kind, math.inf, "end", self.name, prompt)
            )
        return Annotations.group(videos)

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Compare the first capital A to D after the prefixes."""
        text = prediction.strip()
        for prefix in _PREFIXES:
            text = text.replace(prefix, "")
        return next((one for one in text if one in "ABCD"), "") == expected

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return the overall accuracy; the lengths have equally many questions."""
        overall = average_types(shares, DURATIONS)
        return {} if overall is None else {"overall (mean of lengths)": overall}
