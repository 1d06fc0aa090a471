"""States of prepared frames, and servers of them on loopback."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from protokv.ingestion import StandingQuestion, ingest_events
from protokv.memories import DurableConfig
from protokv.serve import FedSessions, ServerLimits, StateFolder, build_app, make_uvicorn_config
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared


@contextmanager
def server(
    folder: Path,
    backbone: MockBackbone | None = None,
    feed: Any = None,
    limits: ServerLimits | None = None,
    **options: Any,
) -> Iterator[str]:
    """The address of a server; it is gone afterwards. `feed` are the options and limits of its
    sessions.
    """
    states = StateFolder(folder, backbone or MockBackbone())
    limits = limits or ServerLimits()
    fed = feed and FedSessions(states, *feed)
    app = build_app(states, fed=fed, limits=limits, **options)
    running = uvicorn.Server(make_uvicorn_config(app, "127.0.0.1", 0, limits))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(30)


def watch(path: Path, seed: int, n_frames: int) -> None:
    config = DurableConfig(budget=40)
    ask = (StandingQuestion("what is it", 2.0),)
    list(
        ingest_events(
            Prepared(seed, n_frames), path, config, backbone=MockBackbone(), overwrite=True, ask=ask
        )
    )


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three states, that no test changes."""
    folder = tmp_path_factory.mktemp("states")
    for i, name in enumerate(("door", "garden", "monday/door")):
        (folder / name).parent.mkdir(exist_ok=True)
        watch(folder / f"{name}.safetensors", i, 6)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of these."""
    return shutil.copytree(made, tmp_path / "states")
