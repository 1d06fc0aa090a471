"""OVO-S-Bench: spatial questions with the times of asking and the times of the evidence.

Source: huggingface.co/datasets/InternLM/OVO-S-Bench, `ovo_s_bench.parquet` (1,695 questions, annotations CC BY 4.0);
code github.com/InternLM/OVO-S-Bench at 709a211: prompt `default` of `prompts.py`, rule of `score.py`, which looks for a
letter A to E in a fixed order of places. An entry with several `query_times` is asked at each; a later time
without an answer of its own has the last answer.

The annotations have the time of the evidence. Rows at the official times keep the end of the evidence, and reports show
accuracy by its age. Delays count from that end; later ones than the official time of asking are left out, since the
answer may have changed. Options that are pictures (task 4.3) cannot be asked in words; they are left out and counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from protokv.errors import ConfigError
from protokv.replay.benchmarks.base import Annotations, Benchmark, Score
from protokv.replay.benchmarks.choices import strict_letter
from protokv.replay.benchmarks.files import find_annotations, numbered, read_records, take
from protokv.replay.questions import Question, QuestionType

PROMPT: Final = """You are evaluating a video understanding task. Based on the video frames provided, answer the following multiple choice question.

Question: {question}

Options:
{options}

Instructions:
- Respond with ONLY the letter of your answer (e.g., "A" or "B").
- Do not include any explanation or additional text.

Your answer:"""  # noqa: E501

# Tried in this order on the end of an answer, and the last two on all of it.
_TAIL: Final = (
    r"(?:answer|final\s+answer|final)[:\s]+([A-E])\b",
    r"<answer>\s*([A-E])\b",
    r"\b([A-E])\b\s*\.?\s*$",
    r"<\|begin_of_box\|>\s*([A-E])",
)
_WHOLE: Final = (r"^([A-E])\b", r"(?:answer|choice|option)s?[:\s]+([A-E])\b", r"[\(\[]\s*([A-E])\s*[\)\]]")

_LEVELS: Final = ("1", "2", "3", "4")


class OvoSBench(Benchmark):
    """Four levels, each a group; types are the main categories (`1.1`)."""

    name = "ovo-s-bench"
    types = tuple(QuestionType(f"{level}.{n}", f"level {level}") for level in _LEVELS for n in range(1, 10))
    templates = (PROMPT,)
    licence = "CC BY 4.0"
    source = "https://huggingface.co/datasets/InternLM/OVO-S-Bench"
    fps = 1.0

    def load(self, root: Path, *, from_evidence: bool = False) -> Annotations:
        """Read the table, one question per time of asking."""
        path = find_annotations(root, ("ovo_s_bench.parquet", "ovo_s_bench.json"), self.name)
        videos: dict[str, list[Question]] = defaultdict(list)
        notes: Counter[str] = Counter()
        for row, where in numbered(read_records(path), path):
            options = _read_options(row.get("options"), where)
            if any(text.startswith("data:image") for text in options.values()):
                notes["questions whose options are pictures"] += 1
                continue
            video = take(row, "video_path", str, where)
            for question in _questions(row, options, where, from_evidence):
                notes["questions without evidence before the time of asking"] += (
                    from_evidence and question.reference != "evidence"
                )
                videos[video].append(question)
        return Annotations.of(videos, notes)

    def score(self, prediction: str, expected: str, kind: str, options: Sequence[str]) -> Score:
        """Compare the letter that the official search finds; strictly: a letter alone or before a mark."""
        return Score(_search(prediction) == expected.upper(), strict_letter(prediction) == expected.upper())

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of the main categories of each level."""
        found = {}
        for level in _LEVELS:
            own = [share for name, share in shares.items() if name.startswith(f"{level}.")]
            if own:
                found[f"level {level} (mean of categories)"] = sum(own) / len(own)
        return found


def _questions(
    row: Mapping[str, Any], options: Mapping[str, str], where: str, from_evidence: bool
) -> Iterator[Question]:
    letters, texts = sorted(options), [options[letter] for letter in sorted(options)]
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))
    text = take(row, "question", str, where)
    answers = [str(answer).strip().upper() for answer in take(row, "answers", list, where)]
    if not answers or any(answer not in letters for answer in answers):
        raise ConfigError(f"{where}: answers {answers} are none of the options {letters}")
    ends = [float(span[1]) for span in row.get("evidence_times") or [] if len(span) == 2]
    for number, time in enumerate(take(row, "query_times", list, where)):
        asked_s = float(time)
        seen = [end for end in ends if end <= asked_s]
        evidence_s = max(seen, default=None)
        known = from_evidence and evidence_s is not None
        yield Question(
            id=f"{row.get('id')}-{number}",
            text=text,
            answer=answers[min(number, len(answers) - 1)],
            type=take(row, "task_main_category", str, where),
            reference_s=evidence_s if known and evidence_s is not None else asked_s,
            reference="evidence" if known else "query",
            dataset=OvoSBench.name,
            prompt=PROMPT.format(question=text, options=listed),
            options=tuple(texts),
            evidence_s=evidence_s,
            valid_until_s=asked_s,
        )


def _read_options(value: Any, where: str) -> dict[str, str]:
    """Return label -> text, from an object or from a list of pairs as Parquet stores it."""
    if isinstance(value, Mapping):
        pairs: Any = list(value.items())
    elif isinstance(value, list):
        pairs = [tuple(pair.values()) if isinstance(pair, Mapping) else tuple(pair) for pair in value]
    else:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{where}: options are no labels with texts", hint="use the annotations as published")
    return {str(label): str(text) for label, text in pairs}


def _search(response: str) -> str:
    text = response.strip().split("</think>")[-1].strip()
    for pattern in _TAIL:
        if found := re.search(pattern, text[-300:], re.IGNORECASE):
            return found[1].upper()
    for pattern in _WHOLE:
        if found := re.search(pattern, text, re.IGNORECASE):
            return found[1].upper()
    return ""
