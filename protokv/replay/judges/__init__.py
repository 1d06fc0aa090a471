"""Judges of open answers, behind one interface: an endpoint, a local model, or plain comparison offline."""

from __future__ import annotations

from protokv.replay.judges.base import Case, Judge, Verdict, judge_rows
from protokv.replay.judges.select import select_judge

__all__ = ["Case", "Judge", "Verdict", "judge_rows", "select_judge"]
