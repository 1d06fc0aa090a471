"""Addresses of sources: which kind an address names, and how to show it without its secrets.

A password may stand before the host, in the query or, with some cameras, in the path.
`redact_source` leaves out the user, the password and the value of every parameter that is not known
to be harmless.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from protokv.bucket import in_bucket
from protokv.errors import ConfigError

NETWORK_SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "http", "https", "udp", "rtp", "srt", "tcp")
_DEVICES = ("v4l2", "avfoundation", "dshow", "screen")
PIPE = "pipe"

# Read as streams, by FFmpeg.
STREAMED_SOURCES = (PIPE, *NETWORK_SCHEMES, *_DEVICES)

# Files that are videos by their names; a file that is named itself as a source may have any name.
_VIDEO = "3gp asf avi flv m2ts m4v mkv mov mp4 mpeg mpg mts mxf ogv ts vob webm wmv y4m"
VIDEO_SUFFIXES = frozenset(f".{one}" for one in _VIDEO.split())

# These have no end of their own; a video on a web server may have one.
LIVE = set(STREAMED_SOURCES) - {"http", "https"}

# Parameters of cameras and of FFmpeg's protocols that are no secrets.
_HARMLESS = """
camera cam channel chan ch subtype stream profile res resolution track codec mode type pkt_size
buffer_size fifo_size localaddr listen timeout latency
"""
_HIDDEN = "***"
# A password may hold `&` as it stands: a part without a name belongs to the value before it.
_PARAMETER = re.compile(r"([^/?&;=]+)=((?:[^/?&;]|[&;](?![^/?&;=]*=))*)")
# User, password, host and port end here; a password that holds one of these ends them too early.
_AUTHORITY = re.compile(r"[^/?#]*")
_HOST = re.compile(r"(.*@)?(\[[^\]]*\]|[^:@]*)(:\d*)?")


def source_kind(source: str) -> str:
    """Return the kind of source that a text names: one of the above, `file`, or a scheme that
    nothing here reads.
    """
    if source == "-" or re.fullmatch(r"pipe:\d*", source):
        return PIPE
    if re.fullmatch(r"/dev/video\d+", source):
        return "v4l2"
    prefix, colon, rest = source.partition(":")
    if colon and (prefix.lower() in _DEVICES or rest.startswith("//")):
        return prefix.lower()
    return "file"


def redact_source(source: str) -> str:
    """Return the address without secrets, for states, logs and errors: `stdin` for a pipe, the name
    of a file.
    """
    kind = source_kind(source)
    if kind == PIPE:
        return "stdin"
    if kind == "file":
        return Path(source).name
    if "://" not in source:
        return source
    rest = source.partition("://")[2]
    head, at, _ = rest.rpartition("@")
    begin = _AUTHORITY.match(rest)
    if at and begin is not None and begin.end() < len(head):
        # This @ is no part of a host: of a path, of a token in a query, or of a password.
        plain = _HOST.fullmatch(begin[0]) and "@" not in begin[0]
        if not (plain and ("?" in head or head.endswith("/"))):
            return f"{kind}://{_HIDDEN}"
    try:
        _, host, path, query, _ = urlsplit(source)
    except ValueError:
        return f"{kind}://{_HIDDEN}"
    return urlunsplit(
        (kind, host.rpartition("@")[2], _without_values(path), _without_values(query), "")
    )


def check_source_address(source: str) -> None:
    """Refuse an address whose password holds `/`, `?` or `#` as they stand: FFmpeg takes a part of
    it for the host. ConfigError.
    """
    rest = source.partition("://")[2]
    begin = _AUTHORITY.match(rest)
    if begin is not None and "@" in rest[begin.end() :] and not _HOST.fullmatch(begin[0]):
        raise ConfigError(
            f"the password in {redact_source(source)} has a /, ? or # in it as it stands",
            hint="write / as %2F, ? as %3F, # as %23 and @ as %40",
        )


def name_source(source: str) -> str:
    """Return the source for messages: the whole path of a file or an object, an address without its
    secrets.
    """
    return source if source_kind(source) == "file" or in_bucket(source) else redact_source(source)


def source_stem(source: str) -> str:
    """Return a file name without suffix for the state of a source: `camera-1` for
    `rtsp://camera/1`.
    """
    if source_kind(source) == "file":
        return Path(source).stem
    text = redact_source(source).partition("://")[2] or redact_source(source)
    words = re.findall(r"[A-Za-z0-9._]+", text.partition("?")[0])
    return "-".join(words).strip(".")[:80] or source_kind(source)


def _without_values(text: str) -> str:
    # A query without names may be a token as a whole; a path has names of its own.
    return _PARAMETER.sub(
        lambda one: one[0] if one[1].lower() in _HARMLESS.split() else f"{one[1]}={_HIDDEN}", text
    )
