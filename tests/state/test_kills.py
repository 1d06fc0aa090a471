"""SIGKILL at random moments loses nothing and tears nothing, in any form.

The disk changes by system calls alone, so a moment is a system call: the process is killed before it, or in the middle
of a write. A seed names its moments. `PROTOKV_KILL_SEEDS=1-80` chooses the seeds of the slow test; each kills 25 times.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from protokv.errors import StateNotFound
from protokv.fleet import Job
from protokv.ingestion import Every, IngestOptions
from protokv.state.api import load_state
from protokv.state.snapshot import State
from tests import faults
from tests.faults import KILL, Fault
from tests.fleet.conftest import CONFIG, InlinePool, films, jobs, outcomes, singly, written
from tests.fleet.recipes import MockRecipe
from tests.state.test_faults import Trial, commits, operations

__all__ = ["commits", "films", "jobs", "singly"]

pytestmark = faults.needs_linux

FIRST, _, LAST = os.environ.get("PROTOKV_KILL_SEEDS", "1-80").partition("-")
KILLS = 25
FORM_OF_KILLS = [".safetensors", ".safetensors", ".pt", ".zarr"]


class Killer:
    """Kills operations at random moments, and counts what came of it."""

    def __init__(self, commits: list[State], jobs: list[Job], singly: dict[str, bytes], folder: Path) -> None:
        self.verdicts: Counter[str] = Counter()
        self._commits, self._jobs, self._singly, self._folder = commits, jobs, singly, folder
        self._trials: dict[tuple[str, str], Trial] = {}
        self._calls: dict[tuple[str, str], int] = {}

    @property
    def kills(self) -> int:
        return sum(self.verdicts.values())

    def kill(self, random: Random, kills: int) -> None:
        """Kill some operations, most of them more than once in a row."""
        enough = self.kills + kills
        while self.kills < enough:
            n = min(enough - self.kills, random.randint(2, 6))
            name = random.choice(["start", "resume", "append", "convert", "fleet"])
            if name == "fleet":
                self._kill_fleet(random, n)
            else:
                self._kill_one(random, name, random.choice(FORM_OF_KILLS), n)

    def _kill_one(self, random: Random, name: str, suffix: str, n: int) -> None:
        key = name, suffix
        if key not in self._trials:
            place = self._folder / f"{name}{suffix}"
            place.mkdir()
            self._trials[key] = Trial(operations(suffix, self._commits)[name], suffix, self._commits, place)
            self._calls[key] = len(self._trials[key].run(Fault())[0].calls)
        # What is left after a kill has fewer calls.
        moments = [Fault(random.randint(1, self._calls[key] // i), KILL) for i in range(1, n + 1)]
        ended = self._trials[key].run(*moments)
        self.verdicts[f"{name} {suffix}"] += sum(one.status == -signal.SIGKILL for one in ended)

    def _kill_fleet(self, random: Random, n: int) -> None:
        options = IngestOptions(config=CONFIG, every=Every(n_steps=1))
        place = self._folder / "fleet"
        recipe = MockRecipe(place=str(place), options=options)

        def act() -> None:
            outcomes(self._jobs, InlinePool(recipe, 2), recipe)

        for i in range(1, n + 1):
            place.mkdir(exist_ok=True)
            if ("fleet", "") not in self._calls:
                self._calls["fleet", ""] = len(faults.run(act, place).calls)
                shutil.rmtree(place)
                place.mkdir()
            ended = faults.run(act, place, Fault(random.randint(1, self._calls["fleet", ""] // i), KILL))
            self.verdicts["fleet .safetensors"] += ended.status == -signal.SIGKILL
            for key, whole in self._singly.items():
                with suppress(StateNotFound):
                    state = load_state(place / f"{key}.safetensors")
                    assert not state.complete or written(recipe)[key] == whole
        act()
        assert written(recipe) == self._singly
        shutil.rmtree(place)


@pytest.fixture(scope="session")
def killer(commits, jobs, singly, tmp_path_factory) -> Killer:
    return Killer(commits, jobs, singly, tmp_path_factory.mktemp("kills"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
def test_a_kill_at_any_moment_loses_nothing_and_tears_nothing(seed, killer) -> None:
    killer.kill(Random(seed), KILLS)
    print(dict(killer.verdicts))
