"""`Grouping`: sampled frames of a live source to steps. Knows nothing of how they came."""

from __future__ import annotations

from collections.abc import Iterator

from protokv.ingestion.feed import Sampled
from protokv.video.sampling import Sample, Step, make_step


class Grouping:
    """Sampled frames to steps. A step that a loss cuts short is filled with its last frame."""

    def __init__(self, fps: float, frames_per_step: int) -> None:
        """So many frames make a step."""
        self._fps, self._n = fps, frames_per_step
        self._group: list[Sample] = []
        self._index = self._next_slot = 0

    def take(self, news: Sampled) -> Iterator[Step]:
        """Another frame; perhaps the last of a step."""
        if not self._group:
            if news.slot < self._next_slot:
                return  # the step before was filled, and reaches beyond this frame
            self._next_slot = news.slot + self._n
        self._group.append(Sample(news.slot / self._fps, news.image, news.decoder))
        if len(self._group) == self._n:
            yield from self._step()

    def cut(self) -> Iterator[Step]:
        """What follows is not connected with what was: the step that was begun ends."""
        if self._group:
            yield from self._step()

    def _step(self) -> Iterator[Step]:
        group, self._group = self._group, []
        yield make_step(self._index, group, self._n)
        self._index += 1
