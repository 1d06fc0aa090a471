"""What `protokv inspect` shows of a live stream: when it ran, and what it missed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from protokv_cli.tables import grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

# The newest gaps; --json has more.
SHOWN = 8


def live_tables(d: dict[str, Any]) -> Iterator[RenderableType]:
    """Nothing of a file."""
    live = d["stream"]["live"]
    if live is None:
        return
    yield pairs(
        {
            "began": live["began"],
            "committed": live["committed"],
            "source": "lost" if live["lost"] else "there",
            "gaps": f"{live['gaps_in_all']}, {time_text(live['lost_s'])} together",
            "frames": f"{live['frames_dropped']} dropped, {live['frames_damaged']} damaged",
        },
        title="live",
    )
    if live["gaps"]:
        rows = (
            (one["from"], time_text(one["from_s"]), "-" if one["to_s"] is None else time_text(one["to_s"]), one["why"])
            for one in live["gaps"][-SHOWN:]
        )
        yield grid(["gap", "from", "to", "why"], rows)
