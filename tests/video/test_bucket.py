"""Videos and their subtitles in an object store: an S3 server on loopback."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from protokv.bucket import fingerprint_bucket_video, list_bucket, list_by_prefix, open_bucket
from protokv.errors import ConfigError, SourceError, SourceNotFound, SourceUnreadable
from protokv.fleet import list_video_jobs
from protokv.video import open_source
from protokv.video.registry import fingerprint_source
from protokv.words.find import find_subtitles
from tests.fleet.conftest import films, server, store

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from tests.state.s3 import S3Server

__all__ = ["films", "server", "store"]

VIDEOS = "s3://bucket/videos/"


def refused(*_: object, **__: object) -> None:
    """Stand for a store whose address has a password."""
    from obstore.exceptions import GenericError

    raise GenericError("403 Forbidden for url (http://me:s3c/r?e#t@host:9/bucket)")


def test_subtitles_beside_an_object_are_found(
    store: S3Server, films: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = "s3://bucket/talks/talk.mp4"
    for name in ("talk.mp4", "talk.en.srt", "talk.de.srt", "talks.srt", "talk.x/y.srt"):
        store.put(f"talks/{name}", f"1\n00:00:00,000 --> 00:00:01,000\n{name}\n".encode())
    with open_source(films / "a.mp4") as source:
        for choice, name in (
            ("auto", "talk.en.srt"),
            ("de", "talk.de.srt"),
            ("s3://bucket/talks/talks.srt", "talks.srt"),
        ):
            found = find_subtitles(source, video, choice)
            assert (found.between(0.0, 1.0), found.record["name"]) == ([name], name)
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
        assert there.info.fingerprint == fingerprint_source("s3://bucket/videos/a.mp4")
        for one, other in zip(there.frames(), here.frames(), strict=True):
            assert (one.time_s, one.image.tobytes()) == (other.time_s, other.image.tobytes())
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
    with pytest.raises(SourceUnreadable, match=r"cannot open s3://bucket/videos/broken\.mp4"):
        open_source("s3://bucket/videos/broken.mp4")
    with pytest.raises(SourceUnreadable, match="names no bucket"):
        open_source("s3://")
    for verb in ("head", "list"):
        monkeypatch.setattr(f"obstore.store.S3Store.{verb}", refused)
    for ask in (
        lambda: fingerprint_bucket_video("s3://bucket/videos/a.mp4"),
        lambda: list(list_bucket(VIDEOS)),
    ):
        with pytest.raises(SourceError, match=r"cannot read s3://bucket/.*//host:9") as caught:
            ask()
        assert not re.search("me|s3c|r[?]e|#t", caught.value.message.partition(": ")[2])
    assert not list(tmp_path.iterdir())


# `.` and `/` sort before letters, and these before both: a page has keys on either side.
BAD_KEYS = ["./d.mp4", "/e.mp4", "c//one.mp4", "c/../f & g.mp4", "z///a.mp4"]


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_key_that_cannot_be_read_is_named_where_its_neighbours_are_lost_with_it(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from obstore.exceptions import InvalidPathError

    def fail(*_: object, **__: object) -> None:
        raise InvalidPathError("Path v//a.mp4 contained empty path segment")

    monkeypatch.setattr("protokv.bucket.open_bucket", lambda _: (SimpleNamespace(list=fail), "v/"))
    with pytest.raises(SourceUnreadable, match=f"cannot read {scheme}://bucket/v/: no key"):
        list(list_bucket(f"{scheme}://bucket/v/"))
    assert list(list_by_prefix(f"{scheme}://bucket/v/b")) == []


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_a_key_that_cannot_be_read_leaves_its_neighbours_alone(
    store: S3Server, films: Path, bad: str
) -> None:
    place = bad.encode().hex()
    names = {"! first.mp4", "b.mp4", "c/d.mp4", "z.mp4"}
    for name in (*names, bad):
        store.put(f"{place}/{name}", (films / "a.mp4").read_bytes())
    assert {name for name, _ in list_bucket(f"s3://bucket/{place}/")} == {*names, bad}
    jobs = list_video_jobs([f"s3://bucket/{place}/"])
    assert len({job.key for job in jobs}) == len(jobs) >= len(names)
    with open_source(films / "a.mp4") as source:
        assert find_subtitles(source, f"s3://bucket/{place}/b.mp4", "auto").record == {}
    with pytest.raises(SourceUnreadable, match="no key with an empty part"):
        open_source(f"s3://bucket/{place}//e.mp4")


@pytest.mark.parametrize("name", ["Talk [id].mp4", "what?.mp4", "a*b.mp4", "[x].mp4"])
def test_an_object_of_that_very_name_comes_before_a_pattern(
    store: S3Server, films: Path, name: str
) -> None:
    store.put(f"names/{name}", (films / "a.mp4").read_bytes())
    store.put("names/talk.mp4", b"")
    (job,) = list_video_jobs([f"s3://bucket/names/{name}"])
    assert (job.source, job.key) == (f"s3://bucket/names/{name}", name.removesuffix(".mp4"))
    store.put(f"in {name}/{name}", b"")
    assert [found for found, _ in list_bucket(f"s3://bucket/in {name}/")] == [name]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
@pytest.mark.parametrize(
    "value",
    ["minio.lan:9000", "localhost", "", "http://", "//host", "http://h st", "http://h:99999"],
)
def test_an_endpoint_that_is_no_address_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        open_bucket("s3://bucket/a.mp4")
    assert caught.value.message == f"{variable} is no address of a server"
