"""The records of the sources of a stream, in `StateHeader.source`: name, times and damage of each.

The record of a single source is a plain JSON object. After further sources it has three more
fields: `earlier`, the records of the sources before it, and `first_step` and `start_s`, where in
the stream it begins. The `fingerprint` of a record identifies the source; `is_same_stream` and
`is_earlier_state` compare states by it. The record of a live source has a `WallClockLog` as `live`.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import msgspec

from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt, escape_text
from protokv.state.header import StateHeader
from protokv.texts import JsonObject, JsonRecord

# The most gaps and anchors of a live source that are kept, the newest ones. A clock that was
# adjusted by less than `_STEADY_S` needs no new anchor.
_MOST = 64
_STEADY_S = 2.0

# Answers to standing questions that a state keeps, and the characters of an answer and of its
# question.
MOST_STANDING_ANSWERS = 64
MOST_ANSWER_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class VideoPlace:
    """Where a video file stands in a stream: its time `offset_s` is the stream time `start_s`."""

    name: str  # of the file, without a folder
    digest: str  # of its content
    start_s: float
    offset_s: float

    def video_time(self, stream_s: float) -> float:
        """Return the time in the file at a stream time, in seconds."""
        return stream_s - self.start_s + self.offset_s


def list_video_places(sources: Iterable[JsonRecord]) -> list[VideoPlace]:
    """Return the place of each source of a state, from `list_state_sources`. StateCorrupt."""
    places = []
    for one in sources:
        # The fingerprint of a part is that of the file, then @, where it begins, + and how long it
        # is; its name says the same.
        digest, _, part = str(one.get("fingerprint")).partition("@")
        name = PurePath(str(one.get("name")).rpartition(" from ")[0 if part else 2]).name
        try:
            times = [float(one.get("start_s") or 0.0), float(part.partition("+")[0] or 0.0)]
        except (TypeError, ValueError):
            times = [math.nan]
        if not all(map(math.isfinite, times)):
            raise StateCorrupt("source: where it stands in its video makes no sense")
        places.append(VideoPlace(name, digest, start_s=times[0], offset_s=times[1]))
    return places


def find_video_place(places: Sequence[VideoPlace], stream_s: float) -> VideoPlace | None:
    """Return the video that is seen at a stream time; None if the stream is one video from its
    beginning on, so that both have the same times.
    """
    if len(places) < 2 and not any(place.offset_s for place in places):
        return None
    return [one for one in places if one.start_s <= stream_s + 1e-6 or one is places[0]][-1]


def describe_video_times(places: Sequence[VideoPlace], **times_s: float) -> JsonObject:
    """Return the video of stream times, the first of which tells which one it is, and the times
    there under `video_` and their names, for JSON; nothing where these are the same.
    """
    place = find_video_place(places, next(iter(times_s.values())))
    if place is None:
        return {}
    found = {f"video_{name}": place.video_time(time_s) for name, time_s in times_s.items()}
    return {"video": place.name, **found}


def describe_spans(spans: Iterable[Any], places: Sequence[VideoPlace]) -> list[JsonObject]:
    """Return spans of an answer's evidence for JSON, with the times of the videos where these
    differ.
    """
    return [
        asdict(one) | describe_video_times(places, start_s=one.start_s, end_s=one.end_s)
        for one in spans
    ]


FOREIGN_NOTICE = (
    "the embedded model reads drawn shapes only, and this video is no such: its answers mean "
    "nothing. Watch it with another --model"
)


@dataclass(frozen=True, slots=True)
class StreamSegment:
    """The part of a stream that comes from one source."""

    first_step: int = 0  # its place in the stream
    start_s: float = 0.0  # stream time
    earlier: tuple[JsonObject, ...] = ()  # records of the sources before it, in order
    done: bool = False  # the stream has watched it to its end

    def record(self, source: JsonRecord) -> JsonObject:
        """Return the value of `StateHeader.source` while this source is watched."""
        place = {"first_step": self.first_step, "start_s": self.start_s, "earlier": [*self.earlier]}
        return {**source, **(place if self.earlier else {})}

    def list_videos(self, source: JsonRecord) -> list[VideoPlace]:
        """Return where the videos of the stream are, up to this source."""
        return list_video_places((*self.earlier, self.record(source)))


def read_last_segment(header: StateHeader) -> StreamSegment:
    """Return the segment of the last source of a state. StateCorrupt if its record makes no
    sense.
    """
    found: StreamSegment = _convert(
        {**(header.source or {}), "done": header.complete}, StreamSegment
    )
    return found


def make_next_segment(header: StateHeader) -> StreamSegment:
    """Return the segment of a source that follows everything a state has watched. Raises as
    `read_last_segment`.
    """
    before = read_last_segment(header)
    last = {
        name: value
        for name, value in (header.source or {}).items()
        if name not in ("earlier", "answers")
    }
    return StreamSegment(header.clock.steps, header.clock.stream_time_s, (*before.earlier, last))


def list_state_sources(header: StateHeader) -> tuple[JsonRecord, ...]:
    """Return the records of all sources of a state, in order. Raises as `read_last_segment`."""
    return (*read_last_segment(header).earlier, header.source or {})


def find_notice(header: StateHeader) -> str:
    """Return the notice for every answer of a state whose model cannot read its video: embedded
    models read drawn shapes alone. Empty for other states. Raises as `read_last_segment`.
    """
    sources = [one for one in list_state_sources(header) if one]
    # Clients push frames of their own, of which no record says that they are drawn.
    drawn = all(one.get("drawn") for one in sources)
    return "" if drawn else make_notice(header.backbone.name)


def make_notice(model: str) -> str:
    """Return the notice of an embedded model for a video that is not drawn; empty for others."""
    return FOREIGN_NOTICE if model.startswith("protokv/") else ""


def read_fingerprints(header: StateHeader) -> tuple[object, ...]:
    """Return the fingerprint of each source of a state, in order, None for none. Raises as
    `read_last_segment`.
    """
    return tuple(one.get("fingerprint") for one in list_state_sources(header))


def is_earlier_state(past: StateHeader, now: StateHeader) -> bool:
    """Return True if one state is an earlier moment of the stream of another. Raises as
    `read_last_segment`.
    """
    if past.clock.steps >= now.clock.steps or past.clock.stream_time_s >= now.clock.stream_time_s:
        return False
    return is_same_stream(past, now) and len(read_fingerprints(past)) <= len(read_fingerprints(now))


def is_same_stream(a: StateHeader, b: StateHeader) -> bool:
    """Return True if two states have the same model, settings and sources, as far as both have
    watched.

    A source without a fingerprint (a camera, frames from a program) equals no other. Raises as
    `read_last_segment`.
    """
    same = all(
        x is not None and x == y
        for x, y in zip(read_fingerprints(a), read_fingerprints(b), strict=False)
    )
    return same and _identity(a) == _identity(b)


def _identity(header: StateHeader) -> str:
    """Return the fields that never change within a stream, as JSON, where a list equals a tuple."""
    model = {**asdict(header.backbone), "name": None, "revision": None}  # a model may have moved
    return json.dumps(
        {"model": model, "memory": dict(header.memory), "fps": header.clock.fps}, sort_keys=True
    )


@dataclass(frozen=True, slots=True)
class _Record:
    name: str | None = None
    decoder: str | None = None
    decoders: dict[str, int] = field(default_factory=dict)
    start_s: float = 0.0
    duration_s: float | None = None
    damage: Any = None


def describe_state_sources(header: StateHeader) -> list[JsonObject]:
    """Return a plain JSON record of each source, in order.

    Each has `name`, `decoder`, `decoders` (frames from each), `start_s` and `end_s` (stream time),
    `complete` (watched to its end) and `damage`: None, or `message`, `frames_lost`,
    `frames_damaged` and `lost_from_s` (source time).
    """
    # A question needs no video.
    from protokv.video import SourceDamage

    records = _convert(list_state_sources(header), tuple[_Record, ...])
    found = []
    for record, after in zip(records, (*records[1:], None), strict=True):
        end_s = header.clock.stream_time_s if after is None else after.start_s
        ended = header.complete or bool(after)
        if ended:
            end_s = clip_source_end(end_s, record.start_s, record.duration_s, header.clock)
        damage = SourceDamage.from_dict(record.damage)
        row = asdict(record) | {
            "end_s": end_s,
            "complete": ended,
            "damage": None if damage.ok else asdict(damage),
        }
        del row["duration_s"]
        found.append(row)
    return found


def clip_source_end(
    reached_s: float, start_s: float, duration_s: float | None, clock: StreamClock
) -> float:
    """Return the stream time at which a source ended. Its last step reaches to `reached_s`, which
    may be later.
    """
    if duration_s is None or not reached_s - clock.step_seconds < start_s + duration_s < reached_s:
        return reached_s
    return start_s + duration_s


def _convert(value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise StateCorrupt(f"source: {escape_text(error)}") from None


@dataclass(frozen=True, slots=True)
class StandingAnswer:
    """An answer to a standing question, as the record of the last source keeps it."""

    question: str
    answer: str
    stream_time_s: float  # at which it was asked
    mean_logprob: float  # mean log probability of its tokens
    probability: float | None = None  # its probability among the choices; None: there were none


def read_standing_answers(header: StateHeader) -> list[StandingAnswer]:
    """Return the last answers to standing questions, oldest first. StateCorrupt if the record makes
    no sense.
    """
    return list(_convert((header.source or {}).get("answers", []), list[StandingAnswer]))


def describe_standing_answers(header: StateHeader) -> list[JsonObject]:
    """Return the last answers as plain JSON, with the times of the video where these differ. Raises
    as `read_standing_answers`.
    """
    places = list_video_places(list_state_sources(header))
    return [
        asdict(one) | describe_video_times(places, time_s=one.stream_time_s)
        for one in read_standing_answers(header)
    ]


@dataclass(frozen=True, slots=True)
class StreamGap:
    """The source was lost from stream time `from_s` to `to_s` (None: it still is); `why` in a few
    words.
    """

    from_s: float
    to_s: float | None
    why: str


@dataclass(slots=True)
class WallClockLog:
    """When a live stream began, what it missed, and which stream time was which time of day;
    bounded.

    Stream times are seconds of the whole stream, real times are seconds since 1970 in UTC.
    """

    # another stream of the same camera has another
    stream: str = field(default_factory=lambda: uuid.uuid4().hex)
    # Pairs of stream time and real time, which run at one rate from each pair to the next. The
    # first pair is the beginning.
    anchors: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[StreamGap] = field(default_factory=list)  # the newest, oldest first
    gaps_in_all: int = 0
    lost_s: float = 0.0  # the length of all gaps
    frames_dropped: int = 0  # sampled frames that the model had no time for
    frames_damaged: int = 0  # frames that could not be decoded, or are damaged
    committed_at: float = 0.0  # real time of this commit

    def add_anchor(self, stream_s: float, real_s: float) -> bool:
        """Note the real time at a stream time; keep it, and return True, if it does not follow from
        the anchors.
        """
        if self.anchors and abs(self.real_time(stream_s) - real_s) <= _STEADY_S:
            return False
        del self.anchors[1 : max(1, len(self.anchors) - _MOST + 2)]
        self.anchors.append((stream_s, real_s))
        return True

    def begin_gap(self, from_s: float, why: str) -> None:
        """Begin a gap, unless the source is lost already."""
        if not self.lost:
            self.gaps = [
                *self.gaps[1 - _MOST :],
                StreamGap(from_s, None, " ".join(why.split())[:200]),
            ]
            self.gaps_in_all += 1

    def end_gap(self, to_s: float) -> StreamGap | None:
        """End the gap and return it; None if there was none."""
        if not self.lost:
            return None
        self.gaps[-1] = gap = replace(self.gaps[-1], to_s=max(to_s, self.gaps[-1].from_s))
        self.lost_s += to_s - gap.from_s
        return gap

    @property
    def lost(self) -> bool:
        """True while the source is lost."""
        return bool(self.gaps) and self.gaps[-1].to_s is None

    def real_time(self, stream_s: float) -> float:
        """Return the real time at a stream time, by the last anchor before it."""
        known = [one for one in self.anchors if one[0] <= stream_s] or self.anchors[:1]
        return known[-1][1] + stream_s - known[-1][0]

    def stream_time(self, real_s: float) -> float:
        """Return the stream time at a real time; minus infinity before the beginning."""
        until_s = math.inf
        ahead_s = 0.0
        for stream_s, since_s in reversed(self.anchors):
            if since_s <= real_s:
                # A clock that was set ahead never showed the rest of the real time between two
                # anchors: count from the next anchor back.
                at_s = stream_s + real_s - since_s
                return at_s if at_s < until_s else max(stream_s, real_s + ahead_s)
            until_s = stream_s
            ahead_s = stream_s - since_s
        # After a clock was set back: count from the next anchor back to a time between two anchors.
        for (from_s, _), (stream_s, since_s) in pairwise(self.anchors):
            if (at_s := stream_s - since_s + real_s) >= from_s:
                return at_s
        return -math.inf

    def describe(self) -> JsonObject:
        """Describe the log for people, with real times as dates in UTC."""

        def date(real_s: float) -> str:
            return datetime.fromtimestamp(real_s, UTC).isoformat(timespec="seconds")

        counts = {
            name: getattr(self, name)
            for name in ("gaps_in_all", "lost_s", "frames_dropped", "frames_damaged")
        }
        gaps = [{"from": date(self.real_time(one.from_s)), **asdict(one)} for one in self.gaps]
        dates = {"began": date(self.anchors[0][1]), "committed": date(self.committed_at)}
        return {**dates, "lost": self.lost, **counts, "gaps": gaps}

    @classmethod
    def read(cls, source: JsonRecord | None) -> WallClockLog | None:
        """Return the log in the record of a source; None if it was not live. StateCorrupt if it
        makes no sense.
        """
        if (record := (source or {}).get("live")) is None:
            return None
        try:
            found = msgspec.convert(record, cls)
            found.describe()
        except (msgspec.ValidationError, LookupError, ValueError, OverflowError) as error:
            raise StateCorrupt("source.live: it makes no sense") from error
        return found
