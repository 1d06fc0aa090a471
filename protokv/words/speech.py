"""Write down what is said in a video file, as `.srt`, with a model of transformers: Whisper or
Moonshine.

The sound is cut into pieces where it is quiet, and each piece is recognised by itself, greedily.
Whisper tells the times of its segments; Moonshine tells none, so its pieces are short.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
import torch
from numpy.typing import NDArray

from protokv.backbones.files import download_model, read_model_file, translate_model_errors
from protokv.backbones.loading import PlacementOptions, quiet_transformers
from protokv.backbones.registry import is_hub_name
from protokv.errors import ConfigError, ModelError
from protokv.video.address import source_kind
from protokv.video.container import discard_other_streams, open_container
from protokv.video.registry import open_source
from protokv.video.source import ShouldStop, never_stop
from protokv.words.find import SUBTITLES_AUTO, choose_subtitle_track, find_subtitle_file

_Samples = NDArray[np.float32]

# seconds of a piece, by the model_type of the models that are known
_LONGEST_S: Final = {"whisper": 30.0, "moonshine": 8.0}
_TOKENS_PER_S: Final = 6.5  # more come from a model that repeats itself
# root mean square, of 1, below which sound is not recognised; speech has 100 times as much
_SILENT: Final = 0.001


def transcribe_to_subtitles(
    source: object,
    choice: str,
    model: str,
    device: str = "auto",
    should_stop: ShouldStop = never_stop,
) -> None:
    """Write subtitles beside a video file that has none of this choice: `NAME.srt`, or
    `NAME.LANGUAGE.srt`.

    Nothing is written if nothing is said, or once `should_stop`, asked between pieces, returns
    True. ConfigError: the source is no file, they cannot be written, or there is no such device.
    SourceError: the video cannot be read. ModelError: there is no such model (a folder or a hub
    name), it is damaged, or it recognises no speech.
    """
    if not isinstance(source, str | os.PathLike) or source_kind(os.fspath(source)) != "file":
        raise ConfigError(
            "what is said can be written down for files alone", hint="leave --transcribe out"
        )
    with open_source(source) as video:
        if (
            choose_subtitle_track(video.texts, choice) is not None
            or find_subtitle_file(source, choice) is not None
        ):
            return
    recogniser = load_speech_recogniser(model, device)
    rows = list[str]()
    longest_s = _LONGEST_S[recogniser.model.config.model_type]
    for start_s, samples in split_audio_at_silence(
        Path(source), recogniser.feature_extractor.sampling_rate, longest_s
    ):
        if should_stop():
            return
        for first_s, last_s, text in recognise_speech(recogniser, samples):
            begin = _stamp(start_s + first_s)
            end = _stamp(start_s + last_s)
            rows.append(f"{len(rows) + 1}\n{begin} --> {end}\n{text}\n\n")
    target = Path(source).with_suffix(
        ".srt" if choice == SUBTITLES_AUTO else f".{choice.lower()}.srt"
    )
    # a full disk leaves no half of a file
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if rows:
            unfinished.write_text("".join(rows), encoding="utf-8")
            unfinished.replace(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}: {error.strerror}", hint="copy the video elsewhere"
        ) from error


def split_audio_at_silence(
    video: Path, rate: int, longest_s: float
) -> Iterator[tuple[float, _Samples]]:
    """Give the sound of a video but for silence: the start in seconds of its pictures, and float32
    `[n]` at `rate`.

    A piece ends at the quietest tenth of a second in its last two thirds, or where the sound has a
    gap.
    """
    most = round(longest_s * rate)
    tenth = rate // 10
    samples = np.empty(0, np.float32)
    start_s = 0.0
    for time_s, part in _read_sound(video, rate):
        has_gap = abs(time_s - start_s - len(samples) / rate) > 0.2
        while len(samples) >= (1 if has_gap else most):
            n = len(samples)
            if n >= most:
                loudness = np.square(samples[most // 3 : most])
                quietest = (
                    loudness[: len(loudness) // tenth * tenth].reshape(-1, tenth).mean(1).argmin()
                )
                n = most // 3 + int(quietest) * tenth + tenth // 2
            if np.sqrt(np.square(samples[:n]).mean()) > _SILENT:
                yield start_s, samples[:n]
            samples = samples[n:]
            start_s = start_s + n / rate
        samples = np.concatenate((samples, part))
        start_s = time_s if has_gap else start_s


def _read_sound(video: Path, rate: int) -> Iterator[tuple[float, _Samples]]:
    """Give samples with their time from the start of the pictures, NaN if it is not known; last
    infinity and none.

    Packets that cannot be decoded are left out.
    """
    with open_container(video) as container:
        if (track := container.streams.best("audio")) is None or track.codec_context is None:
            return
        discard_other_streams(container, track)
        origin_s = (container.start_time or 0) / av.time_base
        resampler = av.AudioResampler("flt", "mono", rate)
        for packet in container.demux(track):
            with suppress(Exception):  # PyAV raises more than its own errors on a damaged packet
                for part in chain.from_iterable(map(resampler.resample, packet.decode())):
                    yield (
                        math.nan if part.time is None else part.time - origin_s,
                        part.to_ndarray()[0],
                    )
    yield math.inf, np.empty(0, np.float32)


@torch.inference_mode()
def recognise_speech(recogniser: Any, samples: _Samples) -> Iterator[tuple[float, float, str]]:
    """Give what is said in a piece of sound: start and end in seconds of the piece, and the
    text.
    """
    rate = recogniser.feature_extractor.sampling_rate
    seconds = len(samples) / rate
    how = {
        "num_beams": 1,
        "do_sample": False,
        "max_new_tokens": min(math.ceil(_TOKENS_PER_S * seconds) + 4, 220),
    }
    times = True if recogniser.type == "seq2seq_whisper" else None
    with quiet_transformers(), warnings.catch_warnings():
        # numpy takes the mean of no numbers in a piece without words
        warnings.simplefilter("ignore")
        found = recogniser(
            {"raw": samples, "sampling_rate": rate}, generate_kwargs=how, return_timestamps=times
        )
    for chunk in found.get("chunks") or [{"timestamp": (0.0, seconds), "text": found["text"]}]:
        # A time may be missing, or lie behind the sound.
        first_s, last_s = (seconds if at is None else min(at, seconds) for at in chunk["timestamp"])
        text = " ".join(chunk["text"].split())
        if any(map(str.isalnum, text)):  # models write full stops where they hear noise
            yield min(first_s, last_s), last_s, text


@lru_cache(maxsize=1)
def load_speech_recogniser(name: str, device: str = "auto") -> Any:
    """Return the pipeline of transformers for a model; the last one stays. Raises as
    `transcribe_to_subtitles`.
    """
    place = PlacementOptions.parse(device).device
    with translate_model_errors(name), quiet_transformers():
        path = str(download_model(name, _check_kind)) if is_hub_name(name, None) else name
        _check_kind(Path(path))
        from transformers import pipeline

        options = {
            "dtype": torch.float32 if place.type == "cpu" else "auto",
            "model_kwargs": {"use_safetensors": True, "attn_implementation": "sdpa"},
        }
        return pipeline(
            "automatic-speech-recognition", path, device=place, trust_remote_code=False, **options
        )


def _check_kind(folder: Path) -> None:
    kind = read_model_file(str(folder), "config.json").get("model_type")
    if kind not in _LONGEST_S:
        what = (
            f"it is a {kind} model" if kind else "there is no config.json in it that names its kind"
        )
        raise ModelError(
            f"{what}, which recognises no speech", hint=f"use one of {', '.join(_LONGEST_S)}"
        )


def _stamp(time_s: float) -> str:
    whole, milliseconds = divmod(round(max(0.0, time_s) * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02},{milliseconds:03}"
