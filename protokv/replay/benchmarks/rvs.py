"""RVS-Ego and RVS-Movie: open questions about hour-long streams, judged by a model that reads.

Annotations: the conversion of ReKV, `ego4d_oe.json` and `movienet_oe.json` (huggingface.co/datasets/Becomebright/RVS):
videos with `conversations` of `question`, `answer`, `start_time`, `end_time`; a question is asked at its `end_time`. It
lacks `answer_type`, which the original VStream-QA files have (huggingface.co/datasets/IVGSZ/VStream-QA,
`test_qa_ego4d.json` and `test_qa_movienet.json`, CC BY-NC 4.0), so types are joined by question and answer, and by the
video if several types remain. A question without a match has the type `unjoined`, which no sweep over delays asks.

Seconds of RVS-Movie are numbers of key frames, shown at one per second (`.npy` arrays, or a video file of that rate),
counted from the beginning of the film. If the length of a file shows that it holds the clip alone, `clip_start_time` is
subtracted when it is opened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from protokv.replay.benchmarks.base import Annotations, Benchmark, QuestionType, Video
from protokv.replay.benchmarks.files import find_annotations, find_file, number_records, read_field, read_records
from protokv.replay.questions import F1_RIGHT, F1_RULE, Question, token_f1

UNJOINED: Final = "unjoined"

_TYPES: Final = (
    QuestionType("Order Judging(Y/N)", "yes / no"),
    QuestionType("Whether Something Happened(Y/N)", "yes / no"),
    QuestionType("What event order", "order"),
    QuestionType("Scene Summary", "scene", retrospective=False),
    QuestionType("Action Caption", "scene", retrospective=False),
    QuestionType(UNJOINED, retrospective=False),
)


class Rvs(Benchmark):
    """The common part of both sets."""

    types = _TYPES
    # Both published runners ask the bare question in the model's own chat template.
    templates = ("{question}",)
    source = "https://huggingface.co/datasets/IVGSZ/VStream-QA, https://huggingface.co/datasets/Becomebright/RVS"
    open_ended = True
    max_new_tokens = 256
    judge = F1_RULE
    annotations: ClassVar[tuple[str, ...]]
    originals: ClassVar[tuple[str, ...]]

    def load(self, root: Path) -> Annotations:
        """Read the conversion, and the types from the original if it is there."""
        path = find_annotations(root, self.annotations, self.name)
        original = find_file(root, self.originals)
        known = _read_types(original) if original else {}
        notes: Counter[str] = Counter()
        if original is None:
            notes[f"types are unknown without {self.originals[0]}"] = 1
        videos = []
        for record, where in number_records(read_records(path), path):
            name = read_field(record, "video_id", str, where)
            found = []
            for number, row in enumerate(read_field(record, "conversations", list, where)):
                at = f"{where} conversation {number}"
                text, answer = read_field(row, "question", str, at), read_field(row, "answer", str, at)
                kind = _join(known, name, text, answer)
                notes["questions without a type"] += kind == UNJOINED
                asked_s = float(read_field(row, "end_time", (int, float), at))
                found.append(Question(str(number), text.strip(), answer.strip(), kind, asked_s, "query", self.name))
            start, end = (record.get(key) for key in ("clip_start_time", "clip_end_time"))
            known_clip = isinstance(start, int | float) and isinstance(end, int | float)
            clip_s = (float(start or 0), float(end or 0)) if known_clip else None
            videos.append(Video(name, str(record.get("video_path") or name), tuple(found), clip_s=clip_s))
        return Annotations(tuple(videos), +notes)

    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Score it until a judge does: a token F1 of one half."""
        return token_f1(prediction, expected) >= F1_RIGHT


class RvsEgo(Rvs):
    """Ten hours of Ego4D."""

    name = "rvs-ego"
    annotations = ("ego4d_oe.json",)
    originals = ("test_qa_ego4d.json",)


class RvsMovie(Rvs):
    """Twenty-two films of MovieNet, as key frames."""

    name = "rvs-movie"
    annotations = ("movienet_oe.json",)
    originals = ("test_qa_movienet.json",)


def _read_types(path: Path) -> Mapping[tuple[str, str], Mapping[str, set[str]]]:
    """Return (question, answer) -> type -> videos."""
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row, where in number_records(read_records(path), path):
        key = _plain(read_field(row, "question", str, where)), _plain(read_field(row, "answer", str, where))
        videos = {str(row[name]) for name in ("video_id", "video_name", "original_video") if row.get(name)}
        found[key][read_field(row, "answer_type", str, where)] |= videos
    return found


def _join(known: Mapping[tuple[str, str], Mapping[str, set[str]]], video: str, text: str, answer: str) -> str:
    kinds: Mapping[str, Any] = known.get((_plain(text), _plain(answer)), {})
    if len(kinds) > 1:
        kinds = {kind: videos for kind, videos in kinds.items() if any(video in name for name in videos)}
    return next(iter(kinds)) if len(kinds) == 1 else UNJOINED


def _plain(text: str) -> str:
    return " ".join(text.split())
