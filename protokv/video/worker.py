"""The process that decodes: it reads a source and sends the wanted frames to the process that started it.

`protokv.video.isolated` starts it and may kill it at any time; it ends when that process does. Requests come as lines
of JSON on stdin. Answers go to stdout: the length of a JSON header, the header, and the bytes of one image. No
pickle passes between the two, so a compromised decoder can send only pictures, text and numbers.
While a frame takes long, the process sends a sign of life every second, between packets, so that a decoder that hangs
sends none.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import struct
import sys
import threading
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from protokv.errors import ProtoKVError
from protokv.video.sampling import thin
from protokv.video.source import Source

LENGTH = struct.Struct("<I")
ALIVE_S = 1.0

# Address space for a decoder: the interpreter and FFmpeg, and the frames that a stream may refer to.
BASE_BYTES, BYTES_PER_PIXEL = 2 << 30, 64


def serve(requests: queue.SimpleQueue[dict[str, Any]], out: BinaryIO) -> None:
    """Open the source that the first request names, then answer requests to read it until there are no more.

    A first request that names a file of subtitles is answered by its lines.
    """
    opening = requests.get()
    try:
        if "subtitles" in opening:
            from protokv.words.tracks import read_file

            _limit_memory(None)
            send(out, read_file(Path(opening["subtitles"]))._asdict())
            return
        module, name = opening.pop("opener").split(":")
        if opening["kwargs"].get("decoder") != "decord":
            _limit_memory(opening["kwargs"].get("max_pixels"))
        source: Source = getattr(import_module(module), name)(opening["source"], **opening["kwargs"])
        send(out, {"info": source.info.to_dict(), "texts": source.texts, "texts_come": source.texts_come})
        while True:
            request = requests.get()
            if "track" in request:
                send(out, source.lines(request["track"])._asdict())
            else:
                _read(source, request, out)
    except ProtoKVError as error:
        send(out, {"error": type(error).__name__, "message": error.message, "hint": error.hint})


class _Alive:
    """A `ShouldStop` that never stops, and sends a sign of life every second."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self.sent = out, time.monotonic()

    def __call__(self) -> bool:
        if time.monotonic() - self.sent > ALIVE_S:
            send(self._out, {})
            self.sent = time.monotonic()
        return False


def _read(source: Source, request: dict[str, Any], out: BinaryIO) -> None:
    alive = _Alive(out)
    frames = source.frames(
        request["start_s"], fps=request["fps"], from_beginning=request["from_beginning"], should_stop=alive
    )
    # A live source thins its frames itself: `thin` would hold a frame back until the next one comes.
    if request["fps"] is not None and source.info.seekable:
        frames = thin(frames, request["fps"])
    for frame in frames:
        image = frame.image
        header = {
            "time_s": frame.time_s,
            "duration_s": frame.duration_s,
            "decoder": frame.decoder,
            "shape": image.shape,
            "damage": asdict(source.damage),
            "new_lines": source.new_lines(),
        }
        send(out, header, image.reshape(-1).data)
        alive.sent = time.monotonic()
    send(out, {"end": True, "damage": asdict(source.damage), "new_lines": source.new_lines()})


def send(out: BinaryIO, header: dict[str, Any], payload: bytes | memoryview = b"") -> None:
    """Send one message."""
    data = json.dumps(header).encode()
    out.write(LENGTH.pack(len(data)) + data)
    if payload:
        out.write(payload)
    out.flush()


def _limit_memory(max_pixels: int | None) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    from protokv.video.container import MAX_PIXELS

    limit = BASE_BYTES + BYTES_PER_PIXEL * (max_pixels or MAX_PIXELS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _listen(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    # The parent is gone or done. The decoder may hang, so wait for nothing.
    os._exit(0)


def main() -> None:
    """Serve until stdin ends."""
    # Ctrl-C, a closed terminal and a stopped service are for the parent: it finishes its step and closes our stdin.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # libraries may print
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        serve(requests, out)
    os._exit(0)
