"""Which commit answers for a stream time that was asked for, told on stderr."""

from __future__ import annotations

from protokv_cli.output import Output
from protokv_cli.tables import time_text


def tell_commit(out: Output, stream_time_s: float, at_s: float | None) -> None:
    """Say where the commit stands that was chosen for `--at`, if it is not exactly there."""
    if at_s is not None and time_text(stream_time_s) != time_text(at_s):
        out.note(f"as of {time_text(stream_time_s)}, the last commit that is kept before {time_text(at_s)}")
