"""PyAV: open a file, a pipe, a network address or a device, with limits on what FFmpeg may do.

A file comes to FFmpeg as an open descriptor and a pipe as bytes, without names and protocols, and
only in the formats of `_ALL_FORMATS`. So FFmpeg reads the one file, whatever it says. At an address
it may speak only its protocols, so a playlist cannot name a file of this machine. A user's options
go to FFmpeg unchanged. Errors show an address without its secrets.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import av

from protokv.errors import ConfigError, ProtoKVError, SourceDenied, SourceNotFound, SourceUnreadable
from protokv.texts import Keywords
from protokv.video import address
from protokv.video.source import ShouldStop, never_stop

# The demultiplexers that files may be read with, by content. None makes pictures of text or opens
# another file, as those of playlists, scripts, sequences of images, MLV and VobSub do.
_FORMATS = """
mov matroska avi mpegts mpeg flv live_flv kux ogg asf rm wtv nut mxf gxf dv nsv nuv pva swf dhav
lxf ivf ty film_cpk yuv4mpegpipe gif apng ser cine h261 h263 h264 hevc vvc evc m4v mpegvideo mjpeg
mpjpeg smjpeg mxg vc1 vc1test av1 obu dirac dnxhd cavsvideo avs2 avs3 jpeg_pipe png_pipe webp_pipe
bmp_pipe tiff_pipe
"""
# Formats without pictures are named so that the error says what they are, and for the sound of HLS.
_ALL_FORMATS = ",".join((*_FORMATS.split(), "aac", "ac3", "eac3", "flac", "mp3", "wav"))

# Formats that an address may give besides; WebVTT is the subtitles of HLS.
_STREAMED = f"{_ALL_FORMATS},hls,dash,rtsp,rtp,sdp,webvtt"

# 8K in whole blocks. Decoders hold up to 17 frames, so this bounds the memory that a small file can
# make them take.
MAX_FRAME_PIXELS = 8192 * 4352

# Seconds without a packet after which a connection is lost.
SOURCE_TIMEOUT_S = 20.0

# The protocols that FFmpeg may speak, by the kind of address without the s of its secure form.
_PROTOCOLS = {
    "rtsp": "rtsp,rtp,tcp,udp,tls,srtp,http,https,httpproxy",
    "rtmp": "rtmp,rtmps,rtmpt,rtmpe,tcp,tls,http,https,httpproxy",
    "http": "http,https,httpproxy,tcp,tls,crypto,data",
    "udp": "udp",
    "rtp": "rtp,udp",
    "srt": "srt,udp",
    "tcp": "tcp",
}
_DEVICES = {
    "v4l2": "video4linux2",
    "avfoundation": "avfoundation",
    "dshow": "dshow",
    "screen": "x11grab",
}
_OPTIONS = {
    # UDP loses packets, and a lost packet is a broken picture until the next key frame.
    "rtsp": {"rtsp_transport": "tcp"},
    # A reader that is stuck holds the port until nothing comes any more.
    "udp": {"overrun_nonfatal": "1", "reuse": "1"},
    "screen": {"framerate": "10"},
}

# FFmpeg looks at this much of a stream before it gives a frame; its default is five seconds.
_ANALYSE_US = "1000000"

# A pipe keeps so many bytes at most after the last picture that is watched.
_MOST_KEPT_BYTES = 64 << 20

# A reader that waits for a pipe asks again after this many seconds whether to stop.
_ASK_S = 0.1

# A block of memory in FFmpeg: an index of a stream, or a plane of a frame, in bytes.
_block_bytes = 512 << 20
_BYTES_OF_PIXEL = 9

# The first bytes of a pipe tell an MP4.
_HEAD_BYTES = 8

# AVDISCARD_ALL
_DISCARD_ALL = 48

_HINTS = {
    "file": "check that the file was copied or recorded to its end; a playlist is read from its "
    "address alone; `ffprobe FILE` shows what is in it",
    "screen": "set DISPLAY, or name it: screen::1; Wayland's screens are not read",
    "rtp": "where there is an SDP, pipe it in: "
    "ffmpeg -protocol_whitelist file,rtp,udp -i X.sdp -c copy -f mpegts - "
    "| protokv ingest - -o STATE",
}
_HINT = "check the address, and that the source is running"

# Errors of FFmpeg for an address, each with the text for the user, and a hint where the hint of the
# kind of address does not fit.
_Errors = type[Exception] | tuple[type[Exception], ...]
_REFUSALS: list[tuple[_Errors, type[ProtoKVError], str, str]] = [
    (
        (av.error.FileNotFoundError, av.error.HTTPNotFoundError),
        SourceNotFound,
        "nothing is at {name}",
        "check the address, and that the device is there",
    ),
    (
        (av.error.HTTPUnauthorizedError, av.error.HTTPForbiddenError),
        SourceDenied,
        "{name} cannot be opened: {why}",
        "check user and password",
    ),
    (
        av.error.ProtocolNotFoundError,
        ConfigError,
        "{kind}:// cannot be read: PyAV's FFmpeg was built without it",
        "pipe it in: ffmpeg -i '{kind}://...' -c copy -f mpegts - | protokv ingest - -o STATE",
    ),
    (
        ConnectionRefusedError,
        SourceNotFound,
        "nothing answers at {name}: {why}",
        "check host and port, and that the source is on; --give-up 5m waits for it",
    ),
    (
        av.error.ArgumentError,
        SourceUnreadable,
        "{name} cannot be opened: {why} (or it gives text, or a list of files)",
        "",
    ),
]


def open_container(
    source: str | os.PathLike[str],
    max_pixels: int = MAX_FRAME_PIXELS,
    extra: Mapping[str, str] | None = None,
    timeout_s: float = SOURCE_TIMEOUT_S,
    should_stop: ShouldStop = never_stop,
    pipe: Pipe | None = None,
) -> Any:
    """Open a path or an address (`protokv.video.address`), and return PyAV's container, which is a
    context manager. Its `file.file` is the `Pipe`, if it reads one; give that to open it anew.

    A frame may have `max_pixels`, and `extra` are a user's own options for FFmpeg. An address, and
    every packet of it, is waited for up to `timeout_s` seconds. A pipe ends once `should_stop`
    returns True.

    SourceNotFound: there is no such device or file. SourceDenied: the user or the password is
    wrong. SourceUnreadable: it cannot be opened, or is no video. ConfigError: this build of FFmpeg
    cannot read such an address, or its password is not escaped.
    """
    text = os.fspath(source)
    kind = address.source_kind(text)
    if kind in address.NETWORK_SCHEMES:
        address.check_source_address(text)
    # `-` and `pipe:` are stdin.
    if kind == address.PIPE and pipe is None:
        pipe = Pipe(int(text.partition(":")[2] or 0), should_stop)
    number = None
    where = pipe or text
    form = _DEVICES.get(kind)
    # Tags in another encoding than UTF-8 are no reason to refuse a file.
    how: Keywords = {"metadata_errors": "surrogateescape"}
    limit_ffmpeg_blocks(max_pixels)
    options = {"max_pixels": str(max_pixels), "format_whitelist": _ALL_FORMATS}
    options |= extra or {}
    try:
        if kind == "file" and os.name == "posix":
            # FFmpeg duplicates it
            number = os.open(text, os.O_RDONLY | os.O_NONBLOCK)
            where = "fd:"
            options |= {"protocol_whitelist": "fd", "fd": str(number)}
        elif kind == "file":
            where, options["protocol_whitelist"] = f"file:{text}", "file"
        elif pipe is not None:
            options = {"protocol_whitelist": "none", **options}
        else:
            where, how["timeout"] = _name_device(text, kind), (timeout_s, timeout_s)
            options = _choose_options(kind, max_pixels, timeout_s, extra or {})
        return av.open(where, "r", format=form, options=options, **how)
    except Exception as error:  # PyAV raises more than its own errors on a damaged file
        # The cause names the address with its secrets.
        raise _refuse(_tell_unknown_host(error, text), kind, text, timeout_s, pipe) from (
            error if kind == "file" else None
        )
    finally:
        if number is not None:
            os.close(number)


def limit_ffmpeg_blocks(max_pixels: int) -> None:
    """Let FFmpeg take no block of memory above 512 MiB, or of a frame with so many pixels.

    The limit is that of the process, and never falls. PyAV has no function for it; where the
    library cannot be found by its symbols, there is none.
    """
    global _block_bytes
    _block_bytes = max(_block_bytes, _BYTES_OF_PIXEL * max_pixels)
    with suppress(AttributeError, OSError):
        ctypes.CDLL(av._core.__file__).av_max_alloc(ctypes.c_size_t(_block_bytes))


def _choose_options(
    kind: str, max_pixels: int, timeout_s: float, extra: Mapping[str, str]
) -> dict[str, str]:
    plain = kind.removesuffix("s")
    options = {
        "max_pixels": str(max_pixels),
        "analyzeduration": _ANALYSE_US,
        **_OPTIONS.get(plain, {}),
    }
    options["protocol_whitelist"] = _PROTOCOLS.get(plain, "file")
    if kind not in _DEVICES:
        options["format_whitelist"] = _STREAMED
    if "listen" in extra.get("rtsp_flags", ""):
        # FFmpeg 8 refuses its own default, which is to wait without end.
        options["listen_timeout"] = str(math.ceil(timeout_s))
    return {**options, **extra}


def _name_device(text: str, kind: str) -> str:
    """Return FFmpeg's name of a device; a network address unchanged."""
    if kind not in _DEVICES or text.startswith("/"):
        return text
    rest = text.partition(":")[2]
    return rest or os.environ.get("DISPLAY", ":0") if kind == "screen" else rest


def _refuse(
    error: Exception, kind: str, text: str, timeout_s: float, pipe: Pipe | None
) -> ProtoKVError:
    name = address.name_source(text)
    is_file = kind == "file"
    hint = _HINTS.get(kind, _HINT)
    why = explain_ffmpeg_error(error, None if is_file else timeout_s)
    if pipe is not None:
        return _refuse_pipe(pipe.head, name)
    if is_file:
        why = "it has a format that is not read" if "Invalid argument" in why else why
        return SourceUnreadable(f"expected a video file, cannot open {name}: {why}", hint=hint)
    if kind == "screen" and getattr(error, "errno", None) == errno.EIO:
        why = f"no X display answers at {_name_device(text, kind)}"
    device = _DEVICES.get(kind)
    if device and isinstance(error, ValueError) and not isinstance(error, OSError):
        return ConfigError(
            f"{kind}: cannot be read here: PyAV's FFmpeg has no {device} on this system",
            hint="Linux has /dev/video0 and screen:, macOS avfoundation:, Windows dshow:; "
            "pipe others in",
        )
    for known, make, what, advice in _REFUSALS:
        if isinstance(error, known):
            return make(
                what.format(name=name, kind=kind, why=why),
                hint=advice.format(kind=kind) if advice else hint,
            )
    return SourceUnreadable(f"{name} cannot be opened: {why}", hint=hint)


def _tell_unknown_host(error: Exception, text: str) -> Exception:
    """Return an error of FFmpeg, which says EIO where a host is not known; then one that says
    so.
    """
    if getattr(error, "errno", None) == errno.EIO and (host := urlsplit(text).hostname):
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            return ConnectionRefusedError(errno.ECONNREFUSED, "its host is not known")
    return error


def _refuse_pipe(head: bytes, name: str) -> SourceUnreadable:
    if not head:
        return SourceUnreadable(
            f"nothing came from {name}", hint="look at what the program before it says"
        )
    if head[4:8] == b"ftyp":
        return make_mp4_index_error(name)
    return SourceUnreadable(
        f"{name} is not a video: FFmpeg knows no format that begins like it",
        hint="pipe a video in: ffmpeg -i INPUT -f mpegts - | protokv ingest - -o STATE",
    )


def make_mp4_index_error(name: object) -> SourceUnreadable:
    """Return the error for an MP4 that cannot be read as it comes in."""
    return SourceUnreadable(
        f"{name} cannot be read as it comes in: it is an MP4 whose index comes after its pictures, "
        "or is damaged",
        hint="download it first, or remux it: "
        "`ffmpeg -i IN.mp4 -c copy -movflags frag_keyframe OUT.mp4`, or as MPEG-TS with "
        "`-f mpegts`",
    )


def explain_ffmpeg_error(error: BaseException, timeout_s: float | None = None) -> str:
    """Return an error in one line: FFmpeg's or the system's words, which have no path.

    With `timeout_s` it is that of an address, which other words may give away.
    """
    if timeout_s is not None and isinstance(error, av.error.ExitError):
        return f"nothing came for {timeout_s:g} s"
    text = (
        getattr(error, "strerror", None)
        or (str(error) if timeout_s is None else "")
        or type(error).__name__
    )
    return str(text).splitlines()[0]


def discard_other_streams(container: Any, stream: Any) -> None:
    """Let the demultiplexer leave out the packets of all other streams. Older PyAV reads and drops
    them.
    """
    for other in container.streams:
        if other is not stream:
            with suppress(AttributeError):
                other.discard = _DISCARD_ALL


class Pipe:
    """Incoming bytes as a file object that cannot seek, until they end or `should_stop`.

    `head` is what came first. Bytes are kept, so that what follows a stream can be opened anew.
    SourceUnreadable if the descriptor is closed.
    """

    def __init__(self, number: int, should_stop: ShouldStop) -> None:
        try:
            os.fstat(number)
        except OSError as error:
            raise SourceUnreadable("stdin is closed", hint="pipe a video into it") from error
        self._number = number
        self._should_stop = should_stop
        self.head = b""
        self._keeps = True
        self._kept = bytearray()
        self._begin = 0  # where they begin in what FFmpeg reads
        self._again = 0  # how many of them are to be read again

    def keep_none(self) -> None:
        """Keep no bytes any more."""
        self._keeps = False
        self._kept.clear()

    def keep_from(self, position: int) -> None:
        """Keep bytes from a position on, counted from where FFmpeg began to read."""
        del self._kept[: max(0, position - self._begin)]
        self._begin = position

    def read_again(self, n: int) -> bytes:
        """Return up to `n` of the bytes that are kept."""
        return bytes(self._kept[:n])

    def rewind(self) -> None:
        """Let FFmpeg begin to read with the bytes that are kept."""
        self._begin = 0
        self._again = len(self._kept)

    def read(self, n: int) -> bytes:
        """Return up to `n` bytes; none only at the end, or where the watched stream has ended long
        before.
        """
        if self._again:
            first = len(self._kept) - self._again
            data = bytes(self._kept[first : first + min(n, self._again)])
            self._again -= len(data)
            return data
        if len(self._kept) > _MOST_KEPT_BYTES:
            return b""
        try:
            # Windows selects sockets only: there a pipe is waited for without asking.
            while os.name == "posix" and not select.select([self._number], [], [], _ASK_S)[0]:
                if self._should_stop():
                    return b""
            data = os.read(self._number, n)
        except OSError as error:
            raise EOFError from error
        self.head = self.head or data[:_HEAD_BYTES]
        self._kept += data if self._keeps else b""
        return data
