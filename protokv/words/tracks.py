"""Files of subtitles: SubRip, WebVTT and ASS, read by FFmpeg after they are recoded to UTF-8. Sizes are bounded."""

from __future__ import annotations

import io
import re
from contextlib import suppress
from pathlib import Path

import av

from protokv.errors import SourceUnreadable
from protokv.video.container import explain_error
from protokv.video.file import check_is_file
from protokv.video.source import Lines
from protokv.video.text_tracks import MOST_BYTES, read_lines

# The demultiplexers for files of subtitles. None opens another file.
FILES = ("srt", "ass", "webvtt")

# FFmpeg leaves out lines whose times have no milliseconds.
_WHOLE_SECONDS = re.compile(r"\b\d{1,4}:\d\d:\d\d(?=\s*-->)|(?<=--> )\d{1,4}:\d\d:\d\d(?![\d.,:])")


def read_file(path: Path) -> Lines:
    """Read a file of subtitles.

    Raises:
        SourceError: it is not there, no file, or no subtitles of a kind that is read.
    """
    check_is_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path.name}: {error.strerror or error}") from error
    whole = len(data) <= MOST_BYTES
    recoded = io.BytesIO(_WHOLE_SECONDS.sub(r"\g<0>.000", decoded(data[:MOST_BYTES])).encode())
    options = {"format_whitelist": ",".join(FILES), "protocol_whitelist": "none"}
    try:
        with av.open(recoded, "r", options=options) as container:
            found = read_lines(container, container.streams[0])
    except Exception as error:
        raise SourceUnreadable(
            f"{path.name} holds no subtitles: {explain_error(error)}", hint="SubRip, WebVTT and ASS are read"
        ) from error
    return found if whole else Lines(found.lines, found.lost or f"only its first {MOST_BYTES >> 20} MiB are read")


def decoded(data: bytes) -> str:
    """Return the text of a file in UTF-8, UTF-16 or an encoding that its bytes suggest."""
    for encoding in ("utf-8-sig", *(["utf-16"] if data[:2] in (b"\xff\xfe", b"\xfe\xff") else [])):
        with suppress(UnicodeDecodeError):
            return data.decode(encoding)
    import charset_normalizer

    best = charset_normalizer.from_bytes(data).best()
    return data.decode("latin-1") if best is None else str(best)
