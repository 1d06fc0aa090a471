"""Find and read the subtitles of a video, and make the record of them that a state keeps.

`auto` takes a file of subtitles beside the video, in a folder or a bucket, else a text track of its
container, else nothing. What cannot be read gives no lines and one sentence in `lost`: the video is
watched all the same.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from protokv.bucket import fetch_bucket_file, in_bucket, list_by_prefix
from protokv.errors import SourceError, SourceNotFound, SourceUnreadable
from protokv.texts import JsonObject, JsonRecord
from protokv.video.address import source_kind
from protokv.video.registry import fingerprint_source, fingerprint_video_file
from protokv.video.source import Source, SubtitleLines, TextTrack
from protokv.words.cues import Subtitles, make_cues
from protokv.words.files import read_subtitles

SUBTITLES_AUTO = "auto"
SUBTITLES_OFF = "off"
_SUFFIXES = (".srt", ".vtt", ".ass", ".ssa")
_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][a-z0-9]{1,8})*", re.IGNORECASE)

# Two letters are a language, three letters only these: talk.bak.srt is a backup, and no Bashkir.
_LANGUAGES = """
    af/afr am/amh ar/ara az/aze be/bel bg/bul bn/ben bs/bos ca/cat cs/ces/cze cy/cym/wel da/dan
    de/deu/ger el/ell/gre en/eng eo/epo es/spa et/est eu/eus/baq fa/fas/per fi/fin fr/fra/fre
    ga/gle gl/glg gu/guj he/heb hi/hin hr/hrv hu/hun hy/hye/arm id/ind is/isl/ice it/ita ja/jpn
    ka/kat/geo kk/kaz km/khm kn/kan ko/kor la/lat lo/lao lt/lit lv/lav mk/mkd/mac ml/mal mn/mon
    mr/mar ms/msa/may my/mya/bur ne/nep nl/nld/dut no/nor/nob/nb pa/pan pl/pol ps/pus pt/por
    ro/ron/rum ru/rus si/sin sk/slk/slo sl/slv so/som sq/sqi/alb sr/srp sv/swe sw/swa ta/tam
    te/tel th/tha tl/tgl/fil tr/tur uk/ukr ur/urd uz/uzb vi/vie yo/yor zh/zho/chi/cmn/yue zu/zul
"""
_TWO_LETTERS = {
    code: codes.partition("/")[0] for codes in _LANGUAGES.split() for code in codes.split("/")
}

# Further parts of a name, as in talk.en.forced.srt: the first tell what only foreign speech needs.
_FORCED = {"forced", "foreign", "signs"}
_FULL = {"default", "full"}
_MARKS = _FORCED | _FULL | {"sdh", "cc", "hi"}


class _SubtitleFile(NamedTuple):
    """A file of subtitles beside a video; the smallest one is taken.

    Full subtitles come before forced ones, then a name without a language, then English, then the
    name with the fewest marks such as `sdh`. The language has two letters; it is empty where the
    name has none.
    """

    forced: bool
    order: tuple[bool, bool, int]
    path: str
    language: str


def find_subtitles(source: Source, video: object, choice: str, start_s: float = 0.0) -> Subtitles:
    """Return the subtitles of a video. Their record is empty if it has none, or they are not
    wanted.

    `source` is the open video, or the part of it that begins at `start_s`; `video` is its path or
    address, and anything else if it has none. `choice` is `auto`, `off`, a file of subtitles, or a
    language.

    SourceNotFound: the named file is not there, or nothing is in that language.
    """
    track = choose_subtitle_track(source.texts, choice)
    file = find_subtitle_file(video, choice, forced=track is None or track.forced)
    if file is not None:
        return _read(describe_subtitle_file(file), lambda: _read_file(file).since(start_s))
    if track is not None:
        record = {
            "kind": "track",
            "number": track.number,
            "codec": track.codec,
            "language": track.language,
        }
        return _read(record, lambda: source.lines(track.number))
    if choice in (SUBTITLES_AUTO, SUBTITLES_OFF):
        return Subtitles()
    languages = {shorten_language(one.language) for one in source.texts} | {
        one.language for one in _list_files(video)
    }
    known = ", ".join(sorted(languages - {""}))
    why = f"{source.info.name} has no subtitles in {choice}"
    hint = f"it has: {known}" if known else "leave --subtitles out, or name a file of subtitles"
    raise SourceNotFound(why, hint=hint)


def find_subtitle_file(video: object, choice: str, *, forced: bool = True) -> str | None:
    """Return the file or object with the subtitles of a video; None: there is none.

    Without `forced`, a file of foreign speech alone, by its name, does not count, since a text
    track is better. SourceNotFound: the named file is not there.
    """
    if choice == SUBTITLES_OFF:
        return None
    if names_subtitle_file(choice):
        if not in_bucket(choice) and not Path(choice).is_file():
            raise SourceNotFound(
                f"no subtitles at {choice}", hint="name a file, a language such as en, auto, or off"
            )
        return choice
    found = [
        one
        for one in _list_files(video)
        if _suits(one.language, choice) and (forced or not one.forced)
    ]
    return min(found).path if found else None


def choose_subtitle_track(tracks: Iterable[TextTrack], choice: str) -> TextTrack | None:
    """Return the text track that is meant; None: none."""
    found = (
        []
        if choice == SUBTITLES_OFF
        else [one for one in tracks if _suits(shorten_language(one.language), choice)]
    )
    return min(found, key=lambda one: (one.forced, not one.default, one.number), default=None)


def names_subtitle_file(choice: str) -> bool:
    """Return True if a choice names a file."""
    return choice not in (SUBTITLES_AUTO, SUBTITLES_OFF) and (
        choice.lower().endswith(_SUFFIXES) or not _LANGUAGE.fullmatch(choice)
    )


def shorten_language(language: str) -> str:
    """Return a language without its region, in two letters where it has them: `en` for `eng` and
    `en-US`.
    """
    first = re.split("[-_]", language.lower())[0]
    return "" if first == "und" else _TWO_LETTERS.get(first, first)


def describe_subtitle_file(file: str) -> JsonObject:
    """Return what a state keeps on record of a file of subtitles; SourceError if it cannot be
    read.
    """
    try:
        content = (
            fingerprint_source(file) if in_bucket(file) else fingerprint_video_file(Path(file))
        )
    except OSError as error:
        raise SourceUnreadable(f"cannot read {file}: {error.strerror or error}") from error
    return {"kind": "file", "name": Path(file).name, "fingerprint": content}


def read_recorded_subtitles(source: JsonRecord | None) -> JsonRecord:
    """Return the subtitles on record of a source of a state, which may come from anywhere; empty:
    none.
    """
    words = (source or {}).get("words")
    return words if isinstance(words, Mapping) else {}


def name_subtitles(record: JsonRecord | None) -> str | None:
    """Return subtitles on record in a few words; None for none."""
    if not record:
        return None
    if record.get("kind") == "file":
        return f"{record.get('name')}" + (
            f" ({record['encoding']})" if "encoding" in record else ""
        )
    return f"text track {record.get('number')}" + (
        f" ({record['language']})" if record.get("language") else ""
    )


def identify_subtitles(record: JsonRecord | None) -> JsonObject:
    """Return what of a record tells subtitles apart; empty for none."""
    return {
        name: value for name, value in (record or {}).items() if name not in ("lost", "encoding")
    }


def _read(record: JsonObject, read: Callable[[], SubtitleLines]) -> Subtitles:
    try:
        lines, lost, note = read()
    except SourceError as error:
        lines = ()
        lost = error.message
        note = ""
    cues = tuple(make_cues(lines))
    if lines and not cues:
        lost = lost or "no line of them says anything"
    return Subtitles(cues, record | ({"encoding": note} if note else {}), lost or None)


def _list_files(video: object) -> Iterator[_SubtitleFile]:
    """Give the files of subtitles beside a video: `NAME.srt`, `NAME.LANGUAGE.srt`,
    `NAME.LANGUAGE.forced.srt`, ...
    """
    if not isinstance(video, str | os.PathLike):
        return
    named = os.fspath(video)
    path = Path(video)
    files: Iterable[str] = ()
    if in_bucket(named):
        files = list_by_prefix(f"{named.removesuffix(path.suffix)}.")
    elif source_kind(named) == "file" and path.parent.is_dir():
        files = (str(file) for file in path.parent.iterdir() if file.is_file())
    for file in files:
        name = Path(file).name
        suffix = Path(file).suffix
        if name.startswith(f"{path.stem}.") and suffix.lower() in _SUFFIXES:
            parts = [
                part for part in name[len(path.stem) + 1 : -len(suffix)].lower().split(".") if part
            ]
            language = shorten_language(parts[0]) if parts else ""
            if (
                not (language in _TWO_LETTERS or re.fullmatch("[a-z]{2}", language))
                or language == "cc"
            ):
                language = ""
            marks = set(parts[1:] if language else parts)
            if language or marks <= _MARKS:
                order = (language != "", language != "en", len(marks - _FULL))
                yield _SubtitleFile(not marks.isdisjoint(_FORCED), order, file, language)


def _read_file(file: str) -> SubtitleLines:
    if not in_bucket(file):
        return read_subtitles(Path(file))
    with tempfile.TemporaryDirectory(prefix="protokv-") as folder:
        fetch_bucket_file(file, copy := Path(folder, Path(file).name))
        return read_subtitles(copy)


def _suits(language: str, choice: str) -> bool:
    return choice == SUBTITLES_AUTO or (language != "" and language == shorten_language(choice))
