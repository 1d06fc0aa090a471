"""Measure the cost of a fleet: `python -m samples.fleet.measure [simulate] [processes]`; default:
all.

simulate: `--videos` videos through the coordinator's own code with workers that do nothing: its
memory and its time per video. processes: the same through processes of this machine. Results go to
`measured-cpu.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from protokv.fleet import JobRecipe, LocalWorkerPool, VideoJob, VideoOutcome, run_fleet
from protokv.fleet.run import WorkerDied
from protokv.fleet.worker import VideoFailure
from tests.benchmarks.results import machine

SAMPLE = Path(__file__).parents[1] / "minute" / "video.mp4"


class StubPool(LocalWorkerPool):
    """Workers that answer at once; one call in a thousand dies, and one video in a thousand
    fails.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0
        self.watched_s = 0.0

    def call(self, index: int, verb: str, *args: Any) -> Any:
        """Answer as a worker."""
        self.calls += 1
        if verb == "examine":
            return VideoOutcome(args[0], args[0].key, "new")
        if verb == "load":
            return False
        job = args[0].job
        if self.calls % 1000 == 0:
            raise WorkerDied("it was killed")
        failure = (
            VideoFailure("SourceUnreadable", "no frame of it can be read")
            if hash(job.key) % 1000 == 0
            else None
        )
        return VideoOutcome(
            job,
            f"/states/{job.key}.safetensors",
            "watched" if failure is None else "failed",
            steps=3600,
            stream_time_s=3600.0,
            failure=failure,
        )

    def stop(self) -> None:
        """Have nothing to stop."""


def jobs(n: int) -> Iterator[VideoJob]:
    """Yield jobs with names as long as real ones: a folder per camera and day, a file per hour."""
    for i in range(n):
        key = f"camera-{i // 240:06}/2026-03-{i // 24 % 10 + 1:02}/hour-{i % 24:02}"
        yield VideoJob(f"s3://recordings-of-all-sites/raw/{key}.mp4", key)


def simulate(n: int, workers: int) -> dict[str, Any]:
    """Plan and run `n` videos; return the coordinator's bytes and microseconds per video."""
    gc.collect()
    tracemalloc.start()
    planned = list(jobs(n))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    counts = Counter(one.status for one in run_fleet(planned, StubPool(workers), "/states"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del planned
    # Time without the tracer.
    planned = list(jobs(n))
    began = time.perf_counter()
    cpu = time.process_time()
    ended = sum(1 for _ in run_fleet(planned, StubPool(workers), "/states"))
    run_s = time.perf_counter() - began
    run_cpu = time.process_time() - cpu
    assert ended == n == counts.total()
    return {
        "videos": n,
        "workers": workers,
        "outcomes": dict(counts),
        "planned_bytes_per_video": round(held / n, 1),
        "running_bytes_per_video": round((peak - held) / n, 1),
        "run_us_per_video": round(run_s / n * 1e6, 1),
        "run_cpu_us_per_video": round(run_cpu / n * 1e6, 1),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


@dataclass(frozen=True, kw_only=True)
class StubRecipe(JobRecipe):
    """Needs no model: no video is there."""

    def identify(self, device: str) -> Any:
        """Return nothing."""
        return None


def processes(n: int, workers: int) -> dict[str, Any]:
    """Send missing videos through real processes; return the cost of handing one out and of its
    answer.
    """
    gone = [VideoJob(f"/nowhere/{i}.mp4", str(i)) for i in range(n)]
    with TemporaryDirectory() as place:
        recipe = StubRecipe(place=place)
        with LocalWorkerPool(recipe, workers, ["cpu"]) as pool:
            found = run_fleet(gone, pool, place)
            first = next(found)
            began = time.perf_counter()
            rest = sum(1 for _ in found)
            seconds = time.perf_counter() - began
    assert first.status == "failed"
    return {"videos": rest, "workers": workers, "us_per_video": round(seconds / rest * 1e6, 1)}


def main() -> None:
    """Measure the parts that are named, and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["simulate", "processes"])
    parser.add_argument("--videos", type=int, nargs="+", default=[10_000, 100_000])
    options = parser.parse_args()
    target = Path(__file__).with_name("measured-cpu.json")
    found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    found["machine"] = machine("cpu")
    if "simulate" in options.parts:
        found["simulate"] = [simulate(n, workers) for n in options.videos for workers in (8, 64)]
    if "processes" in options.parts:
        found["processes"] = [processes(2000, workers) for workers in (1, 2)]
    target.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
