"""Videos and their subtitles in an object store: an S3 server on loopback."""

from dataclasses import replace
from pathlib import Path

import pytest

from protokv.errors import SourceError, SourceNotFound, SourceUnreadable
from protokv.video import open_source
from protokv.video.bucket import fingerprint_bucket_video, list_bucket
from protokv.video.registry import fingerprint_source
from protokv.words.find import find_subtitles
from tests.fleet.conftest import films, server, store

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from tests.state.s3 import S3Server

__all__ = ["films", "server", "store"]

VIDEOS = "s3://bucket/videos/"


def refused(*_: object, **__: object) -> None:
    from obstore.exceptions import GenericError

    raise GenericError("Server returned non-2xx status code: 403 Forbidden")


def test_subtitles_beside_an_object_are_found(
    store: S3Server, films: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = "s3://bucket/talks/talk.mp4"
    for name in (
        "talk.mp4",
        "talk.en.vtt",
        "talk.de.srt",
        "talks.srt",
        "talk.x/y.srt",
        "other.srt",
        "t.srt",
    ):
        words = (
            "WEBVTT\n\n00:00.000 --> 00:01.000\n"
            if name.endswith("vtt")
            else "1\n00:00:00,000 --> 00:00:01,000\n"
        )
        store.put(f"talks/{name}", f"{words}{name}\n".encode())
    with open_source(films / "a.mp4") as source:
        for choice, name in (
            ("auto", "talk.en.vtt"),
            ("de", "talk.de.srt"),
            ("s3://bucket/talks/t.srt", "t.srt"),
        ):
            words = find_subtitles(source, video, choice)
            assert words.record
            assert (words.between(0.0, 1.0), words.record["name"]) == ([name], name)
        assert (
            find_subtitles(source, "s3://bucket/talks/talks.mp4", "auto").record["name"]
            == "talks.srt"
        )
        # Whoever may not list reads the video all the same.
        monkeypatch.setattr("obstore.store.S3Store.list", refused)
        assert find_subtitles(source, video, "auto").record == {}


def test_objects_read_like_files(
    store: S3Server, films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_source("s3://bucket/videos/a.mp4") as there, open_source(films / "a.mp4") as here:
        assert list(tmp_path.iterdir())
        assert replace(there.info, kind="file", fingerprint=here.info.fingerprint) == here.info
        assert there.info.kind == "s3"
        assert (
            there.info.fingerprint
            == fingerprint_source("s3://bucket/videos/a.mp4")
            != here.info.fingerprint
        )
        one, other = (
            [(a.time_s, a.image.tobytes()) for a in source.frames()] for source in (there, here)
        )
        assert one == other
        assert there.damage.ok
    assert not list(tmp_path.iterdir())
    store.put("other/a.mp4", (films / "a.mp4").read_bytes())
    before = fingerprint_bucket_video("s3://bucket/other/a.mp4")
    store.put("other/a.mp4", (films / "b.mkv").read_bytes())
    assert fingerprint_bucket_video("s3://bucket/other/a.mp4") != before


@pytest.mark.usefixtures("store")
def test_an_unreadable_object_is_one_error_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SourceNotFound, match=r"there is nothing at s3://bucket/videos/gone\.mp4"):
        open_source("s3://bucket/videos/gone.mp4")
    with pytest.raises(SourceUnreadable, match=r"s3://bucket/videos/broken\.mp4 is not a video but text"):
        open_source("s3://bucket/videos/broken.mp4")
    with pytest.raises(SourceUnreadable, match="names no bucket"):
        open_source("s3://")
    for verb in ("head", "list"):
        monkeypatch.setattr(f"obstore.store.S3Store.{verb}", refused)
    for ask in (
        lambda: fingerprint_bucket_video("s3://bucket/videos/a.mp4"),
        lambda: list(list_bucket(VIDEOS)),
    ):
        with pytest.raises(SourceError, match="cannot read s3://bucket/videos/"):
            ask()
    assert not list(tmp_path.iterdir())
