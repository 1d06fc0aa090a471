"""Every data set in small: two procedural videos, annotated with the fields of the published schemas.

No annotation of a real set is here. The embedded model knows no letters, so its answers are mostly wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from samples.questions import ANSWERS, Question, make_questions
from samples.render import render
from samples.worlds.world import World, WorldConfig

LENGTH_S, ASK_S = 14, 10
FPS, SIDE = 4, 84
SEEDS = (21, 22)
CONTENT = ("colour", "shape", "where", "whether")


@dataclass(frozen=True)
class Clip:
    """A rendered world and its file."""

    world: World
    path: Path

    def ask(self, at_s: float, types: tuple[str, ...] = CONTENT) -> list[Question]:
        return make_questions(self.world, at_s, types=types)

    def choices(self, at_s: float, types: tuple[str, ...]) -> Iterator[tuple[Question, list[str], str]]:
        """Yield questions, the answer among three others of its type, and its letter; the text decides its place."""
        for question in self.ask(at_s, types):
            options = [answer for answer in ANSWERS[question.type] if answer != question.answer][:3]
            options.insert(len(question.question) % (len(options) + 1), question.answer)
            yield question, options, ascii_uppercase[options.index(question.answer)]


def render_clips(folder: Path) -> list[Clip]:
    clips = []
    for seed in SEEDS:
        config = WorldConfig(seed=seed, length_s=LENGTH_S, cut_s=None, evidence_events=2, evidence_s=8)
        world, path = World(config), folder / f"clip{seed}.mp4"
        render(world, path, fps=FPS, side=SIDE)
        clips.append(Clip(world, path))
    return clips


def _put(clip: Clip, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.link(clip.path, path)


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(data), path)
    else:
        path.write_text(json.dumps(data))


KINDS = {"whether": "Whether Something Happened(Y/N)", "first": "What event order", "colour": "Action Caption"}


def _ask_rvs(clip: Clip, types: tuple[str, ...], start_s: int, stop: str = "") -> tuple[list[Any], list[Any]]:
    """Return the questions of the conversion, and those of the original file, which alone has their types."""
    converted, original = [], []
    for question in clip.ask(ASK_S, types):
        row = {"question": question.question, "answer": question.answer + stop}
        converted.append(row | {"start_time": start_s, "end_time": start_s + ASK_S})
        kind = KINDS.get(question.type, "Scene Summary")
        original.append(row | {"video_id": f"x_{clip.path.stem}", "answer_type": kind})
    return converted, original


def write_rvs_ego(root: Path, clips: list[Clip]) -> None:
    """Write yes / no questions whose answer lasts, and one whose answer changes."""
    converted, original = [], []
    for clip in clips:
        _put(clip, root / "videos" / clip.path.name)
        rows, typed = _ask_rvs(clip, ("whether", "first", "now"), 0, ".")
        path = f"/data/rvs/ego/videos/{clip.path.name}"
        converted.append({"video_id": clip.path.stem, "video_path": path, "conversations": rows})
        original += typed
    _write(root / "ego4d_oe.json", converted)
    _write(root / "test_qa_ego4d.json", original)


def write_rvs_movie(root: Path, clips: list[Clip]) -> None:
    """Write one film as key frames of the whole, and one as key frames of a clip, with the times of the film."""
    converted, original = [], []
    (root / "videos").mkdir(parents=True)
    for clip, start in zip(clips, (0, 500), strict=True):
        name = clip.path.stem
        np.save(root / "videos" / f"{name}.npy", clip.world.frames(0, LENGTH_S)[::2])
        rows, typed = _ask_rvs(clip, ("whether", "colour"), start)
        film = {"video_id": name, "video_path": f"/data/rvs/movie/videos/{name}.npy", "conversations": rows}
        converted.append(film | {"clip_start_time": start, "clip_end_time": start + LENGTH_S})
        original += typed
    _write(root / "movienet_oe.json", converted)
    _write(root / "test_qa_movienet.json", original)


def write_ovo_bench(root: Path, clips: list[Clip]) -> None:
    """Write every kind of task: choices about the past, the present, or without an answer, and forward probes."""
    rows: list[dict[str, Any]] = []
    for clip in clips:
        video = f"Ego4D/clips/{clip.path.name}"
        _put(clip, root / "src_videos" / video)
        for task, types in (("EPM", ("colour", "shape")), ("ASI", ("which_first",)), ("OJR", ("now",))):
            for question, options, letter in clip.choices(ASK_S, types):
                row = {"task": task, "realtime": ASK_S - 0.8, "question": question.question, "options": options}
                rows.append(row | {"id": len(rows), "video": video, "gt": ascii_uppercase.index(letter)})
        options = ["star", "Unable to answer", "ring", "bar"]
        row = {"task": "HLD", "realtime": 9, "question": "What was the purple thing?", "options": options}
        rows.append(row | {"id": len(rows), "video": video, "gt": 1})
    video = f"Ego4D/clips/{clips[0].path.name}"
    probes = {
        "REC": {"activity": "appear", "test_info": [{"realtime": 4, "count": 1}, {"realtime": 10.0, "count": 2}]},
        "SSR": {"test_info": [{"realtime": 3, "step": "Is anything visible now?", "type": 1}]},
        "CRR": {
            "question": "Was there a star?",
            "test_info": [{"realtime": 5, "type": 0}, {"realtime": 12, "type": 1}],
        },
    }
    rows += [
        {"id": len(rows) + i, "task": task, "video": video} | rest for i, (task, rest) in enumerate(probes.items())
    ]
    _write(root / "ovo_bench_new.json", rows)


def write_streamingbench(root: Path, clips: list[Clip]) -> None:
    """Write every form of clock time, one time far behind the end, and one outside the range of its entry."""
    entries = []
    for clip, stamps in zip(clips, (("00:00:10", "00:12450"), ("0:00:10", "00:10")), strict=True):
        _put(clip, root / "videos" / clip.path.name)
        for stamp, span in zip(stamps, ("[0:00:00 - 0:00:20]", "[0:00:00 - 0:00:05]"), strict=True):
            rows = []
            for question, options, letter in clip.choices(ASK_S, ("colour", "where")):
                task = "Attribute Recognition" if question.type == "colour" else "Spatial Understanding"
                row = {"task_type": task, "question": question.question, "time_stamp": stamp, "answer": letter}
                rows.append(row | {"options": _with_letters(options)})
            entries.append({"time": span, "questions": rows, "video_path": f"./videos/{clip.path.name}"})
    _write(root / "questions_real.json", entries)


def _with_letters(options: list[str]) -> list[str]:
    return [f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options, strict=False)]


def write_videomme(root: Path, clips: list[Clip]) -> None:
    """Write the Parquet table of the hub."""
    rows = []
    for number, clip in enumerate(clips):
        _put(clip, root / "data" / clip.path.name)
        for question, options, letter in clip.choices(LENGTH_S, ("colour", "shape", "where")):
            rows.append(
                {
                    "videoID": clip.path.stem, "question_id": f"{number:03}-{len(rows)}", "answer": letter,
                    "duration": ("short", "medium", "long")[len(rows) % 3], "question": question.question,
                    "options": _with_letters([f"{option}." for option in options]),
                }
            )  # fmt: skip
    _write(root / "videomme" / "test-00000-of-00001.parquet", rows)


MLVU_TYPES = {
    "1_plotQA": ("plotQA", "colour"), "2_needle": ("findNeedle", "where"), "3_ego": ("ego", "shape"),
    "4_count": ("count", "colour"), "5_order": ("order", "which_first"), "6_anomaly_reco": ("anomaly_reco", "where"),
    "7_topic_reasoning": ("topic_reasoning", "shape"),
}  # fmt: skip


def write_mlvu(root: Path, clips: list[Clip]) -> None:
    """Write seven files; each task has a folder of videos."""
    for task, (kind, of_world) in MLVU_TYPES.items():
        rows = []
        for clip in clips[:1]:
            _put(clip, root / "video" / task / clip.path.name)
            for question, options, _ in clip.choices(LENGTH_S, (of_world,)):
                row = {"video": clip.path.name, "question": question.question, "question_type": kind}
                rows.append(row | {"candidates": options, "answer": question.answer})
        _write(root / "json" / f"{task}.json", rows)
    _write(root / "json" / "9_summary.json", [{"video": "x.mp4", "question": "Summarise.", "answer": "Shapes."}])


WRITERS: dict[str, Callable[[Path, list[Clip]], None]] = {
    "rvs-ego": write_rvs_ego, "rvs-movie": write_rvs_movie, "ovo-bench": write_ovo_bench,
    "streamingbench": write_streamingbench, "videomme": write_videomme, "mlvu": write_mlvu,
}  # fmt: skip
"""Name of a data set -> the function that writes it in small below a folder."""
