"""What is known of one video: before the work (`Verdict`, `Looked`), after it (`Outcome`), and if it failed why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from protokv.errors import ProtoKVError
from protokv.fleet.plan import Job

Standing = Literal["new", "unfinished", "changed", "done"]
Status = Literal["watched", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a video has no complete, undamaged state.

    Attributes:
        kind: the class of the error, of `protokv.errors` where a single `ingest` would have raised it; `Damaged` where
            a state was written of what could be read; `WorkerDied` where the video took its worker with it, or
            something else did, on every attempt.
        message, hint: what and where, and what to do.
    """

    kind: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What an error says, on one line."""
        message = error.message if isinstance(error, ProtoKVError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, ProtoKVError) else ""
        return cls(type(error).__name__, " ".join(message.split()), " ".join(hint.split()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the state of a video stands.

    Attributes:
        standing: "new" where there is none, "unfinished" where it is to be continued, "changed" where it is to be
            started over, "done" where nothing is left.
        steps, stream_time_s, file_bytes: of the state; 0 where there is none, and file_bytes of one that is done only.
        damage: what could not be read of the video of a state that is done; empty where all was read.
    """

    standing: Standing
    steps: int = 0
    stream_time_s: float = 0.0
    file_bytes: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class Looked:
    """What would be done with a video, without doing it."""

    job: Job
    state: str
    verdict: Verdict | None
    failure: Failure | None = None

    @property
    def status(self) -> str:
        """How its state stands, or "failed"."""
        return "failed" if self.verdict is None else self.verdict.standing

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        row = {**self.job.to_dict(), "state": self.state, "status": self.status}
        return row | ({} if self.failure is None else {"failure": asdict(self.failure)})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a video.

    Attributes:
        state: where its state is, or would be.
        status: "watched" by this run to its end, "done" before it, "stopped" on request after a commit, or "failed".
        standing: how the state stood before.
        watched_s: seconds of stream that this run added.
        elapsed_s: seconds that the worker was busy with it.
        attempts: times that it was begun.
        failure: why, where it failed, and where it was watched or done but damaged.
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
        """Plain JSON; `failure` only where there is one."""
        row = asdict(self)
        del row["job"]
        failure = row.pop("failure")
        return {**self.job.to_dict(), **row} | ({} if failure is None else {"failure": failure})
