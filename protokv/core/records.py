"""`BackboneIdentity`: which model made a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

# A commit of a hub model: nothing that could be a path.
Commit = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]


@dataclass(frozen=True, slots=True)
class BackboneIdentity:
    """Which model this is: enough to refuse a state that another model made.

    Attributes:
        name: the name or folder it was loaded by; the embedded model is `protokv/mini`.
        family: `model_type` of its config.
        config_hash: sha256 of its architecture.
        dtype: `float32`, `bfloat16` or `float16`; with `+4bit` or `+8bit` if the weights are quantized.
        weights_digest: sha256 over a small sample of its weight files; empty if there are none.
        revision: the commit that a hub model was loaded from; None otherwise.
    """

    name: str
    family: str
    config_hash: str
    dtype: str
    weights_digest: str
    revision: Commit | None = None
