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

import msgspec

from protokv.replay.benchmarks.base import AskedQuestions, Benchmark, BenchmarkVideo, QuestionType
from protokv.replay.benchmarks.files import find_annotations, find_dataset_file, read_annotations
from protokv.replay.questions import F1_SCORING_RULE, LEAST_RIGHT_F1, ReplayQuestion, score_token_f1

_KnownTypes = Mapping[tuple[str, str], Mapping[str, set[str]]]
"""(question, answer) -> type -> videos."""
_UNJOINED = "unjoined"

_TYPES = (
    QuestionType("Order Judging(Y/N)", "yes / no"),
    QuestionType("Whether Something Happened(Y/N)", "yes / no"),
    QuestionType("What event order", "order"),
    QuestionType("Scene Summary", "scene", retrospective=False),
    QuestionType("Action Caption", "scene", retrospective=False),
    QuestionType(_UNJOINED, retrospective=False),
)


class _Conversation(msgspec.Struct):
    question: str
    answer: str
    end_time: float


class _Film(msgspec.Struct):
    video_id: str
    conversations: list[_Conversation]
    video_path: str | None = None
    clip_start_time: float | None = None
    clip_end_time: float | None = None


class _Original(msgspec.Struct):
    question: str
    answer: str
    answer_type: str
    video_id: Any = None
    video_name: Any = None
    original_video: Any = None


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
        for film in read_annotations(path, list[_Film]):
            name = film.video_id
            clip_s = None
            if film.clip_start_time is not None and film.clip_end_time is not None:
                clip_s = film.clip_start_time, film.clip_end_time
            video = BenchmarkVideo(name, film.video_path or name, clip_s)
            for number, row in enumerate(film.conversations):
                kind = _join(known, name, row)
                notes["questions without a type"] += kind == _UNJOINED
                text = row.question.strip()
                answer = row.answer.strip()
                yield (
                    video,
                    ReplayQuestion(
                        str(number), text, answer, kind, row.end_time, "query", self.name
                    ),
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


def _read_types(path: Path) -> _KnownTypes:
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in read_annotations(path, list[_Original]):
        names = (row.video_id, row.video_name, row.original_video)
        found[_plain(row)][row.answer_type].update(str(name) for name in names if name)
    return found


def _join(known: _KnownTypes, video: str, row: _Conversation) -> str:
    """Return the type of a question that is known by text, answer and, of several, its video."""
    kinds = known.get(_plain(row), {})
    if len(kinds) > 1:
        kinds = {
            kind: videos for kind, videos in kinds.items() if any(video in name for name in videos)
        }
    return next(iter(kinds)) if len(kinds) == 1 else _UNJOINED


def _plain(row: _Conversation | _Original) -> tuple[str, str]:
    return " ".join(row.question.split()), " ".join(row.answer.split())
