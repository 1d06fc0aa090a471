"""What is left of a fleet: hours, steps, time and disk before it runs, and the time left while it runs.

Before: the headers say how long the videos are, and the first steps of one video of each size and rate say how long a
step takes. While it runs: the videos not begun are weighed by their bytes, with the seconds a byte of those begun. Both
are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from protokv.fleet.plan import Job
from protokv.fleet.records import Failure, InWork, Looked, Outcome
from protokv.fleet.run import Pool, WorkerDied
from protokv.ingestion.estimate import Estimate

# Kinds of videos that are tried, those of most hours first. The others take the mean of these.
MOST_KINDS: Final = 6

_Kind = tuple[int, int, int]
_Tried = dict[_Kind, tuple[Estimate, float]]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a fleet would do; None where it is unknown.

    Attributes:
        videos: that are left to watch.
        unmeasured: of these, videos that do not say how long they are; they count in no other number but `most_bytes`.
        left_s: seconds of stream.
        steps: of the model.
        work_s: seconds of one worker, if it has the machine for itself.
        most_bytes: of all their states on disk; None: a state grows with its stream, or nothing was tried.
        tried: videos whose first steps were tried.
    """

    videos: int
    unmeasured: int
    left_s: float
    steps: int | None
    work_s: float | None
    most_bytes: int | None
    tried: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


def forecast(found: Iterable[Looked], pool: Pool) -> Forecast:
    """Try a few steps of one video of each size and rate, and extrapolate to all that are left.

    Raises:
        ModelError, ConfigError: the model cannot be loaded.
    """
    left = [one for one in found if one.status not in ("done", "failed")]
    kinds: dict[_Kind, list[Looked]] = {}
    for one in left:
        if one.left_s is not None and one.footage is not None:
            size = one.footage.width, one.footage.height, round(one.footage.rate_fps or 0)
            kinds.setdefault(size, []).append(one)
    seconds = {kind: math.fsum(one.left_s or 0.0 for one in own) for kind, own in kinds.items()}
    tried = _try(kinds, sorted(kinds, key=lambda kind: -seconds[kind])[:MOST_KINDS], pool)
    timed = {kind: one for kind, (one, _) in tried.items() if one.steps and one.seconds is not None}
    steps = work_s = None
    if timed:
        longest = next(iter(timed.values()))
        step_s = (longest.duration_s or 0.0) / (longest.steps or 1)
        counts = {
            kind: sum(math.ceil((one.left_s or 0.0) / step_s - 1e-6) for one in own) for kind, own in kinds.items()
        }
        per_step = {kind: (one.seconds or 0.0) / (one.steps or 1) for kind, one in timed.items()}
        mean = math.fsum(per_step.values()) / len(per_step)
        steps = sum(counts.values())
        opening_s = math.fsum(seconds for _, seconds in tried.values()) / len(tried)
        work_s = len(left) * opening_s + math.fsum(n * per_step.get(kind, mean) for kind, n in counts.items())
    sizes = [one.most_bytes for one, _ in tried.values()]
    most = max((size for size in sizes if size is not None), default=None) if None not in sizes else None
    return Forecast(
        videos=len(left),
        unmeasured=len(left) - sum(map(len, kinds.values())),
        left_s=math.fsum(seconds.values()),
        steps=steps,
        work_s=work_s,
        most_bytes=None if most is None else most * len(left),
        tried=len(tried),
    )


def _try(kinds: Mapping[_Kind, Sequence[Looked]], order: Sequence[_Kind], pool: Pool) -> _Tried:
    """Return an estimate of one video of each kind and the seconds to open it; none where it cannot be watched."""
    tried: _Tried = {}
    if not order:
        return tried
    slot = pool.open(0)
    try:
        for kind in order:
            with suppress(WorkerDied):
                # The longest says most about a step.
                found = slot.call("estimate", max(kinds[kind], key=lambda one: one.left_s or 0.0).job)
                if not isinstance(found, Failure):
                    tried[kind] = found
    finally:
        slot.close()
    return tried


@dataclass
class Remaining:
    """The seconds of stream that are left of a fleet while it runs, by the bytes of its files.

    Attributes:
        sizes: bytes of each video that is left, by key; those in an object store weigh as the mean of the others.
        known_s, known_bytes: of the videos that were watched.
    """

    sizes: dict[str, float]
    known_s: float = 0.0
    known_bytes: float = 0.0
    waiting: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, jobs: Iterable[Job]) -> Remaining:
        """Ask the file system for the sizes."""
        sizes: dict[str, float | None] = {job.key: _size_of(job.source) for job in jobs}
        known = [size for size in sizes.values() if size is not None]
        mean = sum(known) / len(known) if known else 1.0
        return cls({key: mean if size is None else float(size) for key, size in sizes.items()}, waiting=set(sizes))

    def add(self, outcome: Outcome) -> None:
        """Count a video that has ended."""
        self.waiting.discard(outcome.job.key)
        if outcome.status in ("watched", "done") and outcome.stream_time_s:
            self.known_s += outcome.stream_time_s
            self.known_bytes += self.sizes[outcome.job.key]

    def left_s(self, in_work: Sequence[InWork]) -> float | None:
        """Return the seconds of stream that are left; None as long as nothing is known."""
        begun = [one for one in in_work if one.left_s is not None]
        seconds = self.known_s + sum(one.watched_s + (one.left_s or 0.0) for one in begun)
        size = self.known_bytes + sum(self.sizes[one.job.key] for one in begun)
        if not size or not seconds:
            return None
        waiting = self.waiting - {one.job.key for one in begun}
        return sum(one.left_s or 0.0 for one in begun) + sum(self.sizes[key] for key in waiting) * seconds / size


def _size_of(source: str) -> int | None:
    with suppress(OSError, ValueError):
        return Path(source).stat().st_size or None
    return None
