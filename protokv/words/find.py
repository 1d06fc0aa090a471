"""Find the words of a video: which subtitles are meant, what they say, and what a state keeps on record of them.

`auto` takes a file of subtitles beside the video, in a folder or a bucket, else a text track of its container, else
nothing. What cannot be read gives no words and one sentence in `lost`: the video is watched all the same.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from protokv.errors import ConfigError, SourceError, SourceNotFound
from protokv.ingestion.live.source import LiveSource
from protokv.video.address import source_kind
from protokv.video.bucket import fetch, is_object, list_beginning
from protokv.video.registry import fingerprint_source, open_source
from protokv.video.source import Lines, ShouldStop, Source, TextTrack
from protokv.words.cues import Coming, Cue, Track, Words
from protokv.words.plain import Plain, plain
from protokv.words.tracks import read_file

AUTO, OFF = "auto", "off"
SUFFIXES = (".srt", ".vtt", ".ass", ".ssa")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z0-9]{1,8})*", re.IGNORECASE)

# Containers name languages by three letters, files mostly by two: the first two of the three, except for these.
_TWO_LETTERS = dict(
    pair.split(":")
    for pair in """
    bul:bg ces:cs cze:cs chi:zh zho:zh deu:de ger:de dut:nl nld:nl est:et fil:tl gle:ga heb:he ind:id jpn:ja kaz:kk
    mac:mk mkd:mk may:ms msa:ms pol:pl por:pt slk:sk slo:sk slv:sl spa:es srp:sr swe:sv tur:tr ukr:uk
    """.split()  # noqa: SIM905 - a list would be a page
)


def words_of(
    source: Source | LiveSource,
    video: str | os.PathLike[str] | None,
    choice: str,
    start_s: float = 0.0,
) -> Words | None:
    """Return the words of a video; None if it has none, or none are wanted.

    Args:
        source: the open video, or the part of it that is watched.
        video: its path or address; None: it has none.
        choice: `auto`, `off`, a file of subtitles, or a language.
        start_s: where in the video the part begins.

    Raises:
        SourceNotFound: the named file is not there, or nothing is in that language.
    """
    file = file_of(video, choice)
    if file is not None:
        return _track(record_of_file(file), lambda: _read(file).since(start_s))
    if isinstance(source, LiveSource):
        return None if choice == OFF else _coming(source, choice)
    track = track_of(source, choice)
    if track is not None and source.streams_text:
        return _coming(source, choice)
    if track is not None:
        return _track(_record_of(track), lambda: source.lines(track.number))
    if choice in (AUTO, OFF):
        return None
    languages = {two_letters(one.language) for one in source.texts} | {language for language, _ in _beside(video)}
    known = ", ".join(sorted(languages - {""}))
    raise SourceNotFound(
        f"{source.info.name} has no subtitles in {choice}",
        hint=f"it has: {known}" if known else "leave --subtitles out, or name a file of subtitles",
    )


def write_subtitles(source: object, choice: str, model: str, device: str, should_stop: ShouldStop) -> None:
    """Write subtitles beside a video file that has none of this choice, with a model that recognises speech.

    Raises:
        ConfigError: the source is no file, or they cannot be written.
        SourceError: the video cannot be read.
        ModelError: the model cannot be loaded, or recognises no speech.
    """
    if not isinstance(source, str | os.PathLike) or source_kind(os.fspath(source)) != "file":
        raise ConfigError("what is said can be written down for files alone", hint="leave --transcribe out")
    with open_source(source) as video:
        found = file_of(source, choice) is not None or track_of(video, choice) is not None
    if not found:
        from protokv.words.speech import transcribe

        suffix = ".srt" if choice == AUTO else f".{choice.lower()}.srt"
        transcribe(Path(source), Path(source).with_suffix(suffix), model, device, should_stop)


def file_of(video: str | os.PathLike[str] | None, choice: str) -> str | None:
    """Return the file of subtitles, or the object, that is meant for a video; None: none. Raises as `words_of`."""
    if choice == OFF:
        return None
    if is_file(choice):
        if not is_object(choice) and not Path(choice).is_file():
            raise SourceNotFound(f"no subtitles at {choice}", hint="name a file, a language such as en, auto, or off")
        return choice
    found = [(language, file) for language, file in _beside(video) if _speaks(language, choice)]
    # The plain name first, then English, then by name.
    return min(found, key=lambda one: (one[0] != "", one[0] != "en", one[1]), default=("", None))[1]


def track_of(source: Source | LiveSource, choice: str) -> TextTrack | None:
    """Return the text track that is meant; None: none."""
    tracks = [] if choice == OFF else [one for one in source.texts if _speaks(two_letters(one.language), choice)]
    return min(tracks, key=lambda one: (one.forced, not one.default, one.number), default=None)


def is_file(choice: str) -> bool:
    """Return True if a choice names a file."""
    return choice not in (AUTO, OFF) and (choice.lower().endswith(SUFFIXES) or not LANGUAGE.fullmatch(choice))


def two_letters(language: str) -> str:
    """Return a language without its region, in two letters where it has them: `en` for `eng` and `en-US`."""
    first = language.lower().partition("-")[0]
    return "" if first == "und" else _TWO_LETTERS.get(first, first[:2])


def record_of_file(file: str) -> dict[str, Any]:
    """Return what a state keeps on record of a file of subtitles; SourceError if it cannot be read."""
    return {"kind": "file", "name": Path(file).name, "fingerprint": fingerprint_source(file)}


def recorded(source: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what the record of a source in a state, which may come from anywhere, says of its words."""
    words = (source or {}).get("words")
    return words if isinstance(words, Mapping) else {}


def named(record: Mapping[str, Any] | None) -> str | None:
    """Return subtitles on record in a few words; None for none."""
    if not record:
        return None
    language = record.get("language")
    track = f"text track {record.get('number')}{f' ({language})' if language else ''}"
    return str(record.get("name")) if record.get("kind") == "file" else track


def identity(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what of a record tells subtitles apart; empty for none."""
    return {name: value for name, value in (record or {}).items() if name != "lost"}


def _record_of(track: TextTrack) -> dict[str, Any]:
    return {"kind": "track", "number": track.number, "codec": track.codec, "language": track.language}


def _coming(source: Source | LiveSource, choice: str) -> Coming:
    """Return the words of the track that is meant, of each connection. A live source has no track before the first."""
    become = Plain()

    def take(*_: float) -> Iterator[Cue]:
        new, track = source.new_lines(), track_of(source, choice)
        if track is not None:
            words.record = _record_of(track)
            yield from filter(None, (become(line) for number, line in new if number == track.number))

    track = track_of(source, choice)
    words = Coming(take, {} if track is None else _record_of(track))
    return words


def _track(record: dict[str, Any], read: Callable[[], Lines]) -> Track:
    try:
        lines, lost = read()
    except SourceError as error:
        lines, lost = (), error.message
    return Track(plain(lines), record, lost or None)


def _beside(video: str | os.PathLike[str] | None) -> Iterator[tuple[str, str]]:
    """Give the files of subtitles beside a video, `NAME.srt` or `NAME.LANGUAGE.srt`, with their languages."""
    if video is None:
        return
    named, path = os.fspath(video), Path(video)
    files: Iterable[str] = ()
    if is_object(named):
        files = list_beginning(f"{named.removesuffix(path.suffix)}.")
    elif source_kind(named) == "file" and path.parent.is_dir():
        files = (str(file) for file in path.parent.iterdir() if file.is_file())
    for file in files:
        name, suffix = Path(file).name, Path(file).suffix
        if name.startswith(f"{path.stem}.") and suffix.lower() in SUFFIXES:
            between = name[len(path.stem) + 1 : -len(suffix)].partition(".")[0]
            if not between or LANGUAGE.fullmatch(between):
                yield two_letters(between), file


def _read(file: str) -> Lines:
    if not is_object(file):
        return read_file(Path(file))
    with tempfile.TemporaryDirectory(prefix="protokv-") as folder:
        fetch(file, copy := Path(folder, Path(file).name))
        return read_file(copy)


def _speaks(language: str, choice: str) -> bool:
    return choice == AUTO or (language != "" and language == two_letters(choice))
