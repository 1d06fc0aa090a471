"""A benchmark on disk as streams, and the baselines that stand beside its memories.

Missing or unreadable videos are listed, never skipped in silence. The baselines are the text alone
and the last 4 and 16 frames: many questions need no video, and four recent frames beat most
memories if the evidence is recent (SimpleStream, arXiv 2604.02317).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from protokv.core.backbone import Backbone
from protokv.errors import SourceError, SourceNotFound, SourceUnreadable
from protokv.memories import LastFramesConfig, SlidingWindowConfig
from protokv.replay.benchmarks.base import Benchmark, BenchmarkVideo
from protokv.replay.benchmarks.files import find_dataset_file, find_dataset_video
from protokv.replay.memories import MemoryVariant
from protokv.replay.questions import ReplayQuestion
from protokv.replay.streams import ReplayStream, VideoFileStream
from protokv.texts import JsonObject
from protokv.video import VideoStep
from protokv.video.registry import fingerprint_video_file
from protokv.video.sampling import group_frames, sample_frames
from protokv.video.source import Frame
from protokv.words.find import SUBTITLES_AUTO, SUBTITLES_OFF


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """An opened data set: a stream for each readable video."""

    streams: Sequence[ReplayStream]
    missing: dict[str, str]  # name of a video -> why it cannot be read
    notes: Counter[str]  # each thing that was left out or differs from the publication -> how often


class _KeyFrames(ReplayStream):
    """An array of key frames `[n, h, w, 3]` uint8 (`.npy`), one a second."""

    def __init__(self, path: Path, questions: Sequence[ReplayQuestion]) -> None:
        """Open the array without reading it. SourceUnreadable: it is not such an array."""
        try:
            self._frames = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SourceUnreadable(f"{path} is no array of frames: {error}") from error
        shape = self._frames.shape
        if self._frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
            raise SourceUnreadable(
                f"{path} is not [n, h, w, 3] uint8: {list(shape)} {self._frames.dtype}"
            )
        self.name = path.name
        self.length_s = float(shape[0])
        self.questions = questions
        self.facts: JsonObject = {
            "size_bytes": path.stat().st_size,
            "fingerprint": fingerprint_video_file(path),
        }

    def steps(self, fps: float, frames_per_step: int) -> Iterator[VideoStep]:
        """Sample the key frames by their times."""
        frames = (Frame(float(i), np.asarray(frame), 1.0) for i, frame in enumerate(self._frames))
        return group_frames(sample_frames(frames, fps), frames_per_step)


def open_dataset(
    benchmark: Benchmark,
    root: Path,
    *,
    most_videos: int | None = None,
    subtitles: str = SUBTITLES_OFF,
) -> OpenDataset:
    """Open the videos of a data set, or the first `most_videos` of its annotations.

    `root` is its folder, or one with a folder of its name. `subtitles` says which enter the stream;
    `auto` also takes `subtitle/NAME.srt` below the folder.

    SourceNotFound: there are no annotations, or no video can be read. ConfigError: the annotations
    are not as published.
    """
    # VideoMME has a folder of its own name in its folder.
    if root.name != benchmark.name and (own := root / benchmark.name).is_dir():
        root = own
    notes = Counter[str]()
    missing = dict[str, str]()
    streams = list[ReplayStream]()
    asked: dict[BenchmarkVideo, list[ReplayQuestion]] = {}
    for video, question in benchmark.read(root, notes):
        asked.setdefault(video, []).append(question)
    for video, questions in islice(asked.items(), most_videos):
        try:
            stream = _open(video, questions, root, subtitles)
        except SourceError as error:
            missing[video.name] = error.message
            continue
        notes["videos without subtitles"] += subtitles != SUBTITLES_OFF and not stream.has_words
        stream.questions = [
            replace(
                question,
                reference_s=_place(question, video, stream.length_s, notes),
                retrospective=benchmark.find_type(question.type).retrospective,
            )
            for question in questions
        ]
        streams.append(stream)
    if not streams:
        why = next(iter(missing.values()), "the annotations name none")
        raise SourceNotFound(
            f"none of the {len(missing)} videos of {benchmark.name} can be read below {root}: "
            f"{why}",
            hint="lay it out as its authors publish it, below --data-root",
        )
    return OpenDataset(streams, missing, +notes)


def _open(
    video: BenchmarkVideo, questions: Sequence[ReplayQuestion], root: Path, subtitles: str
) -> ReplayStream:
    path = find_dataset_video(root, video.path)
    if path is None:
        raise SourceNotFound(f"video {video.path} is not below {root}")
    stream: ReplayStream
    if path.suffix == ".npy":
        stream = _KeyFrames(path, questions)
    else:
        if (
            subtitles == SUBTITLES_AUTO
            and (file := find_dataset_file(root, [f"subtitle/{path.stem}.srt"])) is not None
        ):
            subtitles = str(file)
        stream = VideoFileStream(path, questions, subtitles)
    stream.name = video.name
    return stream


def _place(
    question: ReplayQuestion, video: BenchmarkVideo, length_s: float, notes: Counter[str]
) -> float:
    """Return the reference time of a question in this file."""
    if question.reference == "end":
        return length_s
    at_s = question.reference_s
    if video.clip_s is not None and length_s < video.clip_s[1] - 1 and at_s >= video.clip_s[0]:
        # A file that ends before the clip holds the clip alone.
        notes["questions counted from the beginning of their clip"] += 1
        at_s -= video.clip_s[0]
    notes["questions after the end of their video, asked at its end"] += at_s > length_s
    return min(at_s, length_s)


TEXT_ONLY_VARIANT = "text only"


def complete_memory_variants(
    variants: Sequence[MemoryVariant],
    streams: Sequence[ReplayStream],
    backbone: Backbone,
    *,
    baselines: bool,
) -> list[MemoryVariant]:
    """Give memories a share for words if a stream has words, and add the baselines that are not
    among them.

    The last frames have the budget that they need. With words they keep their positions: some
    models cannot show words at others.
    """
    words = any(stream.has_words for stream in streams)
    variants = [replace(variant, config=variant.config.with_words(words)) for variant in variants]
    if not baselines:
        return variants
    tokens = _measure_step(backbone)
    found = [MemoryVariant(TEXT_ONLY_VARIANT, SlidingWindowConfig(budget=1), blind=True)]
    for frames in (4, 16):
        steps = -(-frames // backbone.frames_per_step)
        # As in SimpleStream: encoded anew for each question, right after the prompt.
        config = LastFramesConfig(
            budget=steps * tokens,
            last_steps=steps,
            recent_frames=steps * backbone.frames_per_step,
            positions="stream" if words else "compact",
        )
        found.append(MemoryVariant(f"last {frames} frames", config))
    named = {variant.label for variant in variants}
    return [*variants, *(variant for variant in found if variant.label not in named)]


@torch.inference_mode()
def _measure_step(backbone: Backbone) -> int:
    """Return the tokens of the largest step that the model's preprocessing allows."""
    # Larger than any processor keeps.
    images = np.zeros((backbone.frames_per_step, 2048, 2048, 3), dtype=np.uint8)
    return len(backbone.embed_step(images).embeddings)
