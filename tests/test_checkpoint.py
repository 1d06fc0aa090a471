"""Sessions on disk: one that was saved and loaded on the way ends in the bytes of one that was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protokv import snapshot
from protokv.backbones.base import Backbone
from protokv.checkpoint import from_state, load, save, to_state
from protokv.config import DurableConfig, MemoryConfig, PaperConfig
from protokv.errors import StateCorrupt, StateLocked, StateMismatch
from protokv.session import Session
from protokv.snapshot.writer import Writer
from tests.conftest import random_frames

CONFIGS = {
    "paper": PaperConfig(budget=40),
    "durable": DurableConfig(budget=40),
    "sliding-window": MemoryConfig.of("sliding-window", budget=40),
    "full": MemoryConfig.of("full", budget=40),
}


def watched(backbone: Backbone, config: MemoryConfig, first: int, last: int, session: Session | None = None) -> Session:
    session = session or Session.start(backbone, config)
    for step in range(first, last):
        session.watch(random_frames(step))
    return session


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stop", [1, 7, 19])
def test_saving_and_loading_on_the_way_gives_the_same_bytes(
    tiny: Backbone, tmp_path: Path, name: str, stop: int
) -> None:
    whole, half, joined = (tmp_path / f"{part}.safetensors" for part in ("whole", "half", "joined"))
    save(watched(tiny, CONFIGS[name], 0, 24), whole)
    save(watched(tiny, CONFIGS[name], 0, stop), half)
    save(watched(tiny, CONFIGS[name], stop, 24, load(half, tiny)), joined)
    assert joined.read_bytes() == whole.read_bytes()


def test_a_loaded_session_answers_as_the_saved_one(tiny: Backbone, tmp_path: Path) -> None:
    session = watched(tiny, CONFIGS["durable"], 0, 20)
    save(session, tmp_path / "s.safetensors")
    later = load(tmp_path / "s.safetensors", tiny)
    assert torch.equal(later.prefill("what is first ?"), session.prefill("what is first ?"))
    assert later.clock == session.clock
    assert later.config == session.config


def test_a_loaded_session_forwards_nothing(tiny: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(watched(tiny, CONFIGS["durable"], 0, 3), tmp_path / "s.safetensors")

    def forward(*_: object, **__: object) -> None:
        raise AssertionError("the prompt is in the state already")

    monkeypatch.setattr(tiny, "forward", forward)
    assert load(tmp_path / "s.safetensors", tiny).clock.steps == 3


def test_a_session_that_failed_within_a_step_says_so(tiny: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    session = watched(tiny, CONFIGS["durable"], 0, 3)
    assert session.intact

    def append(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(session.memory, "append", append)
    with pytest.raises(MemoryError):
        session.watch(random_frames(3))
    assert not session.intact


@pytest.mark.parametrize("field", ["family", "config_hash", "weights_digest", "dtype"])
def test_a_state_of_another_model_is_refused_by_field(tiny: Backbone, field: str) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    other = replace(state, backbone=replace(state.backbone, **{field: "another"}))
    with pytest.raises(StateMismatch, match=field):
        from_state(other, tiny)


def test_memory_settings_that_make_no_sense_are_corrupt_not_a_crash(tiny: Backbone) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    with pytest.raises(StateCorrupt, match="budget"):
        from_state(replace(state, memory={**state.memory, "budget": -1}), tiny)


def test_a_state_whose_tensors_do_not_fit_its_settings_is_refused(tiny: Backbone) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    with pytest.raises(StateCorrupt, match=r"near\.keys"):
        from_state(replace(state, memory={**state.memory, "budget": 20}), tiny)


def test_a_clock_that_contradicts_the_model_is_refused(tiny: Backbone) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    with pytest.raises(StateCorrupt, match="clock"):
        from_state(replace(state, clock=replace(state.clock, next_position=0)), tiny)


def test_the_file_is_as_large_after_a_long_stream_as_after_a_short_one(tiny: Backbone, tmp_path: Path) -> None:
    config = DurableConfig(budget=40).with_fields({"residual": False})
    session = watched(tiny, config, 0, 9)
    save(session, tmp_path / "short.safetensors")
    save(watched(tiny, config, 9, 90, session), tmp_path / "long.safetensors")
    short, long = (snapshot.load(tmp_path / f"{name}.safetensors") for name in ("short", "long"))
    assert {n: (t.shape, t.dtype) for n, t in short.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in long.tensors.items()
    }


def test_saving_while_another_writes_is_refused(tiny: Backbone, tmp_path: Path) -> None:
    session = watched(tiny, CONFIGS["durable"], 0, 3)
    with Writer(tmp_path / "s.safetensors"), pytest.raises(StateLocked):
        save(session, tmp_path / "s.safetensors")
    save(session, tmp_path / "s.safetensors")


def test_an_unverified_load_lets_a_changed_byte_pass_and_nothing_else(tiny: Backbone, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save(watched(tiny, CONFIGS["durable"], 0, 20), path)
    data = bytearray(path.read_bytes())
    # The last bit of a value, which no rule about a state can tell from another.
    held = snapshot.load(path).tensors["near.values"]
    data[data.index(held.view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateCorrupt):
        load(path, tiny)
    assert load(path, tiny, verify=False).clock.steps == 20
    path.write_bytes(data[:-1])
    with pytest.raises(StateCorrupt):
        load(path, tiny, verify=False)
