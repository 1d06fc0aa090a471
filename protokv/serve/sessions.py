"""Sessions that clients feed with frames: each is a state of the folder, held in memory while
somebody feeds it.

The routes are those of vLLM's proposal (https://github.com/vllm-project/vllm/pull/53879). A session
answers under its name, as a state does, and knows what it has seen until then. It is committed on
the way, and put away when it is closed or not fed; who opens the name again goes on with it.
Conversations with pictures are sessions without a name and a state: they take the places that are
left.
"""

from __future__ import annotations

import io
import logging
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from starlette.exceptions import HTTPException

from protokv.errors import ConfigError, StateMismatch, escape_text
from protokv.ingestion.options import EVERY_MINUTE, IngestOptions
from protokv.ingestion.watching import limit_thumbnails
from protokv.serve.conversations import ChatMessage, Conversation, find_conversation
from protokv.serve.states import StateFolder, name_model
from protokv.state.reader import StateReader
from protokv.state.sources import WallClockLog
from protokv.state.store import StateStore, find_store
from protokv.state.thumbnails import make_thumbnail
from protokv.stream.opening import open_session
from protokv.stream.pushed import STREAM_GAP_S, convert_picture_to_rgb
from protokv.stream.seeing import StepsToWatch, watch_together
from protokv.stream.session import Session
from protokv.stream.taking import MOST_STREAMS
from protokv.texts import JsonObject

PushedFrame = Generator[StepsToWatch, None, JsonObject]
"""Yields the step that a frame completes, which is then watched; returns the reply."""

_KIND = "pushed"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z"  # of a session: letters, digits, - and _
# Times count from the beginning of a stream. Seconds since 1970 would be a silence of decades.
_LONGEST_SILENCE_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class FedSessionLimits:
    """The limits of sessions."""

    most: int = 8  # sessions at once
    frame_bytes: int = 8 << 20  # most bytes of a file
    frame_pixels: int = 8192 * 4352
    # without a frame, until a session is put away or a conversation forgotten
    idle_s: float = 300.0


class _SessionRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a client asks for: a name (None: a new one), sampled frames a second, and a system
    prompt.
    """

    name: Annotated[str, msgspec.Meta(pattern=_NAME)] | None = None
    fps: Annotated[float, msgspec.Meta(gt=0)] | None = None
    system_prompt: str | None = None


def parse_session_request(body: bytes) -> _SessionRequest:
    """Return the request in a body. ConfigError."""
    try:
        return msgspec.json.decode(body or b"{}", type=_SessionRequest)
    except (msgspec.MsgspecError, ValueError) as error:
        what = "a session takes name, fps and system_prompt, and is asked at /v1/chat/completions"
        raise ConfigError(f"{escape_text(error, 160)}; {what}") from None


def decode_uploaded_frame(file: bytes, most_pixels: int) -> Any:
    """Return the picture `[h, w, 3]` uint8 RGB of a JPEG, WebP or PNG file, turned by its EXIF.
    ConfigError; HTTPException, 413.
    """
    try:
        with Image.open(io.BytesIO(file), formats=("JPEG", "WEBP", "PNG")) as image:
            if image.width * image.height > most_pixels:
                raise HTTPException(413, f"a frame has at most {most_pixels:,} pixels")
            shown = ImageOps.exif_transpose(image)
            if shown.mode.startswith("I"):
                # Pillow cuts gray of 16 bits off at 255.
                shown = Image.fromarray((np.asarray(shown) >> 8).astype(np.uint8))
            return convert_picture_to_rgb(shown)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow names an object in memory where it knows no format.
        why = "" if isinstance(error, UnidentifiedImageError) else f": {escape_text(error)}"
        raise ConfigError(f"the frame is no whole JPEG, WebP or PNG{why}") from None


class _FedSession:
    """A session while it is fed. `busy`: a frame of it is on its way; `held`: the right to write
    its state.
    """

    busy = False
    frames = 0
    held = ExitStack()

    def __init__(
        self,
        path: Path,
        store: StateStore,
        session: Session,
        log: WallClockLog,
        options: IngestOptions,
    ) -> None:
        self.path = path
        self.session = session
        self._store = store
        self._log = log
        self._pictures = limit_thumbnails(session, options.thumbnails)
        self._every = options.every or EVERY_MINUTE
        self._time_s = session.clock.stream_time_s
        self._saved = session.clock
        self._fed_s = self._saved_s = time.monotonic()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Admit a frame, which is on its way inside the block. HTTPException, 409: another is."""
        if self.busy:
            raise HTTPException(
                409, "a frame of this session is on its way; send the next one after its reply"
            )
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def push(self, image: Any, time_s: float | None) -> PushedFrame:
        """Take a frame at a stream time, by default that of the clock; return the reply. The caller
        watches the step that it completes. ConfigError, StateError.
        """
        began_s = time.monotonic()
        now_s = time.time()
        clock = self.session.clock
        if time_s is None:
            time_s = max(self._log.stream_time(now_s), self._time_s)
        if time_s > self._time_s + _LONGEST_SILENCE_S:
            raise ConfigError("time_s counts seconds from the beginning of the session")
        step = self.session.begin_push(image, time_s)
        if step is not None:
            yield step
            if step.error is not None:
                raise step.error
        if time_s - self._time_s > STREAM_GAP_S:
            self._log.begin_gap(self._time_s, "no frames came")
        self._log.end_gap(time_s)
        self._log.add_anchor(time_s, now_s)
        if step and self._pictures is not None:
            shown_s = self.session.clock.stream_time_s - clock.step_seconds
            self._pictures.add(clock.steps, shown_s, make_thumbnail(image))
        self._time_s = time_s
        self.frames += 1
        self._fed_s = time.monotonic()
        clock = self.session.clock
        saved = self._saved
        passed_s = self._fed_s - self._saved_s
        steps = clock.steps - saved.steps
        if steps and self._every.is_due(steps, clock.stream_time_s - saved.stream_time_s, passed_s):
            self.commit()
        return {
            "frame_index": self.frames - 1,
            "stream_time_s": time_s,
            "steps": clock.steps,
            "watched": step is not None,
            # Answers come at /v1/chat/completions; the protocol wants a text here.
            "text": "",
            "latency_s": time.monotonic() - began_s,
        }

    def show(self, image: Any) -> None:
        """Watch a picture as a whole step at its time of arrival, behind what was watched. Raises
        as `push`.
        """
        clock = self.session.clock
        time_s = max(self._log.stream_time(time.time()), self._time_s, clock.stream_time_s)
        for index in range(clock.frames_per_step):
            for step in self.push(image, time_s + index / clock.fps):
                watch_together([step])

    def is_idle(self, idle_s: float) -> bool:
        """Return True if nobody has fed it for so long."""
        return not self.busy and time.monotonic() > self._fed_s + idle_s

    def commit(self, *, complete: bool = False) -> None:
        """Write the state. StateError."""
        self._log.committed_at = time.time()
        log = {"fingerprint": self._log.stream, "live": asdict(self._log)}
        source = {"name": self.path.stem, "kind": _KIND, "decoder": "pil", **log}
        self._store.commit(self.session.make_state(source=source, complete=complete))
        self._saved = self.session.clock
        self._saved_s = time.monotonic()


class _DueFrame:
    """A frame that waits to be watched, and the reply to who sent it."""

    def __init__(self, pushing: PushedFrame) -> None:
        self.reply = Future[JsonObject]()
        self._pushing = pushing

    def go_on(self) -> list[StepsToWatch]:
        """Return the step that is to be watched now; if there is none, the reply is there."""
        try:
            return [next(self._pushing)]
        except StopIteration as end:
            self.reply.set_result(end.value)
        except Exception as error:
            self.reply.set_exception(error)
        return []


class FedSessions:
    """The sessions that are fed. `find` and `add` are for any thread, and the rest for who has the
    `lock` of the states.
    """

    def __init__(
        self, states: StateFolder, options: IngestOptions, limits: FedSessionLimits | None = None
    ) -> None:
        """Begin without any; they will be in the folder of `states`.

        Of `options` the memory, `every`, `keep` and `thumbnails` count, and for new sessions `fps`
        and `system`. Raises as `StateFolder.let_watch`.
        """
        states.let_watch()
        self._states = states
        self._options = options
        self.limits = limits or FedSessionLimits()
        self._fed = dict[str, _FedSession]()
        self._due = dict[_FedSession, _DueFrame]()
        self._conversations: list[Conversation] = []

    def find(self, name: str) -> _FedSession:
        """Return the session of a name. HTTPException, 404."""
        if (found := self._fed.get(name)) is None:
            raise HTTPException(
                404, "no such session is fed; POST /v1/streaming/sessions with its name goes on"
            )
        return found

    def open(self, asked: _SessionRequest) -> JsonObject:
        """Begin a session, or go on with the state of its name; return the reply.

        HTTPException: it is fed already, or there are too many. ConfigError: it cannot be as asked.
        StateError.
        """
        name = asked.name or f"sess-{uuid.uuid4().hex[:12]}"
        if name in self._fed:
            raise HTTPException(409, "this session is fed already")
        self._make_room()
        path = self._states.folder / f"{name}.safetensors"
        known = os.path.lexists(path)
        if known and not self._states.holds(path):
            raise HTTPException(409, "something that is no state has this name")
        with ExitStack() as held:
            store = held.enter_context(find_store(path, keep=self._options.keep))
            session, log = self._resume(path) if known else self._start(asked)
            fed = _FedSession(path, store, session, log, self._options)
            fed.commit()
            fed.held = held.pop_all()
            self._fed[name], self._states.fed[path] = fed, session
        clock = session.clock
        return {
            "session_id": name,
            "model": name_model(session.backbone.identity),
            "fps": clock.fps,
            "stream_time_s": clock.stream_time_s,
        }

    def _make_room(self) -> None:
        """Let conversations go until there is a place for one more session: first the oldest one of
        a single request. HTTPException, 503: all are fed.
        """
        most = self.limits.most
        if len(self._fed) >= most:
            raise HTTPException(
                503, f"{most} sessions are fed already; close one, or come again later"
            )
        while len(self._fed) + len(self._conversations) >= most:
            oldest = min(self._conversations, key=lambda one: (one.grown, one.used_s))
            self._conversations.remove(oldest)

    def converse(
        self, key: bytes, messages: Sequence[ChatMessage], stop: Callable[[], bool]
    ) -> Session:
        """Return who answers for a conversation that has seen all pictures of a request: the one
        that goes on, or a new one.

        `key` tells clients apart. HTTPException: it was told to stop, a picture is too large, or
        there is no place. ConfigError: a picture is none. Raises as `StateFolder.show`, too.
        """
        found, known = find_conversation(self._conversations, key, messages)
        if found is None:
            self._make_room()
            found = Conversation(key, self._start(_SessionRequest())[0])
            self._conversations.append(found)
        else:
            found.grown = True

        try:
            for message in messages[known:]:
                found.take(message, partial(self._decode, stop))
        finally:
            found.used_s = time.monotonic()
            if not found.session.intact:
                self._conversations.remove(found)
        return self._states.show(found.session)

    def show(self, name: str, files: Sequence[bytes], stop: Callable[[], bool]) -> Session:
        """Return who answers for the session of a name after some pictures; it goes on if nobody
        feeds it. Raises as `open` and `converse`.
        """
        if name not in self._fed:
            self.open(_SessionRequest(name))
        fed = self._fed[name]
        try:
            for file in files:
                fed.show(self._decode(stop, file))
        finally:
            if not fed.session.intact:
                self._drop(name)
        return self._states.show(fed.session)

    def _decode(self, stop: Callable[[], bool], file: bytes) -> Any:
        if stop():
            raise HTTPException(503, "the client has left, or the time for an answer is over")
        if len(file) > self.limits.frame_bytes:
            raise HTTPException(413, f"a frame has at most {self.limits.frame_bytes:,} bytes")
        return decode_uploaded_frame(file, self.limits.frame_pixels)

    def _start(self, asked: _SessionRequest) -> tuple[Session, WallClockLog]:
        backbone = self._states.backbone
        system = asked.system_prompt or self._options.system
        backbone = backbone if system is None else backbone.with_system(system)
        session = Session.start(backbone, self._options.memory, fps=asked.fps or self._options.fps)
        return session, WallClockLog(anchors=[(0.0, time.time())])

    def _resume(self, path: Path) -> tuple[Session, WallClockLog]:
        reader = StateReader.open(path)
        log = WallClockLog.read(reader.header.source)
        if log is None or (reader.header.source or {}).get("kind") != _KIND:
            raise StateMismatch(
                "the state of this name is not of a session", hint="choose another name"
            )
        session = open_session(reader, self._states.backbone)
        log.begin_gap(session.clock.stream_time_s, "nobody watched")
        return session, log

    def add(self, fed: _FedSession, pushing: PushedFrame) -> Future[JsonObject]:
        """Let a frame of a session, as `push` takes it, wait for `push_due`; return its reply."""
        one = self._due[fed] = _DueFrame(pushing)
        return one.reply

    def push_due(self) -> None:
        """Watch frames that wait, at most `MOST_STREAMS`, together: one of each session."""
        due = [self._due.pop(fed) for fed in list(self._due)[:MOST_STREAMS]]
        watch_together([step for one in due for step in one.go_on()])
        for one in due:
            if not one.reply.done():
                one.go_on()

    def push(self, name: str, fed: _FedSession, image: Any, time_s: float | None) -> PushedFrame:
        """Take a frame; return the reply. Raises as `find` and `_FedSession.push`."""
        if self.find(name) is not fed:
            raise HTTPException(409, "this session was put away meanwhile")
        try:
            return (yield from fed.push(image, time_s))
        finally:
            if not fed.session.intact:
                self._drop(name)

    def close(self, name: str, *, complete: bool = True) -> JsonObject:
        """Commit a session and put it away; return the reply. StateError: it is still there."""
        fed = self.find(name)
        fed.commit(complete=complete)
        self._drop(name)
        return {"session_id": name, "frames": fed.frames, "closed": True}

    def put_away(self, *, every_one: bool = False) -> None:
        """Commit and put away what is over, or every one; forget conversations that are over."""
        least_s = time.monotonic() - self.limits.idle_s
        self._conversations = [one for one in self._conversations if one.used_s >= least_s]
        for name in [
            name for name, one in self._fed.items() if every_one or one.is_idle(self.limits.idle_s)
        ]:
            try:
                self.close(name, complete=False)
            except Exception:
                logging.getLogger("protokv.serve").exception("a session cannot be written")
        if every_one:
            # A server that is told to end leaves no time for what Python does at its exit.
            self._states.end_watch()

    def _drop(self, name: str) -> None:
        gone = self._fed.pop(name)
        del self._states.fed[gone.path]
        gone.held.close()
