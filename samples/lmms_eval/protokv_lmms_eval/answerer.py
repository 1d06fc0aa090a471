"""Answers for another harness: one question about one video at a time.

Questions about one video that come in the order of their times share one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protokv.backbones import load_backbone
from protokv.core.decoding import Decoding
from protokv.memories import DEFAULT_MEMORY, MemoryConfig
from protokv.stream.session import Session
from protokv.video import VideoStep, open_source, read_steps


class Answerer:
    """One model and one memory."""

    _session: Session
    _steps: Iterator[VideoStep]
    _waiting: VideoStep | None

    def __init__(
        self, model: str, *, memory: str = DEFAULT_MEMORY, fps: float | None = None, **settings: Any
    ) -> None:
        """Load the model.

        Args:
            model: hub name or folder, or `protokv/mini`.
            memory: its name.
            fps: frames per second; the model's own if None.
            settings: `device`, `dtype` and `device_map` as for `load_backbone`, and settings of the
                memory.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: a setting is unknown or out of range.
        """
        placement = {
            name: settings.pop(name)
            for name in ("device", "dtype", "device_map")
            if name in settings
        }
        self._config = MemoryConfig.of(memory, **settings)
        self.backbone = load_backbone(model, **placement)
        self._fps = fps
        self._path: Path | None = None

    def answer(
        self, video: str | Path, prompt: str, *, until_s: float | None = None, decoding: Decoding
    ) -> str:
        """Watch a video file until `until_s` (None: to its end), see no later frame, and ask.

        Raises:
            SourceError: the video cannot be read.
        """
        path = Path(video)
        if path != self._path or (
            until_s is not None and until_s < self._session.clock.stream_time_s
        ):
            self._begin(path)
        session = self._session
        while self._waiting is not None:
            newest_s = (
                self._waiting.time_s + (session.clock.frames_per_step - 1) / session.clock.fps
            )
            if until_s is not None and newest_s > until_s:
                break
            session.watch(self._waiting.images, self._waiting.time_s)
            self._waiting = next(self._steps, None)
        return session.ask(prompt, decoding).text

    def _begin(self, path: Path) -> None:
        self._session = Session.start(self.backbone, self._config, fps=self._fps)
        self._steps = self._read(path)
        self._waiting = next(self._steps, None)
        self._path = path

    def _read(self, path: Path) -> Iterator[VideoStep]:
        clock = self._session.clock
        with open_source(path) as source:
            yield from read_steps(source, clock.fps, clock.frames_per_step)
