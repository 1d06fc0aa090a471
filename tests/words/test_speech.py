"""Subtitles written by tiny random models of speech: their text is noise, and its form and times
are real.
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch

from protokv.errors import ConfigError, ModelError
from protokv.ingestion import IngestStarted, ingest_events
from protokv.video.source import SubtitleLine
from protokv.words.files import read_subtitles
from protokv.words.speech import (
    load_speech_recogniser,
    recognise_speech,
    split_audio_at_silence,
    transcribe_to_subtitles,
)
from tests.backbones.tiny import save_random
from tests.mock_backbone import MockBackbone
from tests.state.test_checkpoint import CONFIGS
from tests.words.subtitled import write_subtitled

RATE = 16_000
SOUND_RATE = 8000
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]


def write_sounding(
    path: Path, bursts: Sequence[tuple[float, float]], seconds: int, *, late_s: float = 0.0
) -> Path:
    """Write a clip of gray frames with a tone from and to these seconds, and silence else; no sound
    before `late_s`.
    """
    samples = np.zeros(seconds * SOUND_RATE, np.int16)
    for n, (from_s, to_s) in enumerate(bursts):
        where = np.arange(round(from_s * SOUND_RATE), round(to_s * SOUND_RATE))
        samples[where] = 8000 * np.sin(where * (0.2 + 0.01 * n))
    with av.open(str(path), "w") as output:
        video: Any = output.add_stream("libx264", rate=4)
        video.width = 64
        video.height = 48
        video.pix_fmt = "yuv420p"
        sound: Any = output.add_stream("pcm_s16le", rate=SOUND_RATE)
        sound.layout = "mono"
        for n, part in enumerate(np.split(samples[None], 4 * seconds, axis=1)):
            image = np.full((48, 64, 3), n * 199 % 256, np.uint8)
            output.mux(video.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
            if n / 4 >= late_s:
                frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), "s16", "mono")
                frame.sample_rate = SOUND_RATE
                frame.pts = n * part.size
                frame.time_base = Fraction(1, SOUND_RATE)
                output.mux(sound.encode(frame))
        for stream in (video, sound):
            output.mux(stream.encode(None))
    return path


def write_whisper(folder: Path) -> Path:
    """Write a Whisper whose words are letters."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    end = ids[SPECIAL[0]]
    first = ids[SPECIAL[1]]
    times = ids[SPECIAL[-1]]
    assert times is not None
    sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    shape = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()
    }
    config = transformers.WhisperConfig(
        **shape,
        d_model=32,
        num_mel_bins=8,
        vocab_size=times + 1502,
        pad_token_id=end,
        bos_token_id=first,
        eos_token_id=end,
        decoder_start_token_id=first,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        no_timestamps_token_id=times,
        is_multilingual=False,
        prev_sot_token_id=ids[SPECIAL[2]],
        max_initial_timestamp_index=50,
        bos_token_id=first,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=first,
        max_length=448,
        return_timestamps=False,
        # Printable letters alone.
        suppress_tokens=[n for n, letter in enumerate(letters) if letter not in "abcdefgh.\u0120"],
    )
    save_random(model, folder)
    transformers.WhisperFeatureExtractor(feature_size=8).save_pretrained(folder)
    names = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL[0])
    transformers.WhisperTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_whisper(tmp_path_factory.mktemp("model")))


def test_what_is_said_is_written_beside_the_video_once_and_read_like_any_subtitles(
    model: str, tmp_path: Path
) -> None:
    video = write_sounding(tmp_path / "talk.mkv", [(1.0, 1.5), (3.0, 3.5)], 5)
    state = tmp_path / "state.safetensors"

    def watch(**options: Any) -> str | None:
        options = {"transcribe": model, "device": "cpu", "overwrite": True, **options}
        (event, *_) = ingest_events(
            video, state, CONFIGS["durable"], backbone=MockBackbone(), **options
        )
        assert isinstance(event, IngestStarted)
        return event.words

    assert watch() == "talk.srt"
    lines, lost, _ = read_subtitles(tmp_path / "talk.srt")
    assert lines
    assert not lost
    assert all(0 <= line.start_s <= 5 for line in lines)
    (tmp_path / "talk.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nmine\n")
    assert watch() == "talk.srt"
    assert read_subtitles(tmp_path / "talk.srt").lines == (SubtitleLine(1.0, 2.0, "mine"),)
    assert watch(subtitles="de") == "talk.de.srt"


def test_sound_is_cut_where_it_is_quiet_and_stands_at_the_time_of_its_pictures(
    tmp_path: Path,
) -> None:
    bursts = [(1.0, 1.9), (2.3, 4.0), (9.0, 9.5)]
    video = write_sounding(tmp_path / "a.mkv", bursts, 10)
    pieces = list(split_audio_at_silence(video, RATE, 3.0))
    assert [len(samples) <= 3 * RATE for _, samples in pieces] == [True] * len(pieces)
    loud = [
        (start_s + np.flatnonzero(np.abs(samples) > 0.1) / RATE).round(2)
        for start_s, samples in pieces
    ]
    seconds = sorted(set(np.concatenate(loud).tolist()))
    wanted = [
        n / 100
        for from_s, to_s in bursts
        for n in range(round(from_s * 100) + 1, round(to_s * 100))
    ]
    assert set(wanted) <= set(seconds)
    assert min(seconds) >= 0.99
    assert max(seconds) <= 9.51
    # No burst of less than 3 s is cut in two.
    assert sum(samples[0] ** 2 > 0.01 for _, samples in pieces) == 0
    late = write_sounding(tmp_path / "late.mkv", bursts, 10, late_s=2.0)
    assert next(split_audio_at_silence(late, RATE, 3.0))[0] == pytest.approx(2.0, abs=0.1)


def test_silence_is_no_file_and_a_stream_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcribe_to_subtitles(
        write_subtitled(tmp_path / "mute.mkv", {}, seconds=2), "auto", model, "cpu"
    )
    transcribe_to_subtitles(write_sounding(tmp_path / "still.mkv", [], 2), "auto", model, "cpu")
    said = write_sounding(tmp_path / "said.mkv", [(0.5, 1.5)], 2)
    transcribe_to_subtitles(said, "auto", model, "cpu", should_stop=lambda: True)
    assert not list(tmp_path.glob("*.srt"))
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (tmp_path / "no" / "x").touch())
    with pytest.raises(ConfigError, match=r"cannot write .*said\.srt"):
        transcribe_to_subtitles(said, "auto", model, "cpu")
    with pytest.raises(ConfigError, match="for files alone"):
        transcribe_to_subtitles("rtsp://camera/1", "auto", model)


def test_times_that_a_model_leaves_out_or_puts_behind_the_sound_end_with_the_piece() -> None:
    times = [
        (" Good  morning.", (0.0, 1.0)),
        (" It", (1.5, None)),
        (" is.", (9.0, 7.0)),
        (" ...", (1.0, 2.0)),
    ]
    chunks: dict[str, object] = {
        "text": "",
        "chunks": [{"text": text, "timestamp": at} for text, at in times],
    }

    class Model(SimpleNamespace):
        def __call__(
            self, *_: object, return_timestamps: object, **how: object
        ) -> dict[str, object]:
            return chunks if return_timestamps else {"text": " all of it"}

    whisper, moonshine = (
        Model(type=kind, feature_extractor=SimpleNamespace(sampling_rate=RATE))
        for kind in ("seq2seq_whisper", "x")
    )
    sound = np.zeros(2 * RATE, np.float32)
    found = [(0.0, 1.0, "Good morning."), (1.5, 2.0, "It"), (2.0, 2.0, "is.")]
    assert list(recognise_speech(whisper, sound)) == found
    # it tells no times
    assert list(recognise_speech(moonshine, sound)) == [(0.0, 2.0, "all of it")]


def test_what_recognises_no_speech_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sight").mkdir()
    (tmp_path / "sight" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    whisper = write_whisper(tmp_path / "whisper")
    (whisper / "model.safetensors").write_bytes(b"0" * 99)
    for name, said in (
        ("nobody/whisper", "not in the local cache"),
        (tmp_path / "no", "there is no model folder"),
        (tmp_path / "sight", "it is a qwen2_vl model, which recognises no speech"),
        (whisper, "cannot load the model"),
    ):
        with pytest.raises(ModelError, match=said):
            load_speech_recogniser(str(name))
