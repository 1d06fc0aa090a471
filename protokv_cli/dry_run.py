"""`protokv ingest VIDEO --dry-run`: what the run would take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from protokv_cli.output import Format, Output
from protokv_cli.tables import bytes_text, count_text, pairs, time_text

if TYPE_CHECKING:
    from protokv.ingestion.estimate import Estimate


def show_estimate(out: Output, found: Estimate) -> None:
    """A table, or one JSON object."""
    if out.format is Format.JSON:
        out.json({"type": "estimate", **asdict(found)})
        return
    unknown = "unknown: the source does not say how long it is"
    rows = {
        "source": found.source,
        "length": unknown if found.duration_s is None else time_text(found.duration_s),
        "steps": unknown if found.steps is None else count_text(found.steps, "step"),
        "tokens": f"{found.tokens_per_step:g} a step" + ("" if found.tokens is None else f", {found.tokens:,} in all"),
        "state": f"{bytes_text(found.state_bytes)} in memory, on disk "
        + ("growing with the stream" if found.most_bytes is None else f"at most {bytes_text(found.most_bytes)}"),
        "takes": "unknown"
        if found.seconds is None
        else f"about {time_text(round(found.seconds))}, by {count_text(found.tried_steps, 'step')} tried here",
    }
    out.table(pairs(rows, title="nothing was written; it would be"))
