"""Read a source in a process of its own: `IsolatedSource` here, `protokv.video.worker` in that process.

A decoder that crashes, hangs or takes too much memory takes only that process with it; frames that it did not give are
damage. A waiting reader can be told to stop. The process decodes a few frames ahead, in order, the same as without it.
Starting it costs about a third of a second.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from protokv import errors
from protokv.errors import SourceError, SourceUnreadable
from protokv.video.address import PIPE, duplicate, kind_of, shown
from protokv.video.source import (
    Damage,
    Frame,
    Image,
    Line,
    Lines,
    ShouldStop,
    Source,
    SourceInfo,
    TextTrack,
    Wanted,
    never,
)
from protokv.video.worker import LENGTH

# A decoder that sends nothing for this long hangs.
STALL_S = 30.0

# Reading a text track gives none while it reads through a long file.
TEXTS_S = 600.0

# Messages that wait to be taken: this many frames are decoded ahead.
WAITING = 4

# A waiting reader asks again after this many seconds whether to stop.
ASK_S = 0.1

Message = tuple[dict[str, Any], Image | None]


class IsolatedSource(Source):
    """Read a source in a process of its own. See `Source` for the contract.

    If `fps` is given, only frames shown at multiples of `1 / fps` pass between the processes.

    Args:
        source: the source's text.
        opener: `module:function` that opens it there, called with `source` and `kwargs`.
        stall_s: seconds without a sign of life after which the process is ended.
        should_stop: asked while waiting for the source to open; once it returns True, opening is given up.
        kwargs: plain JSON.

    Raises:
        SourceError: as the opener; SourceUnreadable if opening made the process die or hang.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        opener: str = "protokv.video.registry:open_source",
        stall_s: float = STALL_S,
        should_stop: ShouldStop = never,
        **kwargs: Any,
    ) -> None:
        self._source = os.fspath(source)
        self._piped: int | None = None
        if kind_of(self._source) == PIPE:
            # Stdin of the process is for requests, so our pipe needs a number of its own.
            self._piped = duplicate(self._source)
        inherited = self._source if self._piped is None else f"{PIPE}:{self._piped}"
        self._opening = {"source": inherited, "opener": opener, "kwargs": kwargs}
        self._stall_s = stall_s
        self._damage = Damage()
        self._new_lines: deque[tuple[int, Line]] = deque()
        self._worker, self.info = self._start(should_stop)

    @property
    def damage(self) -> Damage:
        """See `Source`."""
        return self._damage

    def close(self) -> None:
        """End any reading, and the process."""
        super().close()
        self._worker.end()
        if self._piped is not None:
            with contextlib.suppress(OSError):
                os.close(self._piped)
            self._piped = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._worker.end()

    def _start(self, should_stop: ShouldStop = never) -> tuple[Worker, SourceInfo]:
        worker = Worker(() if self._piped is None else (self._piped,))
        worker.ask(self._opening)
        try:
            header, _ = worker.take(self._stall_s, should_stop)
            self.texts = tuple(TextTrack(*one) for one in header["texts"])
            self.texts_come = header["texts_come"]
            return worker, SourceInfo(**header["info"])
        except Dead as dead:
            raise SourceUnreadable(
                f"{shown(self._source)} cannot be opened: {dead}", hint="it is damaged, or made to do harm"
            ) from None
        except Stopped:
            worker.end()
            raise SourceUnreadable(f"{shown(self._source)} was not waited for") from None
        except BaseException:
            worker.end()
            raise

    def lines(self, number: int) -> Lines:
        """See `Source`."""
        self._worker.ask({"track": number})
        try:
            return _lines(self._worker.take(TEXTS_S, never))
        except Dead as dead:
            self._worker.busy = True  # the next reading starts another process
            raise SourceUnreadable(f"{self.info.name}: its text track {number} cannot be read: {dead}") from None

    def new_lines(self) -> Sequence[tuple[int, Line]]:
        """See `Source`."""
        # Another thread may read on meanwhile.
        return [self._new_lines.popleft() for _ in range(len(self._new_lines))]

    def _read(self, wanted: Wanted) -> Iterator[Frame]:
        if self._worker.busy:
            self._worker.end()
            self._worker, _ = self._start()
        worker = self._worker
        worker.busy, self._damage = True, Damage()
        self._new_lines.clear()
        worker.ask({"start_s": wanted.start_s, "fps": wanted.fps, "from_beginning": wanted.from_beginning})
        at_s: float | None = None
        while True:
            try:
                header, image = worker.take(self._stall_s, wanted.should_stop)
            except Stopped:
                worker.end()
                return
            except Dead as dead:
                if at_s is None and wanted.start_s <= 0:
                    raise SourceUnreadable(f"{self.info.name} cannot be read: {dead}") from None
                self._damage = _cut_short(self._damage, self.info, at_s or wanted.start_s, str(dead))
                return
            self._damage = Damage(**header["damage"])
            self._new_lines.extend((number, Line(*line)) for number, line in header["new_lines"])
            if image is None:
                worker.busy = False
                return
            at_s = header["time_s"]
            yield Frame(header["time_s"], image, header["duration_s"], header["decoder"])
            if worker is not self._worker:
                return  # another reading has begun


def read_subtitles(path: str | os.PathLike[str]) -> Lines:
    """Read a file of subtitles in a process of its own. Raises as `protokv.words.tracks.read_file`."""
    worker = Worker()
    worker.ask({"subtitles": os.fspath(path)})
    try:
        return _lines(worker.take(STALL_S, never))
    except Dead as dead:
        raise SourceUnreadable(f"{path} cannot be read: {dead}") from None
    finally:
        worker.end()


def _lines(message: Message) -> Lines:
    header = message[0]
    return Lines(tuple(Line(*one) for one in header["lines"]), header["lost"])


def _cut_short(damage: Damage, info: SourceInfo, at_s: float, why: str) -> Damage:
    """Add the rest of the source to the damage of a reading that ended after `at_s` with its decoder."""
    rest_s = (info.duration_s or 0.0) - at_s
    lost = max(1, round(rest_s * (info.rate_fps or 1.0)))
    message = f"{damage.message + '; ' if damage.message else ''}{why} after {at_s:.2f} s, and the rest was not read"
    from_s = at_s if damage.lost_from_s is None else damage.lost_from_s
    return replace(damage, frames_lost=damage.frames_lost + lost, lost_from_s=from_s, message=message)


class Dead(Exception):
    """The process died or hangs; the message says which."""


class Stopped(Exception):
    """The caller asked to stop."""


class Worker:
    """The process, and a thread that takes its messages from the pipe.

    With the thread, a waiting reader can be told to stop and a process that hangs is found out, on every platform.
    """

    def __init__(self, descriptors: tuple[int, ...] = ()) -> None:
        self.process = start_process(descriptors)
        self.busy = False
        self._heard = time.monotonic()
        self._messages: queue.Queue[Message | None] = queue.Queue(WAITING)
        self._ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request; `take` gives its answers."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # `take` finds out that the process died
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def take(self, stall_s: float, should_stop: ShouldStop) -> Message:
        """Return the next message that is more than a sign of life.

        Raises:
            Stopped: `should_stop` returned True.
            Dead: the process died, or sent nothing for `stall_s`.
            SourceError: as the process sent it.
        """
        asked = time.monotonic()
        while True:
            if should_stop():
                raise Stopped
            try:
                message = self._messages.get(timeout=ASK_S)
            except queue.Empty:
                if time.monotonic() - max(asked, self._heard) > stall_s:
                    self.end()
                    raise Dead(f"the decoder gave no sign of life for {stall_s:g} s") from None
                continue
            if message is None:
                code = self.process.wait()
                self.end()
                raise Dead(f"the decoder died ({f'signal {-code}' if code < 0 else f'code {code}'})")
            if "error" in message[0]:
                self.end()
                kind = getattr(errors, message[0]["error"], SourceError)
                raise kind(message[0]["message"], hint=message[0]["hint"])
            return message

    def end(self) -> None:
        """Kill the process. May be called more than once."""
        self._ended.set()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError, ValueError):
                pipe.close()

    def _listen(self) -> None:
        pipe = self.process.stdout
        assert isinstance(pipe, io.BufferedReader)
        message: Message | None = ({}, None)
        while message is not None and not self._ended.is_set():
            try:
                message = receive(pipe)
            except (OSError, ValueError, KeyError, TypeError):
                message = None
            self._heard = time.monotonic()
            if message is not None and not message[0]:
                continue  # only a sign of life
            while not self._ended.is_set():
                with contextlib.suppress(queue.Full):
                    self._messages.put(message, timeout=ASK_S)
                    break


def start_process(descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start `protokv.video.worker`, with pipes for requests and messages, which inherits these descriptors too."""
    # Import the same package there; at the end of the path, so that its folder shadows nothing.
    home = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({home!r}); from protokv.video.worker import main; main()"
    try:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process alone
            pass_fds=descriptors,
        )
    except OSError as error:
        raise SourceUnreadable(
            f"no process can be started to decode in: {error.strerror or error}",
            hint="open the source with open_source, which decodes in this process, and hand it to ingest",
        ) from error


def receive(pipe: io.BufferedReader) -> Message | None:
    """Read one message; None at the end of the pipe."""
    length = pipe.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    header = json.loads(pipe.read(LENGTH.unpack(length)[0]))
    if "shape" not in header:
        return header, None
    image = np.empty(header["shape"], np.uint8)
    whole = image.reshape(-1).data
    got = 0
    while got < image.size:
        n = pipe.readinto(whole[got:])
        if not n:
            return None
        got += n
    return header, image
