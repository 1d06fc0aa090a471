"""What `inspect --verify` promises: every state that a stream leaves passes, and what none can leave is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protokv.config import CONFIGS, DurableConfig, MemoryConfig, PaperConfig
from protokv.core.session import Session
from protokv.core.snapshot import State
from protokv.errors import StateCorrupt
from protokv.inspection.describe import describe
from protokv.storage import checkpoint
from protokv.storage.api import load_state, save_state
from tests.conftest import random_frames

GOLDEN = Path(__file__).parent / "golden"

OTHERS = {kind: MemoryConfig.of(kind, budget=24) for kind in CONFIGS}
MEMORIES = OTHERS | {
    "near only": PaperConfig(budget=24).with_fields({"split": (1, 0)}),
    "durable with residuals": DurableConfig(budget=24, pseudo_tokens=8, residual=True),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_every_state_that_a_stream_leaves_passes(name, tiny, tmp_path):
    session = Session.start(tiny, MEMORIES[name], fps=2.0)
    for seed in range(10):
        if seed in (0, 1, 9):
            save_state(checkpoint.to_state(session), tmp_path / "a.safetensors")
            describe(tmp_path / "a.safetensors", values=True)
        session.watch(random_frames(seed))
    save_state(checkpoint.to_state(session), tmp_path / "a.safetensors")
    found = describe(tmp_path / "a.safetensors", values=True)["verified"]
    assert [line.split(":")[0] for line in found[:4]] == ["bytes", "memory", "clock", "values"]


@pytest.mark.parametrize("name", ["paper", "durable", "sliding-window"])
def test_a_stream_of_many_days_passes(name, tiny, tmp_path):
    """Beyond 2**24 not every position is a number of 32 bits."""
    path, later = tmp_path / "a.safetensors", 2**24 + 1
    session = Session.start(tiny, MEMORIES[name], fps=2.0)
    for seed in range(6):
        session.watch(random_frames(seed))
    state = checkpoint.to_state(session)
    moved = {n: t + later for n, t in state.tensors.items() if n in ("near.positions", "bank.position")}
    clock = replace(state.clock, next_position=state.clock.next_position + later)
    save_state(replace(state, tensors={**state.tensors, **moved}, clock=clock), path)
    describe(path, values=True)
    again = checkpoint.to_state(checkpoint.from_state(load_state(path), tiny))
    assert again.tensors["near.positions"].max() == clock.next_position - 1
    assert all(again.tensors[one].equal(tensor) for one, tensor in moved.items())


def changed(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[State], State]:
    def apply(state: State) -> State:
        tensor = state.tensors[name].clone()
        change(tensor)
        return replace(state, tensors={**state.tensors, name: tensor})

    return apply


def clock(**fields: object) -> Callable[[State], State]:
    return lambda state: replace(state, clock=replace(state.clock, **fields))


def put(*at: int, value: float) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.__setitem__(at, value)


LIES = {
    "NaN in a key": (changed("near.keys", put(0, 0, 0, 0, value=float("nan"))), "near.keys"),
    "infinite value": (changed("near.values", put(2, 1, 3, 5, value=float("inf"))), "near.values"),
    "NaN in the prompt": (changed("sink.keys", put(0, 0, 0, 0, value=float("nan"))), "sink.keys"),
    "NaN in a centre": (changed("bank.key_center", put(0, 0, 0, 0, value=float("nan"))), "bank.key_center"),
    "NaN in a codebook": (changed("codebook.keys", lambda t: t.fill_(float("nan"))), "codebook.keys"),
    "masses with fractions": (
        lambda s: replace(s, tensors={**s.tensors, "bank.mass": s.tensors["bank.mass"].double()}),
        "bank.mass",
    ),
    "more tokens than came": (changed("bank.mass", put(0, 0, 0, value=1e6)), "bank.mass"),
    "tokens that never left": (changed("bank.absorbed", lambda t: t.add_(5)), "bank.absorbed"),
    "covariance of nothing": (changed("bank.covariance", put(0, 0, 0, 0, 0, value=-1.0)), "bank.covariance"),
    "anchor in the future": (changed("bank.position", put(0, 0, 0, 0, value=1e5)), "bank.position"),
    "touched in the future": (changed("bank.last_step", put(0, 0, 0, value=99)), "bank.last_step"),
    "place outside the frame": (changed("near.coordinates", put(0, 0, value=3.0)), "near.coordinates"),
    "position in the future": (changed("near.positions", put(0, 0, value=99)), "near.positions"),
    "position before the stream": (changed("near.positions", put(0, 0, value=-1)), "near.positions"),
    "positions out of order": (changed("near.positions", lambda t: t.copy_(t.flip(0))), "near.positions"),
    "steps out of order": (changed("near.step", lambda t: t.copy_(t.flip(0))), "near.step"),
    "ring of another size": (changed("near.ring", put(1, value=99)), "near.ring"),
    "ring that ends early": (clock(steps=20), "near.ring"),
    "counts without updates": (changed("residual.updates", lambda t: t.add_(1)), "residual"),
    "clock without steps": (clock(steps=0), "clock|step"),
    "clock without tokens": (clock(tokens_seen=0), "clock"),
    "fewer tokens than steps": (clock(tokens_seen=3), "clock.tokens_seen"),
    "no stream time": (clock(stream_time_s=0.0), "clock"),
    "other kind of memory": (lambda s: replace(s, memory={**s.memory, "kind": "full"}), "memory|tensor|field|setting"),
    "tensor left out": (
        lambda s: replace(s, tensors={n: t for n, t in s.tensors.items() if n != "bank.mean"}),
        "bank.mean",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_state_that_no_stream_can_leave_is_refused_with_the_tensor(lie, tmp_path):
    change, name = LIES[lie]
    # The digests are right: it was saved like this.
    save_state(change(load_state(GOLDEN / "v1-paper.safetensors")), tmp_path / "a.safetensors")
    with pytest.raises(StateCorrupt, match=name):
        describe(tmp_path / "a.safetensors", values=True)


def test_who_does_not_verify_gets_what_is_there(tmp_path):
    path = tmp_path / "a.safetensors"
    data = bytearray((GOLDEN / "v1-paper.safetensors").read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateCorrupt, match="not those that were saved"):
        describe(path)
    assert load_state(path, verify=False).tensors.keys() == load_state(GOLDEN / "v1-paper.safetensors").tensors.keys()
