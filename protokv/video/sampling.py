"""Sample frames by their time stamps and group them into the steps that a model is fed with.

The k-th sampling time is exactly `k / fps`, and the sample is the frame shown at that time. So a
video of variable rate is right, a slow one repeats frames, and reading from a later start gives the
steps of an uninterrupted reading. Knows no files, decoders or models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from protokv.core.settings import check_sampled_fps
from protokv.video.source import Frame, Image, ShouldStop, Source, SourceDamage, never_stop

# Containers that count in milliseconds round a frame's time by half of one.
SAMPLING_SLACK_S = 1e-3

_WHOLE = SourceDamage()


class SampledFrame(NamedTuple):
    """The picture shown at `time_s`: uint8 RGB `[h, w, 3]`, and the decoder that gave it."""

    time_s: float
    image: Image
    decoder: str


@dataclass(frozen=True)
class VideoStep:
    """The frames that a model is fed with at once."""

    time_s: float  # the sampling time of the first image
    images: Image  # uint8 [F, h, w, 3]
    decoders: tuple[str, ...]  # decoder of each image
    damage: SourceDamage = _WHOLE  # damage of the reading up to this step
    # crc32 of the last image, to check on resuming that the same step was read before
    mark: int = 0


def sample_frames(
    frames: Iterable[Frame], fps: float, start_s: float = 0.0
) -> Iterator[SampledFrame]:
    """Give the frame shown at each `k / fps` from `start_s` on, up to the end of the last frame.

    The last frame ends after its own duration. If it has none, it lasts as long as the gap before
    it, but at most `1 / fps`: a reading that begins one sample earlier sees that gap and finds the
    same end. Before the first frame (a damaged beginning) the first frame is shown. ConfigError as
    `check_sampled_fps`.
    """
    check_sampled_fps(fps)
    k = max(0, math.ceil(start_s * fps - 1e-6))
    current: Frame | None = None
    gap_s = 1.0 / fps
    for frame in frames:
        while k / fps + SAMPLING_SLACK_S < frame.time_s:
            # Hold no older frame: damaged pictures show what was in the memory that a decoder
            # reuses.
            yield SampledFrame(k / fps, (current or frame).image, (current or frame).decoder)
            k += 1
        if current is not None:
            gap_s = min(frame.time_s - current.time_s, 1.0 / fps)
        current = frame
    while current is not None and k / fps + SAMPLING_SLACK_S < current.time_s + (
        current.duration_s or gap_s
    ):
        yield SampledFrame(k / fps, current.image, current.decoder)
        k += 1


def group_frames(samples: Iterable[SampledFrame], frames_per_step: int) -> Iterator[VideoStep]:
    """Group samples into steps of `frames_per_step`; a short last one repeats its last, as in
    Qwen's processor.
    """
    samples = iter(samples)
    while group := list(islice(samples, frames_per_step)):
        yield make_video_step(group, frames_per_step)


def make_video_step(group: list[SampledFrame], frames_per_step: int) -> VideoStep:
    """Make a step of one to `frames_per_step` samples; a short one repeats its last image."""
    images = [one.image for one in group]
    images += [images[-1]] * (frames_per_step - len(images))
    decoders = tuple(one.decoder for one in group)
    return VideoStep(group[0].time_s, np.stack(images), decoders, mark=_mark(group[-1].image))


def read_steps(
    source: Source,
    fps: float,
    frames_per_step: int,
    first_index: int = 0,
    *,
    from_beginning: bool = False,
    mark: int | None = None,
    should_stop: ShouldStop = never_stop,
) -> Iterator[VideoStep]:
    """Read the steps of a source from `first_index` on: by seeking, but equal to those of a reading
    from the start.

    `fps` samples are taken a second, and `frames_per_step` of them make a step. `from_beginning` is
    as for `Source.frames`: a damaged file needs it to give the same steps again. `mark` is that of
    the step before, if it is known: a seek that does not lead to its picture is replaced by a
    reading from the beginning. `should_stop` is asked between frames and while waiting for one; a
    step that has begun is then dropped. ConfigError as `check_sampled_fps`.
    """
    check_sampled_fps(fps)
    start_s = first_index * frames_per_step / fps
    # Losses between the last sample that was taken and the first that is wanted belong to this
    # reading.
    begin_s = max(0.0, start_s - 1 / fps)

    def read(from_s: float, from_beginning: bool) -> Iterator[SampledFrame]:
        frames = source.frames(begin_s, from_beginning=from_beginning, should_stop=should_stop)
        return sample_frames(frames, fps, from_s)

    known = first_index and mark is not None and not from_beginning
    samples = read(begin_s if known else start_s, from_beginning)
    if known:
        before = next(samples, None)
        if before is None or _mark(before.image) != mark:
            samples = read(start_s, True)
    for step in group_frames(samples, frames_per_step):
        # The frames of the last one may have ended because somebody asked.
        if should_stop():
            return
        yield replace(step, damage=source.damage)


def _mark(image: Image) -> int:
    return zlib.crc32(np.ascontiguousarray(image).reshape(-1).data)
