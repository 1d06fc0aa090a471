"""The records of a fleet: `Recipe` holds the options of all videos, the others describe one video.

`Verdict` and `Looked` describe it before the work, `Outcome` after it, `Failure` explains an error. All are plain
values that travel between processes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from protokv.backbones import identify_backbone, load_backbone
from protokv.errors import ProtoKVError
from protokv.fleet.plan import Job
from protokv.ingestion import IngestOptions

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.core.records import BackboneIdentity

Standing = Literal["new", "unfinished", "changed", "done"]
Status = Literal["watched", "done", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every video of a fleet becomes a state.

    Attributes:
        place: folder, or prefix in an object store, of the states.
        options: of each ingest; `backbone` is a name, which each worker loads once. `overwrite` starts over a state of
            other settings or of another video; without it such a video fails.
    """

    place: str
    options: IngestOptions = field(default_factory=IngestOptions)

    def load(self, device: str) -> Backbone:
        """Load the model, with its system prompt. Raises as `load_backbone` and `Backbone.with_system`."""
        return self.options.prompted(load_backbone(**self._arguments(device), **self.options.frames))

    def identify(self, device: str) -> BackboneIdentity:
        """Return the identity of the model that `load` would give, from its small files. Raises as `load_backbone`."""
        return identify_backbone(**self._arguments(device))

    def _arguments(self, device: str) -> dict[str, Any]:
        return self.options.new_model | {"device": device}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a video has no complete, undamaged state.

    Attributes:
        kind: the class of the error that a single `ingest` would have raised, `Damaged` if the state holds the readable
            part of the video, or `WorkerDied` if the worker died on every attempt.
        message, hint: what is wrong, and what to do.
    """

    kind: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return an error on one line."""
        message = error.message if isinstance(error, ProtoKVError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, ProtoKVError) else ""
        return cls(type(error).__name__, " ".join(message.split()), " ".join(hint.split()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The work left for a video.

    Attributes:
        standing: "new" if there is no state, "unfinished" to continue it, "changed" to start over, "done" if nothing
            is left.
        steps, stream_time_s: of the state.
        file_bytes, damage: of a finished state; `damage` says which part of the video was unreadable.
    """

    standing: Standing
    steps: int = 0
    stream_time_s: float = 0.0
    file_bytes: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class Footage:
    """Facts of a video file from its header; None where it does not say.

    Attributes:
        duration_s: seconds.
        width, height: of a frame, in pixels.
        rate_fps: frames a second.
    """

    duration_s: float | None
    width: int
    height: int
    rate_fps: float | None


@dataclass(frozen=True, slots=True)
class Looked:
    """The plan for a video: a verdict, or the reason why there is none.

    `footage` is of a file that is left to watch; None for other videos and for those in an object store.
    """

    job: Job
    state: str
    verdict: Verdict | None
    failure: Failure | None = None
    footage: Footage | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds of stream that are left to watch; None if unknown."""
        if self.status == "done":
            return 0.0
        if self.verdict is None or self.footage is None or self.footage.duration_s is None:
            return None
        watched_s = self.verdict.stream_time_s if self.verdict.standing == "unfinished" else 0.0
        return max(0.0, self.footage.duration_s - watched_s)

    @property
    def status(self) -> str:
        """The standing of the state, or "failed"."""
        return "failed" if self.verdict is None else self.verdict.standing

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        row = {**self.job.to_dict(), "state": self.state, "status": self.status}
        row |= {"left_s": self.left_s} | ({} if self.footage is None else asdict(self.footage))
        return row | ({} if self.failure is None else {"failure": asdict(self.failure)})


@dataclass(frozen=True, slots=True)
class InWork:
    """A video that a worker watches now: seconds of stream that this run added, and that are left (None: unknown)."""

    job: Job
    watched_s: float
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a video.

    Attributes:
        job, state: the video, and the path of its state.
        status: "watched" to its end by this run, "done" before it, "stopped" on request after a commit, or "failed".
        standing: of the state before the run.
        steps, stream_time_s, file_bytes: of the state now.
        watched_s: seconds of stream that this run added.
        elapsed_s: seconds that the worker was busy with it.
        attempts: how often it was begun.
        failure: why it failed; of a watched or finished video, its damage.
    """

    job: Job
    state: str
    status: Status
    standing: Standing = "new"
    steps: int = 0
    stream_time_s: float = 0.0
    watched_s: float = 0.0
    file_bytes: int = 0
    elapsed_s: float = 0.0
    attempts: int = 1
    failure: Failure | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON; `failure` only if there is one."""
        row = asdict(self)
        del row["job"]
        failure = row.pop("failure")
        return {**self.job.to_dict(), **row} | ({} if failure is None else {"failure": failure})
