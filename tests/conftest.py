"""Shared by all tests: no network, one thread, a tiny random model of the real architecture, loaded
as a user would.

What is heavy is imported where it is used: the process that shares tests among workers runs none.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
# Forked tokenizer threads warn, and warnings are errors here.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Of every process that a test starts; read when torch and numpy are loaded.
os.environ["OMP_NUM_THREADS"] = os.environ.get("PROTOKV_TEST_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import numpy as np

    from protokv.core.backbone import Backbone
    from protokv.memories import MemoryConfig
    from protokv.stream.session import Session

# It takes a quarter of the time in which tests are imported; on again when all of them are.
gc.disable()

settings.register_profile(
    "quick",
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("quick"), max_examples=40)
settings.register_profile(
    "nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def wide(*values: Any) -> list[Any]:
    """Return values of a parameter of tests with the mark `wide`; of several, each is a tuple."""
    return _mark(pytest.mark.wide, values)


def slow(*values: Any) -> list[Any]:
    """Return such values with the mark `slow`."""
    return _mark(pytest.mark.slow, values)


def _mark(mark: pytest.MarkDecorator, values: Iterable[Any]) -> list[Any]:
    each = (one if isinstance(one, tuple) else (one,) for one in values)
    return [pytest.param(*one, marks=mark) for one in each]


def widen(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return values of a parameter of tests. Those that are not `quick` are `wide`."""
    return [one for value in values for one in ([value] if value in quick else wide(value))]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers, for whole rooms only: each takes seconds to begin. None where one process must
    do what is asked.
    """
    alone = config.option.usepdb or config.option.capture == "no"
    files = all("::" in name or Path(name).is_file() for name in config.args)
    return 0 if alone or files else min(2, os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of numbers is one in a file that imports `tests.tolerance`; marked before `-m` looks
    for it.
    """
    for item in items:
        named = vars(item.module) if isinstance(item, pytest.Function) else {}
        if any(getattr(value, "__module__", None) == "tests.tolerance" for value in named.values()):
            item.add_marker(pytest.mark.numbers)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave the modules out of every later collection of garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_seed_and_few_threads() -> None:
    """Draw the same numbers whichever tests ran before, on one thread: more show what a sum in
    several parts does.
    """
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("PROTOKV_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def wait_for_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync no file; operations whose calls fail (`tests.faults`) and programs that tests start
    do.
    """
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture(autouse=True)
def _memory_that_is_not_written_holds_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where memories are tested, fill the memory of `torch.empty` with NaN; a nondeterministic
    kernel raises.
    """
    import torch

    if request.path.relative_to(Path(__file__).parent).parts[0] in ("core", "memories", "stream"):
        # `use_deterministic_algorithms` does the same, and imports torch's compiler for it.
        torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.backbones.tiny import write_qwen2_5_vl

    return write_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2-5-vl"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Backbone:
    from protokv.backbones import load_backbone

    return load_backbone(str(tiny_folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Backbone:
    """Return the model of the `folder` that a file of tests has."""
    from protokv.backbones import load_backbone

    return load_backbone(str(folder), device="cpu", dtype="float32")


def watched(backbone: Backbone, config: MemoryConfig, frames: Iterable[int]) -> Session:
    """Return a session that watched a step of random frames of each of these seeds."""
    from protokv.stream.session import Session

    session = Session.start(backbone, config)
    for seed in frames:
        session.watch(random_frames(seed, backbone.frames_per_step))
    return session


def continued(session: Session, backbone: Backbone | None = None, **changes: Any) -> Session:
    """Return a session that goes on from a copy of the state of another one, with these changes."""
    from dataclasses import replace

    state = session.make_state()
    tensors = {name: one.clone() for name, one in state.tensors.items()}
    return type(session).restore(
        replace(state, **{"tensors": tensors} | changes), backbone or session.backbone
    )


def random_frames(seed: int, n_frames: int = 2, height: int = 60, width: int = 90) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(seed).integers(
        0, 256, (n_frames, height, width, 3), dtype=np.uint8
    )
