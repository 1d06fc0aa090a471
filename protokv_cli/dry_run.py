"""`protokv ingest VIDEO --dry-run`: what the run would take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from protokv_cli.output import Format, Output
from protokv_cli.tables import bytes_text, count_text, pairs, time_text

if TYPE_CHECKING:
    from protokv.config import MemoryConfig
    from protokv.ingestion.estimate import Estimate
    from protokv.video import Decoder


def dry_run_one(
    out: Output,
    named: str,
    config: MemoryConfig,
    model: str | None,
    *,
    dtype: str | None,
    fps: float | None,
    decoder: Decoder,
    max_frame_pixels: int | None,
    start_s: float,
    duration_s: float | None,
    **placement: Any,
) -> None:
    """Try a few steps of a video, and say what all of it would take.

    Args:
        out: where to.
        named: the video.
        config: of the memory.
        model: its name or folder; None: the embedded one.
        dtype: of its weights; None: `auto`.
        fps: sampled frames per second; None: the model's own.
        decoder: of the video, as for `open_source`.
        max_frame_pixels: the most that a frame may have; None: the default.
        start_s: where in the video to begin.
        duration_s: how much of it to watch; None: to its end.
        placement: `device`, `device_map`, `quantization` and `revision` as for `load_backbone`.
    """
    from protokv.backbones import EMBEDDED, load_backbone
    from protokv.ingestion.estimate import estimate
    from protokv.video import open_source
    from protokv.video.part import Part

    backbone = load_backbone(model or EMBEDDED, dtype=dtype or "auto", **placement)
    opened = open_source(named, decoder, max_pixels=max_frame_pixels, isolate=True)
    with opened:
        whole = not start_s and duration_s is None
        show_estimate(out, estimate(opened if whole else Part(opened, start_s, duration_s), backbone, config, fps=fps))


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
        + ("growing with the stream" if found.most_bytes is None else f"about {bytes_text(found.most_bytes)}"),
        "takes": "unknown"
        if found.seconds is None
        else f"about {time_text(round(found.seconds))}, by {count_text(found.tried_steps, 'step')} tried here",
    }
    out.table(pairs(rows, title="nothing was written; it would be"))
