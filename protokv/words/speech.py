"""Recognise speech with transformers: Whisper, with the times of words where a model has them, and Moonshine.

Each piece of sound is recognised by itself and greedily, so that the words of one do not depend on those before it.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import torch

from protokv.backbones.files import check_repeats, digest_weights, read_json
from protokv.backbones.hub import fetch, quiet_transformers, translate_errors
from protokv.backbones.loading import PlacementRequest, load_model
from protokv.backbones.registry import on_hub
from protokv.errors import ModelError
from protokv.video.source import Line, Sound

# By model_type: the class, and the longest piece in seconds. Whisper fills up to 30 s, whatever it hears, and tells
# times within them. Moonshine tells none, so its pieces are short.
KINDS: Final = {
    "whisper": ("WhisperForConditionalGeneration", 30.0),
    "moonshine": ("MoonshineForConditionalGeneration", 8.0),
}

# Tokens of speech in a second. A model that finds more repeats itself.
TOKENS_PER_S: Final = 6.5

LONGEST_WORD_S: Final = 1.0

_ENDS: Final = re.compile(r"[.?!…。？！]$")  # noqa: RUF001 - as other languages write them


class Recogniser:
    """A model that writes down what is said.

    Args:
        name: as the user calls it.
        path: its folder.
        pipeline: of transformers, for speech recognition.

    Attributes:
        record: what a state keeps on record of it.
        rate: samples a second that it takes.
        longest_s: the longest piece that it takes, in seconds.
    """

    def __init__(self, name: str, path: str, pipeline: Any) -> None:
        self._pipeline, self._alone = pipeline, Lock()
        self._times: bool | str | None = None
        self.record: Mapping[str, Any] = {"kind": "speech", "name": name, "digest": digest_weights(path)}
        self.rate: int = pipeline.feature_extractor.sampling_rate
        self.longest_s = KINDS[pipeline.model.config.model_type][1]
        if pipeline.type == "seq2seq_whisper":
            published = pipeline.model.generation_config
            if getattr(published, "no_timestamps_token_id", None) is not None:
                self._times = "word" if getattr(published, "alignment_heads", None) else True

    @torch.inference_mode()
    def __call__(self, sound: Sound) -> list[Line]:
        """Return what is said in a piece of sound: sentences whose words have times, segments, or one line for all."""
        seconds = sound.end_s - sound.start_s
        given = {"raw": sound.samples.astype(np.float32) / 32768, "sampling_rate": self.rate}
        how: dict[str, Any] = {"num_beams": 1, "do_sample": False}
        how["max_new_tokens"] = min(math.ceil(TOKENS_PER_S * seconds) + 4, 220)
        with self._alone, quiet_transformers(), warnings.catch_warnings():
            # In a piece without words the times are means of no numbers, and numpy warns.
            warnings.simplefilter("ignore")
            found = self._pipeline(given, generate_kwargs=how, return_timestamps=self._times)
        if self._times is None:
            return [Line(sound.start_s, sound.end_s, found["text"].strip())]
        return list(_lines(found["chunks"], sound, words=self._times == "word"))


def _lines(chunks: Sequence[Mapping[str, Any]], sound: Sound, *, words: bool) -> Iterator[Line]:
    """Give the lines of Whisper's chunks: segments, or words, which become sentences of WebVTT with their times."""
    latest_s = sound.end_s - 0.002
    line_s = begin_s = sound.start_s
    text = ""
    for n, chunk in enumerate(chunks):
        # A time may be missing, lie behind the sound, or run back.
        first_s, last_s = (
            begin_s if at is None else min(max(begin_s, sound.start_s + at), latest_s) for at in chunk["timestamp"]
        )
        if words:
            # The pause before a word counts as a part of it.
            first_s = max(first_s, last_s - LONGEST_WORD_S)
        begin_s, said = first_s, str(chunk["text"])
        line_s = line_s if text else begin_s
        text += f"<{_stamp(begin_s)}>{said}" if words else said
        if not words or _ENDS.search(said) or n == len(chunks) - 1:
            yield Line(line_s, max(begin_s, last_s), text)
            text = ""


def _stamp(time_s: float) -> str:
    whole, milliseconds = divmod(int(time_s * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}.{milliseconds:03}"


@lru_cache(maxsize=1)
def load_recogniser(name: str, device: str = "auto") -> Recogniser:
    """Load a model that recognises speech; the last one stays loaded. On a CPU it is in float32.

    Args:
        name: a local folder, or a hub name such as `openai/whisper-base`. No code of a checkpoint is run.
        device: as for `load_backbone`.

    Raises:
        ModelError: there is no such model, it is damaged, or it recognises no speech.
        ConfigError: the device does not exist here.
    """
    placed = PlacementRequest.of(device=device, dtype="auto", device_map=None, quantization=None)
    with translate_errors(name):
        if on_hub(name, None):
            path = str(fetch(name, _check_kind))
        else:
            path = name
            _check_kind(Path(path))
        check_repeats(path)
        with quiet_transformers():
            import transformers
            from transformers.pipelines import AutomaticSpeechRecognitionPipeline

            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            placement = placed.placement(config.dtype)
            if placement.device.type == "cpu":
                placement = replace(placement, dtype=torch.float32)
            kind = getattr(transformers, KINDS[config.model_type][0])
            pipeline = AutomaticSpeechRecognitionPipeline(
                # Times of words come from weights of attention.
                model=load_model(kind, path, placement, "eager"),
                tokenizer=transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False),
                feature_extractor=transformers.AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False),
                device=placement.device,
            )
            return Recogniser(name, path, pipeline)


def _check_kind(folder: Path) -> None:
    """Refuse a folder that holds no model of speech recognition that is known here. ModelError."""
    kind = read_json(str(folder), "config.json").get("model_type")
    if kind not in KINDS:
        what = "there is no config.json in it that names its kind" if kind is None else f"it is a {kind} model"
        raise ModelError(
            f"{what}, which recognises no speech", hint="use one of Whisper or Moonshine, such as openai/whisper-base"
        )
