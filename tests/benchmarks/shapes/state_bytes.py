"""How large states are: arithmetic on what each memory declares of a model, with nothing allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from protokv.config import MemoryConfig
from protokv.core.tensors import TensorSpec
from protokv.memories import MEMORIES
from tests.benchmarks.shapes.models import Shape


def state_bytes(shape: Shape, budgets: Iterable[int], dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """A row for each memory and budget: bytes of a full state, and what a token more costs where nothing bounds it."""
    rows = []
    for budget in budgets:
        for name, cls in MEMORIES.items():
            specs = cls.declare(MemoryConfig.of(name, budget=budget), shape.memory(dtype))
            growing = [spec for spec in specs if None in spec.shape]
            rows.append(
                {
                    "memory": name,
                    "budget": budget,
                    "mb": round(sum(spec.nbytes for spec in specs) / 1e6, 1),
                    "kb_a_token_more": 0.0 if cls.bounded else round(_a_token(growing, shape.tokens) / 1e3, 1),
                }
            )
    return rows


def _a_token(specs: Iterable[TensorSpec], tokens: int) -> float:
    """Bytes for one token of an axis that grows: by tokens, or by a step of so many."""
    return sum(
        replace(spec, shape=tuple(size or 1 for size in spec.shape)).nbytes
        / (1 if "token" in spec.dims[spec.shape.index(None)] else tokens)
        for spec in specs
    )
