"""The inputs of a model for each step of a video, as `protokv.Cache.watch` yields them.

They are the ids and pixels of the prompt that a model was trained on, cut into steps. The class of
its family knows the prefix, the text around a step, its pixels and its positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from protokv.backbones.adapter import TransformersBackbone
from protokv.backbones.registry import wrap_model
from protokv.core.step import StepTokens
from protokv.errors import ConfigError
from protokv.stream.pushed import PushedFrameBuffer
from protokv.stream.stream import Stream
from protokv.texts import Keywords


def read_prompt(model: Any, processor: Any) -> TransformersBackbone:
    """Return the class of a family, with the prompt of a model. ConfigError: its forward takes no
    steps, or nothing here knows what it is told of times.
    """
    found = wrap_model(model, processor)
    own = getattr(type(found), "name_pixels", TransformersBackbone.name_pixels)
    if not isinstance(found, TransformersBackbone) or own is TransformersBackbone.name_pixels:
        raise ConfigError(
            f"nothing is known of how {type(model).__name__} is told the times of steps",
            hint="use protokv.watching(model, processor), or cache.step(inputs) with your own "
            "prompt",
        )
    return found


def make_steps(
    stream: Stream, backbone: TransformersBackbone, frames: Iterable[Any], times: Iterable[float]
) -> Iterator[tuple[Keywords, Keywords]]:
    """Yield the inputs of each step, and how `Cache.commit` takes it.

    ConfigError: frames and times differ in number, or the stream did not begin with the prompt of
    the model.
    """
    prefix = backbone.prefix_ids
    if not stream.begun:
        yield {"input_ids": make_ids(backbone, prefix)}, {"prefix": True}
    elif stream.sink_tokens != len(prefix):
        raise ConfigError(
            "the cache did not begin with the prompt of the model", hint="watch with a new cache"
        )
    for images, start_s in _pair_frames(stream, frames, times):
        inputs, tokens = _make_step(stream, backbone, images, start_s)
        yield inputs, {"coordinates": tokens.coordinates(), "time_s": start_s}


def make_ids(backbone: TransformersBackbone, ids: list[int]) -> Tensor:
    """Return ids as a model takes them, `[1, T]` int64."""
    return torch.tensor([ids], device=backbone.device)


def _pair_frames(
    stream: Stream, frames: Iterable[Any], times: Iterable[float]
) -> Iterator[tuple[Any, float]]:
    """Yield the images of each step and its start; a last step has its last frame again."""
    waiting = PushedFrameBuffer(stream.clock.stream_time_s)
    for frame, time_s in zip_longest(frames, times):
        if frame is None or time_s is None:
            raise ConfigError(
                "there are not as many times as frames",
                hint="give the time of each frame, in seconds",
            )
        if step := waiting.add(frame, time_s, stream.clock):
            yield step
    if step := waiting.finish(stream.clock):
        yield step


def _make_step(
    stream: Stream, backbone: TransformersBackbone, images: Any, start_s: float
) -> tuple[Keywords, StepTokens]:
    """Return the arguments of the model for a step, and what its tokens are."""
    clock = stream.clock
    prepared = backbone.prepare(images)
    texts = backbone.frame_texts(clock.mean_time(start_s))
    opening, closing = (backbone.encode(text) for text in texts)
    rows, columns = prepared.grid
    shown = slice(len(opening), len(opening) + rows * columns)
    named = backbone.name_pixels(prepared)
    token = named.pop("token")
    ids = make_ids(backbone, [*opening, *[token] * (rows * columns), *closing])
    inputs = {"input_ids": ids, **named}
    if "pixel_values_videos" in named:
        inputs["mm_token_type_ids"] = 2 * (ids == token).int()
    empty = torch.empty(ids.shape[1], 0, device=backbone.device)
    tokens = StepTokens(empty, prepared.grid, shown)
    if backbone.position_components > 1:
        placed = backbone.step_positions(
            tokens,
            origin=stream.sink_tokens,
            start=clock.next_position,
            index=clock.steps,
            time_s=start_s,
        )
        inputs["position_ids"] = placed.positions.T[:, None]
    return inputs, tokens
