"""Speech recognition by tiny random models: what comes out is noise, and its form and times are those of the real."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protokv.errors import ModelError
from protokv.video.source import Sound
from protokv.words.plain import plain
from protokv.words.speech import LONGEST_WORD_S, _lines, load_recogniser
from tests.backbones.tiny import save_random, write_tokenizer

RATE = 16_000
SECOND = Sound(10.0, RATE, (8000 * np.random.default_rng(0).standard_normal(RATE)).clip(-32768, 32767).astype(np.int16))
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]


def write_whisper(folder: Path, *, aligned: bool = True) -> Path:
    """Write a Whisper whose words are letters; not `aligned`, it tells times of segments alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizerFast,
    )

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    end, first, times = ids[SPECIAL[0]], ids[SPECIAL[1]], ids[SPECIAL[-1]]
    sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    shape = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    config = WhisperConfig(
        **shape, d_model=32, num_mel_bins=8, vocab_size=times + 1502, pad_token_id=end, bos_token_id=first,
        eos_token_id=end, decoder_start_token_id=first,
    )  # fmt: skip
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        **{"alignment_heads": [[1, 0]]} if aligned else {}, no_timestamps_token_id=times, is_multilingual=False,
        prev_sot_token_id=ids[SPECIAL[2]], max_initial_timestamp_index=50, bos_token_id=first, eos_token_id=end,
        pad_token_id=end, decoder_start_token_id=first, max_length=448, return_timestamps=False,
        # Printable letters alone.
        suppress_tokens=[n for n, letter in enumerate(letters) if letter not in "abcdefgh.\u0120"],
    )  # fmt: skip
    save_random(model, folder)
    WhisperFeatureExtractor(feature_size=8).save_pretrained(folder)
    names = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL[0])
    WhisperTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def write_moonshine(folder: Path) -> Path:
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor

    words = write_tokenizer(folder, ["<|endoftext|>", "<|im_end|>"], None)
    layers = {
        f"{side}_num_{what}": 2 for side in ("encoder", "decoder") for what in ("hidden_layers", "attention_heads")
    }
    config = MoonshineConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=32, **layers, pad_token_id=0, bos_token_id=2,
        eos_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    save_random(MoonshineForConditionalGeneration(config), folder)
    Wav2Vec2FeatureExtractor(sampling_rate=RATE, do_normalize=False).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind", ["whisper with words", pytest.param("whisper with segments", marks=pytest.mark.slow), "moonshine"]
)
def test_a_model_writes_down_a_piece_within_its_time_and_always_the_same(kind: str, tmp_path: Path) -> None:
    written = write_moonshine(tmp_path) if kind == "moonshine" else write_whisper(tmp_path, aligned="words" in kind)
    recogniser = load_recogniser(str(written), "cpu")
    assert recogniser.rate == RATE
    assert recogniser.record["name"] == str(written)
    lines = recogniser(SECOND)
    assert lines == recogniser(SECOND)
    assert lines
    assert all(10.0 <= line.start_s <= line.end_s <= 11.0 for line in lines)
    cues = list(plain(lines))
    assert "".join(cue.text for cue in cues).strip()
    assert any(cue.words for cue in cues) == ("words" in kind)
    assert all(10.0 <= time_s < 11.0 for cue in cues for time_s, _ in cue.words)


def test_words_become_sentences_whose_words_stand_in_order_within_the_piece() -> None:
    sound = Sound(3600.0, RATE, np.zeros(20 * RATE, np.int16))
    heard: Any = [
        (" Good", (0.0, 7.0)), (" morning.", (7.0, 7.5)), (" It", (7.4, None)), (" is", (6.0, 8.0)),
        (" late.", (8.0, 29.9)), (" Bye", (None, 30.0)),
    ]  # fmt: skip
    lines = list(_lines([{"text": text, "timestamp": times} for text, times in heard], sound, words=True))
    cues = list(plain(lines))
    assert [cue.text for cue in cues] == ["Good morning.", "It is late.", "Bye"]
    starts = [time_s for cue in cues for time_s, _ in cue.words]
    assert starts[:3] == [3606.0, 3607.0, 3607.4]
    assert all(later - earlier >= 0 for earlier, later in pairwise(starts))
    assert starts[-1] < sound.end_s
    assert LONGEST_WORD_S == 1.0
    assert all(re.match(r"<\d\d:\d\d:\d\d\.\d{3}> ", line.text) for line in lines)


def test_what_recognises_no_speech_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, said in (
        ("nobody/whisper", "not in the local cache"),
        (str(tmp_path / "no"), "there is no model folder"),
    ):
        with pytest.raises(ModelError, match=said):
            load_recogniser(name)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(ModelError, match="it is a qwen2_vl model, which recognises no speech") as caught:
        load_recogniser(str(tmp_path))
    assert "Whisper or Moonshine" in caught.value.hint
    whisper = write_whisper(tmp_path / "whisper")
    (whisper / "model.safetensors").write_bytes(b"0" * 99)
    with pytest.raises(ModelError, match="truncated or damaged"):
        load_recogniser(str(whisper))
