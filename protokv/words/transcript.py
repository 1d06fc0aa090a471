"""`Transcript`: what was said in a stream, with its times, kept with its memory as `Thumbnails`
are.

It is complete up to `MOST_TRANSCRIPT_BYTES`; then the oldest go. It tells where words stand, so
that what comes after gets its time (`Backbone.stream_times`) and a resumed stream continues where
it was. A stream without words has none, and its state no tensor of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.parts import PositionedStep, SessionView, TranscriptAttachment, Utterance
from protokv.core.step import SpokenText, StreamClock
from protokv.core.tensors import Specs, TensorDict, Tensors, TensorSpec
from protokv.errors import ConfigError, StateCorrupt

# About seven hours of speech.
MOST_TRANSCRIPT_BYTES = 512 << 10
MOST_TRANSCRIPT_LINE_BYTES = 4 << 10

_NAME = "transcript.lines"


class _TranscriptLine(NamedTuple):
    """What was said in a step: its index, its stream time in seconds, the position of its last
    token, the text, and from when to when it was said.
    """

    step: int
    start_s: float
    end_s: float
    position: int
    text: str
    said_from_s: float
    said_to_s: float


class Transcript(TranscriptAttachment):
    """The lines of a stream; at first none."""

    def __init__(self) -> None:
        # lines in the order of the stream; its last one is always there
        self.lines: list[_TranscriptLine] = []
        self._bytes = 0

    @staticmethod
    def declare() -> Specs:
        """Declare the lines as JSON, one a row; a state may have none."""
        meaning = (
            "what was said, a row of JSON a step: step, start and end in seconds, last position, "
            "text, and start and end of the cues"
        )
        return (
            TensorSpec(
                _NAME, ("line_byte",), (MOST_TRANSCRIPT_BYTES,), torch.uint8, meaning, optional=True
            ),
        )

    @classmethod
    def of(cls, tensors: Tensors) -> Transcript:
        """Return the transcript of a state, which may have no lines. Raises as `take`."""
        found = cls()
        found.take(tensors)
        return found

    @property
    def is_full(self) -> bool:
        """Whether older lines may have gone."""
        return self._bytes + 2 * MOST_TRANSCRIPT_LINE_BYTES > MOST_TRANSCRIPT_BYTES

    def before_append(self, session: SessionView, step: PositionedStep) -> None:
        """Refuse words where they cannot be shown. Raises as `check_memory_takes_words`."""
        if step.tokens.words:
            check_memory_takes_words(session.backbone, session.config)

    def after_append(self, session: SessionView, step: PositionedStep, context: Context) -> None:
        """Keep what was said in a step."""
        if not step.tokens.words:
            return
        clock = step.clock
        text = _make_printable(step.tokens.words_text)
        text = text.encode()[:MOST_TRANSCRIPT_LINE_BYTES].decode(errors="ignore")
        end_s = clock.stream_time_s
        start_s = max(0.0, end_s - clock.step_seconds)
        said = step.tokens.words_text
        from_s = start_s
        to_s = end_s
        if isinstance(said, SpokenText):
            from_s = max(0.0, start_s + said.start_s)
            to_s = max(from_s, start_s + said.end_s)
        line = _TranscriptLine(
            clock.steps - 1, start_s, end_s, clock.next_position - 1, text, from_s, to_s
        )
        self.lines.append(line)
        self._bytes += len(_encode(line))
        while self._bytes > MOST_TRANSCRIPT_BYTES:
            self._bytes -= len(_encode(self.lines.pop(0)))

    def between(self, start_s: float, end_s: float) -> list[Utterance]:
        """Return what was said in the steps that touch a span of stream time, at its own times."""
        found = (line for line in self.lines if line.start_s < end_s and line.end_s > start_s)
        return [Utterance(line.said_from_s, line.said_to_s, line.text, line.step) for line in found]

    def words_end(self, clock: StreamClock) -> StreamClock | None:
        """Return where the stream of this clock stood after its last line; None: it has no line."""
        if not self.lines:
            return None
        last = self.lines[-1]
        return replace(
            clock, steps=last.step + 1, stream_time_s=last.end_s, next_position=last.position + 1
        )

    def breaks(self) -> Tensor | None:
        """Return position and time after each line, `[n, 2]` float64; None without lines."""
        ends = [[line.position + 1, line.end_s] for line in self.lines]
        return torch.tensor(ends, dtype=torch.float64) if ends else None

    def live_tensors(self) -> TensorDict:
        """Return all of it."""
        data = bytearray(b"".join(map(_encode, self.lines)))
        return {_NAME: torch.frombuffer(data, dtype=torch.uint8)} if data else {}

    def take(self, tensors: Tensors) -> None:
        """Take the lines of a state, if it has any. StateCorrupt if they are none."""
        data = tensors[_NAME].cpu().numpy().tobytes() if _NAME in tensors else b""
        try:
            found = msgspec.json.decode(
                b"[" + data.strip().replace(b"\n", b",") + b"]", type=list[_TranscriptLine]
            )
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StateCorrupt(f"state: tensor {_NAME} holds no lines") from error
        self.lines = [line._replace(text=_make_printable(line.text)) for line in found]
        self._bytes = sum(len(_encode(line)) for line in self.lines)


def check_memory_takes_words(backbone: Any, config: Any) -> None:
    """Refuse words where the memory has no room for them, or where compact positions cannot show
    them. ConfigError.

    After words, Qwen2-VL and Qwen2.5-VL count rows and columns from the words. Compact positions
    move time alone, and a prototype does not tell after which words its tokens stood.
    """
    if config != config.with_words(True):
        raise ConfigError(
            f"words: this stream began without words, and {config.name} keeps them apart from "
            "pictures from the start",
            hint="start another state for it, with --set words=true if words come later, or use "
            "--subtitles off",
        )
    if config.positions == "compact" and len(backbone.moving) < backbone.position_components:
        raise ConfigError(
            f"positions: {backbone.identity.name} cannot show words at compact positions",
            hint="use --set positions=stream, or leave the words out with --subtitles off",
        )


def _encode(line: _TranscriptLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _make_printable(text: str) -> str:
    """Return text without control characters: it is printed, and may come from anywhere."""
    return "".join(one if one.isprintable() else " " for one in text)
