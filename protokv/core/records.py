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
        dtype: `float32`, `bfloat16` or `float16`; with `+4bit` or `+8bit` where the weights are quantised.
        weights_digest: sha256 over a cheap sample of its weight files, empty where there is none to read.
        revision: the commit that a hub model was loaded from. Like `name` it tells where the model was found.
    """

    name: str
    family: str
    config_hash: str
    dtype: str
    weights_digest: str
    revision: Commit | None = None
