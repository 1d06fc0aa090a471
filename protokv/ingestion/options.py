"""The options of an ingest: `IngestOptions`, `LiveOptions` for sources that may wait or be lost,
and `Every`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, TypedDict

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.settings import check_sampled_fps
from protokv.errors import ConfigError, suggest_name
from protokv.memories import DurableConfig, MemoryConfig
from protokv.state.header import StateHeader
from protokv.state.thumbnails import DEFAULT_THUMBNAILS, MOST_THUMBNAILS
from protokv.stream.opening import load_recorded_backbone
from protokv.texts import Keywords
from protokv.video import Decoder, Source
from protokv.video.address import PIPE
from protokv.video.source import SourceSlice
from protokv.words.cues import Subtitles

DEFAULT_MODEL = "protokv/mini"
"""The model where none is named."""

# A live source without a frame for this time is lost.
_STALL_S = 20.0

# Steps of a file that go through the model together. Two take 1.4 times as long a step, eight
# hardly less than four.
FILE_CHUNK_STEPS = 4
# A forward of thousands of tokens gains nothing more, and its attention grows with their square.
_MOST_STEPS = 64


def _check_above_0(options: object, *names: str) -> None:
    """Refuse a number in fields with these names that is not above 0, or infinite. ConfigError."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"{name} is {value:g}", hint="use a finite number above 0")


@dataclass(frozen=True, slots=True)
class Every:
    """Commit after `seconds` of stream time, after `n_steps`, or after `wall_s` of real time; with
    none of them, never.

    By real time, other steps are committed in every run; the state at the end is the same.
    """

    seconds: float | None = None
    n_steps: int | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        _check_above_0(self, "seconds", "n_steps", "wall_s")

    def is_due(self, n_steps: int, seconds: float, wall_s: float) -> bool:
        """Return True if a commit is due, this much after the last one."""
        return (
            n_steps >= (self.n_steps or inf)
            or seconds >= (self.seconds or inf)
            or wall_s >= (self.wall_s or inf)
        )


EVERY_MINUTE = Every(wall_s=60.0)
"""The default: a kill loses little, and a commit a minute costs little."""

COMMIT_WHEN_LIVE = Every(wall_s=5.0)
"""The default of live sources: questions are about what has just happened."""

COMMIT_NEVER = Every()
"""Only at the end."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Options for a source that may wait or be lost."""

    # seconds without a frame after which it is lost; None: 20, for a pipe without end
    stall_s: float | None = None
    give_up_s: float | None = None  # seconds to try a lost source again; None: for ever
    # policy for a slow model; None: a pipe waits, others drop old frames
    on_pressure: Literal["drop", "wait"] | None = None
    for_s: float | None = None  # end after this much stream time
    input: Mapping[str, str] = field(default_factory=dict)  # options for FFmpeg
    # from one attempt to the next: at first, and at most; it doubles
    retry_s: tuple[float, float] = (1.0, 20.0)

    def __post_init__(self) -> None:
        _check_above_0(self, "stall_s", "for_s")
        if self.on_pressure not in (None, *(known := ("drop", "wait"))):
            raise ConfigError(
                f"on_pressure is {self.on_pressure!r}", hint=suggest_name(self.on_pressure, known)
            )

    def lost_after_s(self, kind: str) -> float:
        """Return the seconds without a frame after which a source of this kind is lost."""
        return self.stall_s or (inf if kind == PIPE else _STALL_S)

    def waits(self, kind: str) -> bool:
        """Return True if a source of this kind waits for the model, and False if its oldest frames
        are dropped.
        """
        return kind == PIPE if self.on_pressure is None else self.on_pressure == "wait"


@dataclass(frozen=True, slots=True)
class StandingQuestion:
    """A question that is asked again and again while a source is watched."""

    text: str
    every_s: float = 10.0  # asked where stream time passes a multiple of this
    # answer with the likeliest of these (`Session.choose`); empty: any text
    choices: tuple[str, ...] = ()
    on_change: bool = False  # an answer that equals the last one is no event, and is not kept
    evidence: bool = False  # say what each answer stood on
    # give answers of which at most this share is wrong, by the calibrations in a folder
    at_most_wrong: float | None = None
    calibrations: str = "calibrations"

    def __post_init__(self) -> None:
        _check_above_0(self, "every_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOptions:
    """Options to watch one source and keep its state. ConfigError if one is out of range, or two
    contradict.
    """

    # the memory of a new state, which one that goes on must have too; None: that of the state, or
    # the default
    config: MemoryConfig | None = None

    # The model: a loaded one, so that one process can ingest many sources, or a name or folder;
    # None: the model that the state names, or the default. How to load it is as for
    # `load_backbone`; None: as the state says.
    backbone: Backbone | str | None = None
    device: str = "auto"
    dtype: str | None = None
    device_map: str | None = None
    quantization: str | None = None
    revision: str | None = None
    frame_tokens: int | None = None
    # the system prompt, before the video; None: that of the state, or the model's own
    system: str | None = None

    # The source. A part of it is a different source from the whole; stream time begins with the
    # part.
    fps: float | None = None  # sampled frames per second; None: the model's default
    start_s: float = 0.0  # the time to begin at
    duration_s: float | None = None  # how much to watch; None: to its end
    decoder: Decoder = "auto"  # decoder of a file; see `open_source`
    max_frame_pixels: int | None = None  # the most that a frame of a file may have; None: 8K
    # a file beside the video, else a text track; or `off`, a file, or a language
    subtitles: str = "auto"

    # The state.
    # when to commit on the way; None: once a minute, every 5 seconds for a live source
    every: Every | None = None
    keep: int | None = None  # how many commits to keep, the last one included; None: only the last
    # add the source to a finished state, after its sources; start a state if there is none
    append: bool = False
    overwrite: bool = False  # ignore an existing state; the first commit replaces it
    # how many small pictures of the stream to keep for people; 0: none
    thumbnails: int = DEFAULT_THUMBNAILS

    # Steps that go through the model together (`Session.watch_prepared`), for files. Commits and
    # `IngestProgress` come after whole chunks. More than 1 is faster and gives another state, which
    # only the same chunk continues. None: 4 for a file, whose frames wait for nobody, 1 for a live
    # source, and that of a state that goes on.
    chunk: int | None = 1

    # Asked between steps, and answered as events; the state keeps the last answers.
    ask: tuple[StandingQuestion, ...] = ()

    # The end of the run, and a source that may wait or be lost. A `LiveSource` brings its own.
    live: LiveOptions = field(default_factory=LiveOptions)

    def __post_init__(self) -> None:
        if self.chunk is not None and not 1 <= self.chunk <= _MOST_STEPS:
            raise ConfigError(
                f"a chunk of {self.chunk} steps makes no sense", hint=f"use 1 to {_MOST_STEPS}"
            )
        if not 0 <= self.thumbnails <= MOST_THUMBNAILS:
            raise ConfigError(
                f"cannot keep {self.thumbnails} thumbnails", hint=f"use 0 to {MOST_THUMBNAILS}"
            )
        if self.fps is not None:
            check_sampled_fps(self.fps)
        if self.append and self.overwrite:
            raise ConfigError(
                "cannot append to a state and start it over", hint="leave one of the two out"
            )

    @property
    def placement(self) -> Keywords:
        """Keywords of `load_recorded_backbone` that say where and how the model is loaded."""
        names = ("device", "dtype", "device_map", "quantization", "revision")
        return {name: getattr(self, name) for name in names}

    @property
    def new_model(self) -> Keywords:
        """Keywords of `identify_backbone` for the model of a new state."""
        return self.placement | {
            "name": self.backbone or DEFAULT_MODEL,
            "dtype": self.dtype or "auto",
        }

    def load_model(self, state: StateHeader | None = None) -> Backbone:
        """Return the model of a new state, or the one to continue a state with; it is loaded unless
        it is given.

        Raises ModelError, or StateMismatch if it is not the state's.
        """
        if isinstance(self.backbone, Backbone):
            model = self.backbone
        elif state is None:
            model = load_backbone(**self.new_model, frame_tokens=self.frame_tokens)
        else:
            model = load_recorded_backbone(
                state, self.backbone, **self.placement, frame_tokens=self.frame_tokens
            )
        return model if state is not None or self.system is None else model.with_system(self.system)

    @property
    def memory(self) -> MemoryConfig:
        """The memory of a new state, before its words are known."""
        return self.config or DurableConfig()

    def config_for(self, subtitles: Subtitles) -> MemoryConfig:
        """Return the memory of a new state of a source with these subtitles."""
        return self.memory.with_words(True) if subtitles.has_lines else self.memory

    def cut_part(self, video: Source) -> Source:
        """Return the part of an open source that is to be watched; all of it by default. Raises as
        `SourceSlice`.
        """
        whole = not self.start_s and self.duration_s is None
        return video if whole else SourceSlice(video, self.start_s, self.duration_s)


class IngestSettings(TypedDict, total=False):
    """The fields of `IngestOptions` but `config` as keywords: an editor knows their types."""

    backbone: Backbone | str | None
    device: str
    dtype: str | None
    device_map: str | None
    quantization: str | None
    revision: str | None
    frame_tokens: int | None
    system: str | None
    fps: float | None
    start_s: float
    duration_s: float | None
    decoder: Decoder
    max_frame_pixels: int | None
    subtitles: str
    every: Every | None
    keep: int | None
    append: bool
    overwrite: bool
    thumbnails: int
    chunk: int | None
    ask: tuple[StandingQuestion, ...]
    live: LiveOptions
