"""Damaged videos, whatever the damage: a clean report or a SourceError, in bounded memory, and resumable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protokv.video import open_source
from protokv.video.isolated import IsolatedSource
from tests.video import fuzz

pytest.importorskip("resource")

# Nothing here needs more than a fraction of it; what does is held to hang.
CASE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("fuzz")
    fuzz.make(made)
    return made


def outcomes(folder: Path, first: int, last: int) -> Iterator[dict[str, Any]]:
    """Of every case; one that ended its process is read once more, in a process of its own."""
    while first < last:
        command = [sys.executable, "-m", "tests.video.fuzz", str(folder), str(first), str(last)]
        try:
            limit_s = max(CASE_S, last - first)
            out = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False).stdout
        except subprocess.TimeoutExpired as late:
            out = (late.stdout or b"").decode()
        for line in out.splitlines():
            yield json.loads(line)
            first += 1
        if first < last:
            path, what = fuzz.case(folder, first)
            found = fuzz.reading(path, lambda path: IsolatedSource(path, stall_s=CASE_S))
            yield {"case": first, "what": what, **found, "died": True}
            first += 1


def check(folder: Path, first: int, last: int) -> Counter[str]:
    found = list(outcomes(folder, first, last))
    assert [one["case"] for one in found] == list(range(first, last))
    assert [one for one in found if one["outcome"] == "wrong"] == []
    assert max(one.get("peak_mib", 0) for one in found) < 1024
    return Counter(one["outcome"] for one in found)


def test_the_files_are_sound_before_they_are_damaged(folder):
    for name in fuzz.BASES:
        assert fuzz.reading(folder / f"base.{name}", open_source)["outcome"] == "read", name


def test_a_damaged_video_gives_a_clean_report_or_a_source_error_and_can_be_resumed(folder):
    counts = check(folder, 0, 120)
    # The damage is of all kinds: some is refused, some is met on the way.
    assert min(counts["read"], counts["damaged"], counts["refused"]) > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_two_thousand_damaged_videos_give_clean_reports_or_source_errors(part, folder):
    check(folder, 1000 + 200 * part, 1200 + 200 * part)
