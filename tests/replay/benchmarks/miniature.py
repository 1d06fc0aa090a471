"""Every data set in small: two videos, annotated with the fields of the published schemas.

No annotation of a real set is here. The embedded model knows no letters, so its answers are mostly
wrong.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from protokv.texts import JsonObject, Keywords
from tests.cli.conftest import write_video

LENGTH_S = 14
ASK_S = 10
NAMES = ("clip21", "clip22")
CHOICES = (
    ("Which colour did the star have?", ("red", "green", "blue", "white"), "C"),
    ("Where was the ring?", ("left", "right", "above", "below"), "A"),
)


def write_clips(folder: Path) -> list[Path]:
    return [
        write_video(folder / f"{name}.mp4", LENGTH_S, seed=seed, rate=4)
        for seed, name in enumerate(NAMES)
    ]


def _put(clip: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.link(clip, path)


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(data), path)
    else:
        path.write_text(json.dumps(data))


def _write_rvs(
    root: Path, names: Sequence[str], films: Sequence[tuple[str, str, int]], kinds: Sequence[Any]
) -> None:
    """Write the conversion, and the original file, which alone has the types of questions."""
    converted = []
    original = []
    for stem, path, start_s in films:
        asked = [{"question": question, "answer": answer} for _, question, answer in kinds]
        times = {"start_time": start_s, "end_time": start_s + ASK_S}
        clip = (
            {"clip_start_time": start_s, "clip_end_time": start_s + LENGTH_S}
            if path.endswith(".npy")
            else {}
        )
        rows = [row | times for row in asked]
        converted.append({"video_id": stem, "video_path": path, "conversations": rows} | clip)
        original += [
            row | {"video_id": f"x_{stem}", "answer_type": kind}
            for row, (kind, *_) in zip(asked, kinds, strict=True)
        ]
    _write(root / names[0], converted)
    _write(root / names[1], original)


def write_rvs_ego(root: Path, clips: list[Path]) -> None:
    """Write questions whose answers last, and one whose answer changes."""
    kinds = [
        ("Whether Something Happened(Y/N)", "Was there a star?", "yes."),
        ("What event order", "What came first?", "star."),
        ("Scene Summary", "What is there now?", "nothing."),
    ]
    for clip in clips:
        _put(clip, root / "videos" / clip.name)
    films = [(clip.stem, f"/data/rvs/ego/videos/{clip.name}", 0) for clip in clips]
    _write_rvs(root, ("ego4d_oe.json", "test_qa_ego4d.json"), films, kinds)


def write_rvs_movie(root: Path, clips: list[Path]) -> None:
    """Write one film as key frames of the whole, and one as key frames of a clip, with the times of
    the film.
    """
    kinds = [
        ("Action Caption", "Which colour has the star?", "red"),
        ("Order Judging(Y/N)", "Was it first?", "no"),
    ]
    (root / "videos").mkdir(parents=True)
    for seed, clip in enumerate(clips):
        frames = np.random.default_rng(seed).integers(0, 256, (LENGTH_S, 84, 84, 3), dtype=np.uint8)
        np.save(root / "videos" / f"{clip.stem}.npy", frames)
    films = [
        (c.stem, f"/data/rvs/movie/videos/{c.stem}.npy", start)
        for c, start in zip(clips, (0, 500), strict=True)
    ]
    _write_rvs(root, ("movienet_oe.json", "test_qa_movienet.json"), films, kinds)


def write_ovo_bench(root: Path, clips: list[Path]) -> None:
    """Write every kind of task: choices about the past, the present, or without an answer, and
    forward probes.
    """
    rows: list[JsonObject] = []
    for clip in clips:
        _put(clip, root / "src_videos" / "Ego4D" / "clips" / clip.name)
        video = {"video": f"Ego4D/clips/{clip.name}"}
        for task, (question, options, letter) in zip(
            ("EPM", "OJR", "ASI"), (*CHOICES, CHOICES[0]), strict=True
        ):
            row = {"task": task, "realtime": ASK_S - 0.8, "question": question, "options": options}
            rows.append(row | video | {"gt": "ABCD".index(letter)})
        row = {
            "task": "HLD",
            "realtime": 9,
            "question": "What was purple?",
            "options": ["star", "Unable to answer"],
        }
        rows.append(row | video | {"gt": 1})
    counts = [{"realtime": 4, "count": 1}, {"realtime": 10.0, "count": 2}]
    steps = [{"realtime": 3, "step": "Is anything visible now?", "type": 1}]
    clues = [{"realtime": 5, "type": 0}, {"realtime": 12, "type": 1}]
    first = {"video": f"Ego4D/clips/{clips[0].name}"}
    rows.append(first | {"task": "REC", "activity": "appear", "test_info": counts})
    rows.append(first | {"task": "SSR", "test_info": steps})
    rows.append(first | {"task": "CRR", "question": "Was there a star?", "test_info": clues})
    _write(root / "ovo_bench_new.json", [row | {"id": i} for i, row in enumerate(rows)])


def _choose(**more: Any) -> list[Keywords]:
    lettered = [
        [f"{x}. {o}." for x, o in zip("ABCD", options, strict=True)] for _, options, _ in CHOICES
    ]
    return [
        {"question": question, "answer": letter, "options": options} | more
        for (question, _, letter), options in zip(CHOICES, lettered, strict=True)
    ]


def write_streamingbench(root: Path, clips: list[Path]) -> None:
    """Write every form of clock time, one time far behind the end, and one outside the range of its
    entry.
    """
    entries = []
    for clip, stamps in zip(clips, (("00:00:10", "00:12450"), ("0:00:10", "00:10")), strict=True):
        _put(clip, root / "videos" / clip.name)
        for stamp, span in zip(stamps, ("[0:00:00 - 0:00:20]", "[0:00:00 - 0:00:05]"), strict=True):
            rows = _choose(task_type="Attribute Recognition", time_stamp=stamp)
            entries.append({"time": span, "questions": rows, "video_path": f"./videos/{clip.name}"})
    _write(root / "questions_real.json", entries)


def write_videomme(root: Path, clips: list[Path]) -> None:
    """Write the Parquet table of the hub."""
    rows: list[JsonObject] = []
    for clip in clips:
        _put(clip, root / "data" / clip.name)
        rows += _choose(videoID=clip.stem)
    lengths = ("short", "medium", "long", "long")
    rows = [row | {"question_id": f"{i:03}", "duration": lengths[i]} for i, row in enumerate(rows)]
    _write(root / "videomme" / "test-00000-of-00001.parquet", rows)


MLVU_TASKS = (
    "1_plotQA",
    "2_needle",
    "3_ego",
    "4_count",
    "5_order",
    "6_anomaly_reco",
    "7_topic_reasoning",
)


def write_mlvu(root: Path, clips: list[Path]) -> None:
    """Write seven files; each task has a folder of videos."""
    rows = [
        {
            "video": clips[0].name,
            "question": question,
            "candidates": options,
            "answer": options["ABCD".index(letter)],
        }
        for question, options, letter in CHOICES
    ]
    for task in MLVU_TASKS:
        _put(clips[0], root / "video" / task / clips[0].name)
        _write(root / "json" / f"{task}.json", rows)
    _write(
        root / "json" / "9_summary.json",
        [{"video": "x.mp4", "question": "Summarise.", "answer": "Shapes."}],
    )


WRITERS: dict[str, Callable[[Path, list[Path]], None]] = {
    "rvs-ego": write_rvs_ego,
    "rvs-movie": write_rvs_movie,
    "ovo-bench": write_ovo_bench,
    "streamingbench": write_streamingbench,
    "videomme": write_videomme,
    "mlvu": write_mlvu,
}
"""Name of a data set -> the function that writes it in small below a folder."""
