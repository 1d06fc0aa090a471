"""Scripted live sources: each connection is a script, and time passes only in the script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from protokv.errors import SourceUnreadable
from protokv.ingestion import LiveOptions
from protokv.ingestion.live import LiveSource
from protokv.video import Frame, Source, SourceDamage, SourceInfo
from protokv.video.source import FrameRequest

INFO = SourceInfo(
    "rtsp://camera/1", "rtsp", "pyav", "rtsp", "h264", "yuv420p", 48, 32, 0, 10.0, seekable=False
)
EPOCH = 1.8e9


class World:
    """The clock on the wall, and a camera with one script a connection; then every connection is
    refused.

    A script is a list of: a number of frames, ten a second; `("quiet", s)`: nothing comes for `s`
    seconds; an event to wait for; an error. `("away", s)` before these: connecting takes `s`
    seconds.
    """

    def __init__(self, *scripts: list[Any], began_s: float = 0.0) -> None:
        self.now_s = began_s
        self.scripts = list(scripts)
        self.connections = self.frames = 0
        self.sizes: list[Any] = []
        self.idle = threading.Event()

    def connect(self, should_stop: Callable[[], bool], size: Any = None) -> Connection:
        self.connections += 1
        self.sizes.append(size)
        if not self.scripts:
            self.idle.set()
            raise SourceUnreadable("rtsp://camera/1 cannot be opened: Connection refused")
        script = self.scripts.pop(0)
        if isinstance(script[0], tuple) and script[0][0] == "away":
            self.now_s += script.pop(0)[1]
        if isinstance(script[0], Exception):
            raise script[0]
        return Connection(self, script)

    def source(self, text: str = "rtsp://admin:s3cret@camera/1", **options: Any) -> LiveSource:
        chosen = LiveOptions(**{"retry_s": (0.001, 0.001), "on_pressure": "wait", **options})
        return LiveSource(
            text, chosen, self.connect, clock=lambda: self.now_s, now=lambda: EPOCH + self.now_s
        )

    def watched(self, source: LiveSource) -> Callable[[], bool]:
        """Return a function that is True once the camera has no more, nothing waits, and the last
        frame is watched.
        """
        quiet = 0

        def stop() -> bool:
            nonlocal quiet
            waits = source._feed is not None and len(source._feed.mailbox._items) > 0
            quiet = quiet + 1 if self.idle.is_set() and not waits else 0
            return quiet > 5

        return stop


class Connection(Source):
    info = INFO
    damage = SourceDamage()

    def __init__(self, world: World, script: list[Any]) -> None:
        self.world = world
        self.script = script

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        should_stop = wanted.should_stop
        world = self.world
        time_s = 0.0
        for part in self.script:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, threading.Event):
                part.wait(30)
                continue
            if isinstance(part, tuple):
                world.now_s = world.now_s + part[1]
                time_s = time_s + part[1]
                if should_stop():
                    return
                continue
            for _ in range(part):
                yield Frame(time_s, partial(_picture, world.frames), None, "pyav")
                if should_stop():
                    return
                world.frames += 1
                world.now_s += 0.1
                time_s += 0.1


def _picture(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (32, 48, 3), dtype=np.uint8)


def gone(why: str = "rtsp://camera/1 is gone") -> SourceUnreadable:
    return SourceUnreadable(why)
