"""The handle of a decoding process (`protokv.video.worker`): starting it, asking it, taking its messages, ending it.

A thread takes messages from the pipe, so that a waiting reader can be told to stop and a process that hangs is found
out, on every platform. Knows nothing of sources.
"""

from __future__ import annotations

import contextlib
import io
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from protokv import errors
from protokv.errors import SourceError, SourceUnreadable
from protokv.video.source import Image, ShouldStop
from protokv.video.worker import LENGTH

# Messages that wait to be taken: so many frames are decoded ahead.
AHEAD = 4

# How often a waiting reader asks whether to stop.
ASK_S = 0.1

Message = tuple[dict[str, Any], Image | None]


class Dead(Exception):
    """The process died or hangs; the message says which."""


class Stopped(Exception):
    """The caller asked to stop."""


def start_process(descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """`protokv.video.worker`, with pipes for requests and messages, that inherits these descriptors too."""
    # Found where this package was found; behind everything else, so that it shadows nothing.
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


class Worker:
    """The process, and a thread that takes its messages from the pipe."""

    def __init__(self, descriptors: tuple[int, ...] = ()) -> None:
        self.process = start_process(descriptors)
        self.busy = False
        self._heard = time.monotonic()
        self._messages: queue.Queue[Message | None] = queue.Queue(AHEAD)
        self._ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request; `take` gets its answers."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # a process that died is found out by who waits for its answer
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def take(self, stall_s: float, should_stop: ShouldStop) -> Message:
        """The next message that says something. Stopped; Dead; the error that the process sent."""
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
        """Kill the process, whatever it does. May be called more than once."""
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
                continue  # no more than a sign of life
            while not self._ended.is_set():
                with contextlib.suppress(queue.Full):
                    self._messages.put(message, timeout=ASK_S)
                    break


def receive(pipe: io.BufferedReader) -> Message | None:
    """One message; None at the end of the pipe."""
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
