"""The ranges of seeds are disjoint, and everything that names a seed stays within its range."""

from __future__ import annotations

import gzip
import json
import re
from itertools import combinations
from pathlib import Path

from samples.seeds import (
    CARD,
    DEMONSTRATION,
    DEVELOPMENT,
    RANGES,
    STUDY,
    WORLD_STREAMS,
)
from samples.worlds.held_out import LENGTHS, LOADS, make_held_out_world
from samples.worlds.studies import load_study

ROOT = Path(__file__).parents[3]


def test_no_two_ranges_share_a_seed() -> None:
    for one, other in combinations(RANGES.values(), 2):
        assert one.stop <= other.start or other.stop <= one.start


def test_worlds_draw_from_the_generators_that_are_named() -> None:
    files = [ROOT / "samples/questions.py", *(ROOT / "samples/worlds").glob("*.py")]
    source = "".join(file.read_text() for file in files)
    used = {int(word) for word in re.findall(r"default_rng\(\[\S*seed\S*, (\d+)", source)}
    assert used == WORLD_STREAMS


def test_the_worlds_of_the_card_keep_to_themselves() -> None:
    for load in LOADS:
        for length in LENGTHS:
            if load == "crowd" and length < 32:
                continue
            for index in (0, 383):
                seed = make_held_out_world(load, length, index).config.seed
                assert seed in CARD or not any(
                    seed in taken for taken in (DEMONSTRATION, DEVELOPMENT, STUDY)
                )
                assert CARD.start <= CARD.start + 10_000 * length + index < CARD.stop


def test_studies_keep_to_their_range() -> None:
    for path in sorted((ROOT / "samples" / "studies").glob("*.toml")):
        worlds = load_study(str(path)).worlds
        shown = (
            "delay",
            "harder",
            "order",
            "time",
            "hour",
            "decay",
            "modes",
            "words",
            "sight",
            "long-budget",
        )
        reported = path.stem in shown
        assert worlds is None or all(
            seed in (STUDY if reported else DEMONSTRATION) for seed in worlds.seeds
        )


def test_the_rows_and_the_command_of_the_study_are_of_its_range() -> None:
    folders = [ROOT / "samples" / "studies" / name for name in ("delay", "harder")]
    stored = [path for folder in folders for path in folder.glob("*.jsonl.gz")]
    assert stored
    for path in stored:
        # Rows are not parsed: there are tens of thousands, and each begins with its video, or the
        # seed of its world.
        rows = gzip.decompress(path.read_bytes())
        seeds = re.findall(rb'^\{"(?:video": ?"world-|seed": )(\d+)', rows, re.MULTILINE)
        assert len(seeds) == rows.count(b"\n") > 0
        assert all(int(seed) in STUDY for seed in set(seeds))
    commands = "".join((folder / "run.sh").read_text() for folder in folders)
    for start, count in re.findall(r"--worlds (\d+):(\d+)", commands):
        assert int(start) in STUDY
        assert int(start) + int(count) - 1 in STUDY


def test_settings_were_searched_on_worlds_that_no_table_uses() -> None:
    seeds: dict[bool, set[int]] = {True: set(), False: set()}
    for path in (ROOT / "samples" / "studies" / "tuned").glob("*.jsonl.gz"):
        found = re.findall(rb'"video": ?"world-(\d+)"', gzip.decompress(path.read_bytes()))
        seeds[path.name.startswith("search-")] |= {int(seed) for seed in found}
    assert len(seeds[True]) == 16
    assert not any(seed in taken for seed in seeds[True] for taken in RANGES.values())
    assert seeds[False]
    assert all(seed in STUDY for seed in seeds[False])


def test_the_samples_keep_to_their_range() -> None:
    seeds = re.findall(r"--seed (\d+)", (ROOT / "samples" / "make.sh").read_text())
    assert len(seeds) == 3
    assert all(int(seed) in DEMONSTRATION for seed in seeds)


def test_the_rows_of_evidence_are_of_the_study_and_of_no_world_of_the_delay_study() -> None:
    with gzip.open(ROOT / "samples" / "studies" / "evidence" / "rows.jsonl.gz", "rt") as lines:
        seeds = {json.loads(line)["seed"] for line in lines}
    assert len(seeds) == 16
    assert all(seed in STUDY for seed in seeds)
    worlds = load_study("delay").worlds
    assert worlds
    assert not seeds & set(worlds.seeds)
