"""What `--timings` says: seconds by stage, as lines on stderr or as a key of a JSON row."""

from __future__ import annotations

import time
from collections.abc import Mapping

from protokv_cli.output import Output

# Of the thread that reads ahead: they overlap with everything else.
BESIDE = ("decode", "preprocess")


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """As JSON has them: to the tenth of a millisecond, and the CPU time of the process so far."""
    return {**{name: round(value, 4) for name, value in seconds.items()}, "process cpu": round(time.process_time(), 4)}


def show_timings(out: Output, seconds: Mapping[str, float]) -> None:
    """One line a stage, the CPU time of the process last."""
    rows = [(name, value, " (beside the others)" if name in BESIDE else "") for name, value in seconds.items()]
    rows.append(("process cpu", time.process_time(), ""))
    width = max(len(name) for name, _, _ in rows)
    for name, value, remark in rows:
        out.warn(f"{name:<{width}}  {value:9.3f} s{remark}")
