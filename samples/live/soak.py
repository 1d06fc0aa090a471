"""Stream an hour at thirty times real time, from a pipe that breaks once a minute: `python -m
samples.live.soak`.

The first minute is samples/minute; its quiet beginning follows, over and over, or samples/long.
Every minute of stream loses eight seconds, and its time stamps start at 0 again. Prints one JSON
object: memory of the two processes and size of the state over time, frames watched, and answers
about the first minute, given after it and at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import av

HOME = Path(__file__).resolve().parents[2]
SAMPLES = HOME / "samples"
LOST_S = 8.0
OPTIONS = ["--budget", "512", "--positions", "compact", "--every", "30s", "--json"]
QUIET_S = 28.0
PROGRAM = [sys.executable, "-c", "from protokv_cli.main import run; run()"]


def feed(minutes: int, speed: float, busy: bool) -> None:
    """Send the stream to stdout."""
    began_s = time.monotonic()
    for minute in range(minutes):
        until_s = began_s + (minute + 1) * 60 / speed
        part = SAMPLES / "minute" / "video.mp4"
        from_s = 0.0
        if minute and busy:
            part = SAMPLES / "long" / "video.mp4"
            from_s = (minute - 1) % 10 * 60.0
        _send(
            part,
            from_s,
            QUIET_S if minute and not busy else 60.0,
            began_s + minute * 60 / speed,
            speed,
        )
        time.sleep(max(0.0, until_s - time.monotonic()))


def _send(path: Path, from_s: float, loop_s: float, began_s: float, speed: float) -> None:
    with av.open(sys.stdout.buffer, "w", format="mpegts") as output:
        stream: Any = None
        done_s = 0.0
        while done_s < 60:
            with av.open(str(path)) as source:
                video = source.streams.video[0]
                if stream is None:
                    stream = output.add_stream_from_template(video)
                base = video.time_base
                assert base is not None
                if from_s:
                    source.seek(int(from_s / base), stream=video)
                for packet in source.demux(video):
                    if packet.pts is None or packet.dts is None:
                        continue
                    at_s = float(packet.dts * base) - from_s
                    if at_s < -1:
                        continue
                    if at_s >= loop_s or done_s + at_s >= 60:
                        break
                    # The camera is gone in the middle of the minute.
                    if 50 - LOST_S <= done_s + at_s < 50:
                        continue
                    shift = int((done_s - from_s) / base)
                    packet.pts = packet.pts + shift
                    packet.dts = packet.dts + shift
                    packet.stream = stream
                    time.sleep(max(0.0, began_s + (done_s + at_s) / speed - time.monotonic()))
                    output.mux(packet)
            done_s += loop_s + 0.5


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process and its children."""
    total = 0.0
    for one in [pid, *_children(pid)]:
        try:
            text = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("VmRSS")
        )
    return total


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def answers(state: Path) -> str:
    """Return how many questions about the first minute get the right answer."""
    kept = []
    for line in (SAMPLES / "minute" / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        # The answers to these types change.
        if row["type"] not in ("now", "anything_now", "last"):
            kept.append(json.dumps({"question": row["question"], "answer": row["answer"]}))
    asked = subprocess.run(
        [*PROGRAM, "query", str(state), "-", "--json"],
        input="\n".join(kept),
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in asked.stdout.splitlines()]
    return f"{sum(row['correct'] for row in rows)}/{len(rows)}"


def main() -> None:
    """Run the test and print its results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--speed", type=float, default=30.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--state", type=Path, default=Path("/tmp/soak.safetensors"))
    parser.add_argument("--feed", action="store_true")
    given = parser.parse_args()
    if given.feed:
        feed(given.minutes, given.speed, given.busy)
        return
    given.state.unlink(missing_ok=True)
    arguments = [
        f"--minutes={given.minutes}",
        f"--speed={given.speed}",
        *(["--busy"] if given.busy else []),
    ]
    source = subprocess.Popen(
        [sys.executable, "-m", "samples.live.soak", "--feed", *arguments], stdout=subprocess.PIPE
    )
    began_s = time.monotonic()
    ingest = subprocess.Popen(
        [*PROGRAM, "ingest", "-", "-o", str(given.state), *OPTIONS],
        stdin=source.stdout,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert source.stdout is not None
    assert ingest.stdout is not None
    source.stdout.close()
    memory = []
    sizes = set()
    early = ""
    last = {}
    marks = set()
    for line in ingest.stdout:
        last = json.loads(line)
        if last["type"] == "commit":
            sizes.add(given.state.stat().st_size)
            minute = int(last["stream_time_s"] // 60)
            if minute not in marks:
                marks.add(minute)
                memory.append((minute, round(rss_mib(ingest.pid))))
            if not early and last["stream_time_s"] >= 60:
                early = answers(given.state)
    code = ingest.wait()
    record = json.loads(
        subprocess.run(
            [*PROGRAM, "inspect", str(given.state), "--json"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    print(
        json.dumps(
            {
                "exit": code,
                "took_s": round(time.monotonic() - began_s, 1),
                "stream_s": last["stream_time_s"],
                "steps": last["steps"],
                "frames_dropped": last["frames_dropped"],
                "gaps": last["gaps"],
                "rss_mib": memory,
                "state_bytes": last["state_bytes"],
                "file_bytes": sorted(sizes),
                "right_after_minute_1": early,
                "right_at_the_end": answers(given.state),
                "decoders": record["stream"].get("decoders"),
            }
        )
    )


if __name__ == "__main__":
    main()
