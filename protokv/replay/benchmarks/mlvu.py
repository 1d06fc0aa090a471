"""MLVU, the seven multiple-choice tasks of its development set, asked when the whole video was seen.

Source: github.com/JUNJIE99/MLVU at fd060c1, seven files `1_plotQA.json` to `7_topic_reasoning.json` (CC BY-NC-SA 4.0);
the two generation tasks, `8_sub_scene.json` and `9_summary.json`, are not asked. Prompt and rule of
`evaluation/multiple_choice_evaluation/choice_bench.py`: the character before the first ")" is the letter, or
the whole answer if there is none. That code begins the model's answer with "Best Option: ("; here these words end the
question. The official average, M-Avg, is the mean of the seven tasks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from string import ascii_uppercase
from typing import Final

from protokv.errors import SourceNotFound
from protokv.replay.benchmarks.base import Annotations, Benchmark, QuestionType, average_types
from protokv.replay.benchmarks.choices import list_options
from protokv.replay.benchmarks.files import find_annotations, find_file, number_records, read_field, read_records
from protokv.replay.questions import Question

_PROMPT: Final = """Carefully watch this video and pay attention to every detail. Based on your observations, select the best option that accurately addresses the question.
Question: {question}
Options:
{options}
Only give the best option.
Best Option: ("""  # noqa: E501

NO_LETTER: Final = "@"
"""The answer where no candidate is right."""

# File -> the type of its questions, and the group of it in the paper of MLVU.
TASKS: Final = {
    "1_plotQA": ("plotQA", "single detail"),
    "2_needle": ("findNeedle", "single detail"),
    "3_ego": ("ego", "single detail"),
    "4_count": ("count", "multi detail"),
    "5_order": ("order", "multi detail"),
    "6_anomaly_reco": ("anomaly_reco", "holistic"),
    "7_topic_reasoning": ("topic_reasoning", "holistic"),
}


class Mlvu(Benchmark):
    """Seven tasks, one file each."""

    name = "mlvu"
    types = tuple(QuestionType(kind, group) for kind, group in TASKS.values())
    templates = (_PROMPT,)
    source = "https://github.com/JUNJIE99/MLVU"

    def load(self, root: Path) -> Annotations:
        """Read the files that are there; a missing one is noted."""
        videos: dict[str, list[Question]] = defaultdict(list)
        notes: Counter[str] = Counter()
        # At least one of them must be there.
        find_annotations(root, [f"{task}.json" for task in TASKS], self.name)
        for task, (kind, _) in TASKS.items():
            path = find_file(root, [f"{task}.json"])
            if path is None:
                notes[f"{task}.json is missing"] = 1
                continue
            for number, (row, where) in enumerate(number_records(read_records(path), path)):
                options = tuple(str(option) for option in read_field(row, "candidates", list, where))
                text = read_field(row, "question", str, where)
                answer = read_field(row, "answer", str, where)
                letter = ascii_uppercase[options.index(answer)] if answer in options else NO_LETTER
                notes["questions whose answer is none of their candidates"] += letter == NO_LETTER
                prompt = _PROMPT.format(question=text, options=list_options(options, "({}) {}"))
                video = f"{task}/{read_field(row, 'video', str, where)}"
                name = f"{task}-{number}"
                videos[video].append(Question(name, text, letter, kind, math.inf, "end", self.name, prompt))
        if not videos:
            raise SourceNotFound(f"the annotations of {self.name} in {root} hold no question")
        return Annotations.group(videos, notes)

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Compare the character before ")", or the whole answer."""
        end = prediction.find(")")
        letter = prediction if end < 0 else prediction[max(0, end - 1) : end]
        return letter == expected

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return M-Avg."""
        average = average_types(shares, [kind for kind, _ in TASKS.values()])
        return {} if average is None else {"M-Avg (official)": average}
