"""What an answer stood on, as a line for people and as keys of its JSON row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protokv_cli.tables import time_text

if TYPE_CHECKING:
    from protokv.extras.evidence import Evidence


def evidence_text(evidence: Evidence) -> str:
    """`stood on 0:07 to 0:09 (61 %), 1:02 to 1:03 (4 %)`, and a word where that is little."""
    named = ", ".join(
        f"{time_text(moment.start_s)} to {time_text(moment.end_s)} ({moment.share:.0%})".replace("%", " %")
        for moment in evidence.moments
    )
    if not named:
        text = "no moment stands out"
    elif evidence.faint:
        text = f"no moment stands out; most {named}"
    else:
        text = f"stood on {named}"
    return f"{text}: this may no longer be in memory" if evidence.faint else text


def evidence_keys(evidence: Evidence) -> dict[str, Any]:
    """`evidence`, the moments, and `faint`: null where a low share says nothing about the model."""
    moments = [
        {"start_s": moment.start_s, "end_s": moment.end_s, "share": round(moment.share, 4)}
        for moment in evidence.moments
    ]
    return {"evidence": moments, "faint": evidence.faint}
