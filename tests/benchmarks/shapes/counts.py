"""Operations and waits for the device that one steady step and one decoding step ask for: the proof without a GPU.

Counted at 28 layers and small sizes, on which the number of operations does not depend, and without the pieces that a
CPU cuts a plan into: as any other device is asked. The proof at the sizes of a 7B model is `tests/test_counts.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import FunctionType
from typing import Any
from unittest import mock

import torch

from protokv.config import DurableConfig, MemoryConfig
from protokv.core import session as session_module
from protokv.core.decoding import Decoding
from protokv.core.session import Session
from protokv.durable import nearest as parts
from tests.counting import Counting
from tests.stub_backbone import StubBackbone

BUDGET, LAYERS, ROUNDS = 480, 28, 3
# The methods of a session without their inference mode.
_UNDECORATED = {
    name: method.__wrapped__  # type: ignore[attr-defined]
    for name, method in vars(Session).items()
    if isinstance(method, FunctionType) and hasattr(method, "__wrapped__")
}


def counts_of(config: MemoryConfig, *, layers: int = LAYERS, budget: int = BUDGET) -> dict[str, Any]:
    """The most of some steps, under the rule that serves at the config's own budget."""
    changes: dict[str, Any] = {"budget": budget}
    if isinstance(config, DurableConfig):
        changes["rule"] = "blocked" if config.is_blocked else "exact"
    small = replace(config, **changes)
    with (
        # What runs in inference mode is hidden from a dispatch mode in part.
        mock.patch.object(torch, "inference_mode", _no_grad),
        mock.patch.multiple(Session, **_UNDECORATED),
        mock.patch.object(parts, "_ROWS", 2**40),
        Counting() as counting,
    ):
        backbone = StubBackbone(layers=layers, groups=2, head_size=16, grid=(4, 4))
        session = Session.start(backbone, small)

        def watch() -> None:
            with torch.no_grad():
                session.take([backbone.step], [session.clock.steps * 1.0])

        for _ in range(budget // 16 + 3):
            watch()
        taken = []
        for _ in range(ROUNDS):
            _clear(counting)
            watch()
            taken.append((counting.operations.total(), counting.waits.total()))
        decoded = _decoded(session, counting)
    return {
        "memory": config.name,
        "watch_operations": max(operations for operations, _ in taken),
        "watch_waits": max(waits for _, waits in taken),
        "token_operations": max(operations for operations, _ in decoded),
        "token_waits": max(waits for _, waits in decoded),
        "layers": layers,
    }


def _decoded(session: Session, counting: Counting) -> list[tuple[int, int]]:
    """Of each decoding step, from one reading of a token to the next."""
    steps: list[tuple[Counter[str], Counter[str]]] = []

    def read(token: torch.Tensor) -> int:
        steps.append((Counter(counting.operations), Counter(counting.waits)))
        _clear(counting)
        return 7

    with mock.patch.object(session_module, "read_token", read), torch.no_grad():
        session.ask("what?", Decoding(ROUNDS + 1))
    return [(operations.total(), waits.total()) for operations, waits in steps[1:]]


def _no_grad(mode: bool = True) -> torch.no_grad:
    return torch.no_grad()


def _clear(counting: Counting) -> None:
    counting.operations.clear()
    counting.waits.clear()
