"""RVS-Ego and RVS-Movie: open questions about hour-long streams, judged by a model that reads.

Annotations: the conversion of ReKV, `ego4d_oe.json` and `movienet_oe.json`
(huggingface.co/datasets/Becomebright/RVS): videos with `conversations` of `question`, `answer`,
`start_time`, `end_time`; a question is asked at its `end_time`. It lacks `answer_type`, which the
original VStream-QA files have (huggingface.co/datasets/IVGSZ/VStream-QA, `test_qa_ego4d.json` and
`test_qa_movienet.json`, CC BY-NC 4.0), so types are joined by question and answer, and by the video
if several types remain. A question without a match has the type `unjoined`, which no sweep over
delays asks.

Seconds of RVS-Movie are numbers of key frames, shown at one per second (`.npy` arrays, or a video
file of that rate), counted from the beginning of the film. If the length of a file shows that it
holds the clip alone, `clip_start_time` is subtracted when it is opened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from protokv.replay.benchmarks.base import AskedQuestions, Benchmark, BenchmarkVideo, QuestionType
from protokv.replay.benchmarks.files import find_annotations, find_dataset_file, read_annotations
from protokv.replay.questions import F1_SCORING_RULE, LEAST_RIGHT_F1, ReplayQuestion, score_token_f1

_UNJOINED = "unjoined"

_TYPES = (
    QuestionType("Order Judging(Y/N)", "yes / no"),
    QuestionType("Whether Something Happened(Y/N)", "yes / no"),
    QuestionType("What event order", "order"),
    QuestionType("Scene Summary", "scene", retrospective=False),
    QuestionType("Action Caption", "scene", retrospective=False),
    QuestionType(_UNJOINED, retrospective=False),
)


class _Rvs(Benchmark):
    """The common part of both sets."""

    types = _TYPES
    # Both published runners ask the bare question in the model's own chat template.
    templates = ("{question}",)
    source = (
        "https://huggingface.co/datasets/IVGSZ/VStream-QA, "
        "https://huggingface.co/datasets/Becomebright/RVS"
    )
    open_ended = True
    max_new_tokens = 256
    judge = F1_SCORING_RULE
    annotations: ClassVar[tuple[str, ...]]
    originals: ClassVar[tuple[str, ...]]

    def read(self, root: Path, notes: Counter[str]) -> AskedQuestions:
        """Read the conversion, and the types from the original if it is there."""
        path = find_annotations(root, self.annotations, self.name)
        original = find_dataset_file(root, self.originals)
        known = _read_types(original) if original else {}
        notes[f"types are unknown without {self.originals[0]}"] = original is None
        for record in read_annotations(path):
            name = record.read("video_id")
            start, end = (record.values.get(f"clip_{which}_time") for which in ("start", "end"))
            known_clip = isinstance(start, int | float) and isinstance(end, int | float)
            clip_s = (float(start or 0), float(end or 0)) if known_clip else None
            video = BenchmarkVideo(name, str(record.values.get("video_path") or name), clip_s)
            for number, row in enumerate(record.read_all("conversations", "conversation")):
                text = row.read("question")
                answer = row.read("answer")
                kind = _join(known, name, text, answer)
                notes["questions without a type"] += kind == _UNJOINED
                asked_s = float(row.read("end_time", int, float))
                text = text.strip()
                answer = answer.strip()
                yield (
                    video,
                    ReplayQuestion(str(number), text, answer, kind, asked_s, "query", self.name),
                )

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Score it until a judge does: a token F1 of one half."""
        return score_token_f1(prediction, expected) >= LEAST_RIGHT_F1


class RvsEgo(_Rvs):
    """Ten hours of Ego4D."""

    name = "rvs-ego"
    annotations = ("ego4d_oe.json",)
    originals = ("test_qa_ego4d.json",)


class RvsMovie(_Rvs):
    """Twenty-two films of MovieNet, as key frames."""

    name = "rvs-movie"
    annotations = ("movienet_oe.json",)
    originals = ("test_qa_movienet.json",)


def _read_types(path: Path) -> Mapping[tuple[str, str], Mapping[str, set[str]]]:
    """Return (question, answer) -> type -> videos."""
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in read_annotations(path):
        key = _plain(row.read("question")), _plain(row.read("answer"))
        names = (row.values.get(name) for name in ("video_id", "video_name", "original_video"))
        found[key][row.read("answer_type")].update(str(name) for name in names if name)
    return found


def _join(
    known: Mapping[tuple[str, str], Mapping[str, set[str]]], video: str, text: str, answer: str
) -> str:
    kinds: Mapping[str, Any] = known.get((_plain(text), _plain(answer)), {})
    if len(kinds) > 1:
        kinds = {
            kind: videos for kind, videos in kinds.items() if any(video in name for name in videos)
        }
    return next(iter(kinds)) if len(kinds) == 1 else _UNJOINED


def _plain(text: str) -> str:
    return " ".join(text.split())
