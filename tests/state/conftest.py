"""A small state with every kind of field, and an object store on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.state.header import State
from protokv.state.store import STATE_FORMS
from protokv.texts import JsonObject

if TYPE_CHECKING:
    from tests.state.s3 import S3Server

EVERY_FORM = pytest.mark.parametrize("suffix", sorted(STATE_FORMS))


@pytest.fixture
def path(suffix: str, tmp_path: Path) -> Path:
    return tmp_path / f"a{suffix}"


def make(**changes: Any) -> State:
    generator = torch.Generator().manual_seed(changes.pop("seed", 0))
    tensors = {
        "near.keys": torch.randn(2, 3, 5, 7, generator=generator).to(torch.bfloat16),
        "near.step": torch.arange(5),
        "bank.mass": torch.rand(2, 3, 11, generator=generator),
        "residual.updates": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "generator": generator.get_state()[:33].clone(),
        "bank.alive": torch.tensor([True, False, True]),
        "offset": torch.tensor(4),
        "warmup.keys": torch.empty(2, 0, 7),
    }
    fields: JsonObject = {
        "backbone": BackboneIdentity("some/model", "qwen2_5_vl", "c0ffee", "bfloat16", "5eed"),
        "memory": {
            "kind": "protokv",
            "budget": 144,
            "split": [0.5, 0.5],
            "rate": 0.1,
            "note": None,
        },
        "clock": StreamClock(5, 5.0, 77, 45, 2.0, 2),
        "source": {
            "name": "vidéo.mp4",
            "size_bytes": 123,
            "duration_s": 61.5,
            "fingerprint": "a video",
        },
        "settings": {"seed": 0},
        "tensors": tensors,
    }
    return State(**{**fields, **changes})


def moment(step: int, **changes: Any) -> State:
    """Return the state of a stream at a step of two seconds; its tensors differ from step to
    step.
    """
    return make(
        seed=step, clock=StreamClock(step, 2.0 * step, 9 * step, 9 * step, 1.0, 2), **changes
    )


def same(a: State, b: State) -> bool:
    """Return True if header and tensors are equal bit for bit."""
    return (
        a.to_json() == b.to_json()
        and set(a.tensors) == set(b.tensors)
        and all(
            t.dtype == b.tensors[n].dtype
            and t.shape == b.tensors[n].shape
            and t.reshape(-1).view(torch.uint8).equal(b.tensors[n].reshape(-1).view(torch.uint8))
            for n, t in a.tensors.items()
        )
    )


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    from tests.state.s3 import S3Server

    with S3Server() as made:
        yield made


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Name the server in the environment."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server
