"""Two plain records that several rooms share: which model this is, and where a stream stands.

A backbone makes the first, a session the second, a snapshot keeps both. The annotations say what each number may be;
they are checked where a record is read from a state. Neither knows models or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from protokv.errors import StateCorrupt

# Of a hub model: nothing that could be a path.
Commit = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]
# Far beyond any stream, and low enough that what is computed from it stays in 64 bits.
Count = Annotated[int, Meta(ge=0, lt=2**48)]


@dataclass(frozen=True, slots=True)
class BackboneIdentity:
    """Which model this is: enough to refuse a state that another one made.

    Attributes:
        name: the name or folder it was loaded by; the embedded model is `protokv/mini`.
        family: `model_type` of its config.
        config_hash: sha256 of its architecture.
        dtype: `float32`, `bfloat16` or `float16`; with `+4bit` or `+8bit` where the weights are quantised.
        weights_digest: sha256 over a cheap sample of its weight files, empty where there is none to read.
        revision: of a hub model the commit that it was loaded from; where it was found, as `name`, and not what it is.
    """

    name: str
    family: str
    config_hash: str
    dtype: str
    weights_digest: str
    revision: Commit | None = None


@dataclass(frozen=True, slots=True)
class StreamClock:
    """Where a stream stands.

    Attributes:
        steps: steps watched; also the index of the next one.
        stream_time_s: stream time at the end of the last step, 0 before the first.
        next_position: one more than the highest rotary position in use; text starts here.
        tokens_seen: visual tokens watched.
        fps: sampled frames a second.
        frames_per_step: sampled frames that make a step.
    """

    steps: Count
    stream_time_s: Annotated[float, Meta(ge=0, lt=2**48)]
    next_position: Count
    tokens_seen: Count
    fps: Annotated[float, Meta(ge=1e-6, le=1e6)]
    frames_per_step: Annotated[int, Meta(ge=1, le=1000)]

    @property
    def step_seconds(self) -> float:
        """Stream time of one step."""
        return self.frames_per_step / self.fps

    def check(self) -> None:
        """Whether a stream can stand like this.

        Raises:
            StateCorrupt: the fields contradict each other.
        """
        if not (self.tokens_seen > 0) == (self.steps > 0) == (self.stream_time_s > 0):
            raise StateCorrupt(
                f"clock: {self.steps} steps, {self.tokens_seen} tokens and {self.stream_time_s} s contradict each other"
            )
        if self.tokens_seen < self.steps:
            raise StateCorrupt(f"clock.tokens_seen: {self.tokens_seen} tokens in {self.steps} steps")
