"""What was said is in the state: bounded, in order, plain; and a stream with words goes on as if it
had not stopped.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protokv
from protokv.core.backbone import Backbone
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import MEMORIES, DurableConfig, MemoryConfig
from protokv.stream.session import Session
from protokv.words import transcript
from protokv.words.cues import Cue, Subtitles
from tests.conftest import random_frames
from tests.core.streams import same

SAID = {1: ["two three"], 2: ["red star ?", "blue"], 5: ["ring\x1b[31m"], 7: ["last one"]}


def transcript_of(session: Session) -> transcript.Transcript:
    """The transcript of a session that has one."""
    held = session.transcript
    assert isinstance(held, transcript.Transcript)
    return held


def lines_of(session: Session) -> list[Any]:
    return list(transcript_of(session).lines)


def start(backbone: Backbone, config: MemoryConfig) -> Session:
    return Session.start(backbone, config, attachments=[transcript.Transcript()])


def watch(session: Session, first: int, last: int) -> Session:
    for step in range(first, last):
        session.watch(random_frames(step), words=SAID.get(step, ()))
    return session


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_every_memory_takes_words_and_goes_on_byte_for_byte(
    name: str, tiny: Backbone, tmp_path: Path
) -> None:
    config = MemoryConfig.of(name, budget=30, positions="stream").with_words(True)
    whole = watch(start(tiny, config), 0, 9)
    protokv.save(watch(start(tiny, config), 0, 4), tmp_path / "a.safetensors")
    resumed = watch(protokv.load(tmp_path / "a.safetensors", tiny), 4, 9)
    assert resumed.clock == whole.clock
    assert same(resumed.tensors(), whole.tensors())
    assert lines_of(resumed) == lines_of(whole)
    plain = ["two three", "red star ? blue", "ring [31m", "last one"]
    assert [line.text for line in lines_of(whole)] == plain
    assert torch.isfinite(whole.prefill("what is the first star ?")).all()


CUES = {
    "a cue of ten seconds": (Cue(2.0, 12.0, "two three"), 7, (2.0, 12.0)),
    "a short one": (Cue(4.25, 4.5, "two"), 4, (4.25, 4.5)),
    "one before the video": (Cue(-3.0, 0.5, "one"), 0, (0.0, 0.5)),
    "one over the end of its step": (Cue(2.5, 3.6, "two"), 3, (2.5, 3.6)),
    "words with times": (
        Cue(1.0, 9.0, "two three", ((5.25, "two"), (5.5, "three"))),
        5,
        (5.25, 9.0),
    ),
}


@pytest.mark.parametrize(("cue", "step", "times_s"), CUES.values(), ids=CUES)
def test_people_get_the_times_of_a_cue_and_the_model_its_step(
    cue: Cue, step: int, times_s: tuple[float, float], tiny: Backbone, tmp_path: Path
) -> None:
    subtitles = Subtitles([cue], {"kind": "file"})
    session = start(tiny, DurableConfig(budget=30, words=True))
    for n in range(9):
        session.watch(random_frames(n), words=subtitles.between(float(n), n + 1.0))
    protokv.save(session, tmp_path / "a.safetensors")
    for one in (session, protokv.load(tmp_path / "a.safetensors", tiny)):
        held = transcript_of(one)
        (line,) = held.lines
        assert (line.step, line.start_s, line.end_s) == (step, step, step + 1)
        (said,) = held.between(step + 0.1, step + 0.2)
        assert ((said.start_s, said.end_s), said.step) == (pytest.approx(times_s), step)
        assert held.between(step + 1.1, step + 1.2) == []


def test_times_behind_words_are_those_of_their_steps(tiny: Backbone) -> None:
    session = start(tiny, MemoryConfig.of("full", budget=64))
    places: list[Tensor] = []
    for step in range(9):
        tokens = tiny.add_words(session.embed(random_frames(step), float(step)), SAID.get(step, ()))
        places.append(session.position_steps([tokens], [float(step)])[0].positions)
        session.take([tokens], [float(step)])
    for step, where in enumerate(places):
        found = tiny.stream_times(where, session.clock, transcript_of(session).breaks())
        assert (found.floor() == step).all(), step


def test_a_transcript_of_any_length_is_bounded(
    monkeypatch: pytest.MonkeyPatch, tiny: Backbone
) -> None:
    monkeypatch.setattr(transcript, "MOST_TRANSCRIPT_BYTES", 90)
    session = watch(start(tiny, MemoryConfig.of("last-frames", budget=30)), 0, 8)
    assert [line.step for line in lines_of(session)] == [5, 7]
    monkeypatch.setattr(
        transcript, "MOST_TRANSCRIPT_BYTES", transcript.MOST_TRANSCRIPT_LINE_BYTES + 40
    )
    session.watch(random_frames(8), words=["two " * 9999])
    (line,) = lines_of(session)
    assert (line.step, len(line.text)) == (8, transcript.MOST_TRANSCRIPT_LINE_BYTES)
    forged = torch.frombuffer(
        bytearray(rb'[0,0.0,1.0,9,"a\u001b[31mb",0.0,1.0]'), dtype=torch.uint8
    )
    assert transcript.Transcript.of({"transcript.lines": forged}).lines[0].text == "a [31mb"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 9,
        b"[1,2.0,3.0,4]\n",
        b'[1,2.0,NaN,4,"x",2.0,3.0]\n',
        b'["1",2.0,3.0,4,"x",2.0,3.0]\n',
    ],
)
def test_a_hostile_transcript_is_refused_in_one_line(data: bytes) -> None:
    lines = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(StateCorrupt, match=r"transcript\.") as caught:
        transcript.Transcript.of({"transcript.lines": lines})
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"words": False}, "began without words"), ({"positions": "compact"}, "compact positions")],
)
def test_words_are_refused_where_the_memory_cannot_show_them(
    settings: Any, said: str, tiny: Backbone
) -> None:
    session = start(tiny, DurableConfig(**{"budget": 30, "words": True, **settings}))
    with pytest.raises(ConfigError, match=said):
        watch(session, 0, 2)
