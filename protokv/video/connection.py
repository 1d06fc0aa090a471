"""Connect to a stream with PyAV: a network address, a device, or a pipe.

FFmpeg may speak only the protocols of the kind of address, so a playlist or a session description cannot name a file of
this machine; pipes are held to the formats of files. A user's own options go to FFmpeg unchanged. Errors show the
address without its secrets. A pipe cannot seek, so `PipeReader.check` refuses an MP4 whose index comes after its
pictures.
"""

from __future__ import annotations

import errno
import math
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import av

from protokv.errors import ConfigError, ProtoKVError, SourceDenied, SourceNotFound, SourceUnreadable
from protokv.video import address
from protokv.video.container import FORMATS, choose_stream, explain_error, limit_decoder
from protokv.video.source import ShouldStop

_WEB = "http,https,httpproxy,tcp,tls,crypto,data"
_RTSP = "rtsp,rtp,tcp,udp,tls,srtp,http,https,httpproxy"

# What an address may give besides the formats of files; WebVTT is the subtitles of HLS.
_STREAMED = ",".join(sorted(FORMATS | {"hls", "dash", "rtsp", "rtp", "sdp", "webvtt"}))


class StreamKind(NamedTuple):
    """Options to open one kind of address."""

    protocols: str  # that FFmpeg may speak
    format: str | None = None  # FFmpeg's input format, where the address does not say it
    options: Mapping[str, str] = {}  # of that format or protocol; never changed
    slack_s: float = 2.0  # how far a frame's time stamp may be from its arrival (`ArrivalClock`)


KINDS = {
    # UDP loses packets, and a lost packet is a broken picture until the next key frame.
    "rtsp": StreamKind(_RTSP, options={"rtsp_transport": "tcp"}),
    "rtsps": StreamKind(_RTSP, options={"rtsp_transport": "tcp"}),
    "rtmp": StreamKind("rtmp,rtmps,rtmpt,rtmpe,tcp,tls,http,https,httpproxy"),
    "rtmps": StreamKind("rtmp,rtmps,tcp,tls,http,https,httpproxy"),
    "http": StreamKind(_WEB),
    "https": StreamKind(_WEB),
    "udp": StreamKind("udp", options={"overrun_nonfatal": "1"}),
    "rtp": StreamKind("rtp,udp"),
    "srt": StreamKind("srt,udp"),
    "tcp": StreamKind("tcp"),
    # Devices stamp with a clock of this machine; nothing lies between them and it.
    "v4l2": StreamKind("file", "video4linux2", slack_s=0.5),
    "avfoundation": StreamKind("file", "avfoundation", slack_s=0.5),
    "dshow": StreamKind("file", "dshow", slack_s=0.5),
    "screen": StreamKind("file", "x11grab", {"framerate": "10"}, slack_s=0.5),
}

HINT = "check the address, and that the source is running"
HINTS = {
    "screen": "set DISPLAY, or name it: screen::1; Wayland's screens are not read",
    "rtp": "where there is an SDP, pipe it in: "
    "ffmpeg -protocol_whitelist file,rtp,udp -i X.sdp -c copy -f mpegts - | protokv ingest - -o STATE",
}

# FFmpeg looks at this much of a stream before it gives a frame; its default is five seconds.
ANALYSE_US = "1000000"

# HLS delivers whole segments, and the first ones are minutes old.
HLS_SLACK_S = 60.0

# A reader that waits for a pipe asks again after this many seconds whether to stop.
ASK_S = 0.1

_HEADER = 16
_INDEX_FIRST = "remux it: `ffmpeg -i IN.mp4 -c copy -movflags frag_keyframe OUT.mp4`, or as MPEG-TS with `-f mpegts`"


@contextmanager
def connect(
    source: str, extra: Mapping[str, str], timeout_s: float, max_pixels: int, should_stop: ShouldStop
) -> Iterator[tuple[Any, Any, list[str]]]:
    """Connect; give PyAV's container, its video stream and notes on its choice, and close it afterwards.

    `extra` are options for FFmpeg, and `timeout_s` is how long to wait for the connection and for every packet. A pipe
    ends once `should_stop` returns True.

    Raises:
        SourceNotFound: there is no such device or file.
        SourceDenied: the user or the password is wrong.
        SourceUnreadable: it cannot be opened, or has no pictures.
        ConfigError: this build of FFmpeg cannot read such an address.
    """
    name = address.public_name(source)
    with _open(source, name, extra, timeout_s, max_pixels, should_stop) as container:
        stream, notes = choose_stream(container, name)
        limit_decoder(stream.codec_context, max_pixels, name)
        yield container, stream, notes


def _open(
    source: str, name: str, extra: Mapping[str, str], timeout_s: float, max_pixels: int, should_stop: ShouldStop
) -> Any:
    kind = address.source_kind(source)
    options = {"max_pixels": str(max_pixels)}
    try:
        if kind == address.PIPE:
            incoming = open_pipe(address.pipe_descriptor(source), name, should_stop)
            incoming.check()
            # No protocol: the incoming bytes cannot name another file.
            options |= {"protocol_whitelist": "none", "format_whitelist": ",".join(sorted(FORMATS))}
            return av.open(incoming, "r", options={**options, **extra}, metadata_errors="surrogateescape")
        how = KINDS[kind]
        options |= {"protocol_whitelist": how.protocols, "analyzeduration": ANALYSE_US, **how.options, **extra}
        if how.format is None:
            options.setdefault("format_whitelist", _STREAMED)
        if "listen" in options.get("rtsp_flags", ""):
            # FFmpeg 8 refuses its own default, which is to wait without end.
            options.setdefault("listen_timeout", str(math.ceil(timeout_s)))
        where, form = _device(source, kind), how.format
        if form is not None and form not in {n for one in av.formats_available for n in one.split(",")}:
            devices = {"linux": "/dev/video0 and screen:", "darwin": "avfoundation:", "win32": "dshow:"}
            raise ConfigError(
                f"{kind}: cannot be read here: PyAV's FFmpeg has no {form} on this system",
                hint=f"devices of this system are {devices.get(sys.platform, 'not read: pipe them in')}",
            )
        return av.open(
            where, "r", format=form, options=options, timeout=(timeout_s, timeout_s), metadata_errors="surrogateescape"
        )
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise _refusal(error, kind, name, timeout_s) from None


def _refusal(error: Exception, kind: str, name: str, timeout_s: float) -> ProtoKVError:
    """Return the error for users of a connection of this kind that failed."""
    why = explain_failure(error, timeout_s)
    match error:
        case av.error.FileNotFoundError() | av.error.HTTPNotFoundError():
            device = ", and that the device is there" if kind in address.DEVICES else ""
            return SourceNotFound(f"nothing is at {name}", hint=f"check the address{device}")
        case av.error.HTTPUnauthorizedError() | av.error.HTTPForbiddenError():
            return SourceDenied(f"{name} cannot be opened: {why}", hint="check user and password")
        case av.error.ProtocolNotFoundError():
            return ConfigError(
                f"{kind}:// cannot be read: PyAV's FFmpeg was built without it",
                hint=f"pipe it in: ffmpeg -i '{kind}://...' -c copy -f mpegts - | protokv ingest - -o STATE",
            )
        case av.error.InvalidDataError() | av.error.ArgumentError() if kind == address.PIPE:
            return SourceUnreadable(
                f"{name} is not a video: FFmpeg knows no format that begins like it",
                hint="pipe a video in: ffmpeg -i INPUT -f mpegts - | protokv ingest - -o STATE",
            )
        case ConnectionRefusedError():
            return SourceNotFound(
                f"nothing answers at {name}: {why}",
                hint="check host and port, and that the source is on; --give-up 5m waits for it",
            )
        case OSError(errno=errno.EIO) if kind == "screen":
            why = f"no X display answers at {_device(name, kind)}"
        case av.error.ArgumentError():
            why += " (or it gives text, or a list of files)"
        case av.error.InvalidDataError() if kind == "rtp":
            why += " (without its SDP only MPEG-TS in RTP can be read)"
    return SourceUnreadable(f"{name} cannot be opened: {why}", hint=HINTS.get(kind, HINT))


def explain_failure(error: BaseException, timeout_s: float) -> str:
    """Return the error in a few words, without the address."""
    if isinstance(error, av.error.ExitError):
        return f"nothing came for {timeout_s:g} s"
    return explain_error(error) if getattr(error, "strerror", None) else type(error).__name__


def _device(source: str, kind: str) -> str:
    """Return FFmpeg's name of a device; a network address unchanged."""
    if kind not in address.DEVICES or source.startswith("/"):
        return source
    rest = source.partition(":")[2]
    if kind == "screen":
        if sys.platform != "linux":
            raise ConfigError("screen: is read on Linux", hint="avfoundation: or dshow: name the screen elsewhere")
        return rest or os.environ.get("DISPLAY", ":0")
    return rest


class PipeReader:
    """A readable file object over incoming bytes."""

    def __init__(self, read: Callable[[int], bytes], name: str) -> None:
        self._read, self._name = read, name
        self._waiting = b""

    def read(self, n: int) -> bytes:
        """Return up to `n` bytes; none only at the end."""
        if self._waiting:
            given, self._waiting = self._waiting[:n], self._waiting[n:]
            return given
        return self._read(n)

    def check(self) -> None:
        """Refuse a file that cannot be read from front to back.

        Raises:
            SourceUnreadable: nothing came, or it is an MP4 with its index at the end.
        """
        at = 0
        while True:
            head = self._peek(at, _HEADER)
            if not at and not head:
                raise SourceUnreadable(
                    f"nothing came from {self._name}", hint="look at what the program before it says"
                )
            size, kind = int.from_bytes(head[:4], "big"), head[4:8]
            if len(head) < _HEADER or (not at and kind != b"ftyp"):
                return
            if kind == b"mdat":
                raise SourceUnreadable(
                    f"{self._name} is an MP4 whose index comes after its pictures: it cannot be read as it comes in",
                    hint=_INDEX_FIRST,
                )
            if kind not in (b"ftyp", b"free", b"skip", b"wide", b"uuid") or not 8 <= size <= 1 << 20:
                return
            at += size

    def _peek(self, at: int, n: int) -> bytes:
        while len(self._waiting) < at + n and (more := self._read(1 << 16)):
            self._waiting += more
        return self._waiting[at : at + n]


def open_pipe(number: int, name: str, should_stop: ShouldStop) -> PipeReader:
    """Read from an open file descriptor, until it ends or `should_stop`. SourceUnreadable if it is closed."""
    try:
        os.fstat(number)
    except OSError as error:
        raise SourceUnreadable(f"{name} is closed", hint="pipe a video into it") from error

    def read(n: int) -> bytes:
        try:
            # Windows selects sockets only: there a pipe is waited for without asking.
            while os.name == "posix" and not select.select([number], [], [], ASK_S)[0]:
                if should_stop():
                    return b""
            return os.read(number, n)
        except OSError as error:
            raise EOFError from error

    return PipeReader(read, name)
