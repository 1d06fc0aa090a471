"""Videos and states in an object store: an S3 server on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protokv.errors import SourceError, SourceNotFound, SourceUnreadable
from protokv.fleet import Job, Outcome, Recipe, find_states, locate_state, plan
from protokv.fleet.states import survey
from protokv.ingestion import Every
from protokv.state import api as storage
from protokv.video import open_source
from protokv.video.bucket import fingerprint, list_objects
from protokv.video.registry import fingerprint_source
from protokv.words.find import words_of
from tests.fleet.conftest import InlinePool, ends, outcomes

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from tests.state.s3 import S3Server

VIDEOS = "s3://bucket/videos/"


@pytest.fixture(scope="module")
def server(films: Path) -> Iterator[S3Server]:
    with S3Server() as made:
        for path in films.rglob("*.*"):
            made.put(f"videos/{path.relative_to(films).as_posix()}", path.read_bytes())
        yield made


@pytest.fixture
def in_bucket(recipe: Recipe, tmp_path: Path) -> Recipe:
    """The recipe with a new prefix for its states and fewer commits."""
    options = replace(recipe.options, every=Every(n_steps=3))
    return replace(recipe, place=f"s3://bucket/{tmp_path.name}", options=options)


def check_same_memory(state: str, expected: bytes, tmp_path: Path) -> None:
    """Compare stream and tensors with a state that was made from files."""
    (tmp_path / "single.safetensors").write_bytes(expected)
    mine, single = storage.load_state(state), storage.load_state(tmp_path / "single.safetensors")
    assert (mine.clock, mine.complete) == (single.clock, True)
    assert mine.tensors.keys() == single.tensors.keys()
    assert all(torch.equal(tensor, single.tensors[name]) for name, tensor in mine.tensors.items())


@pytest.mark.usefixtures("store")
def test_a_prefix_and_a_pattern_are_planned_as_a_folder_and_a_glob_are() -> None:
    assert [(job.key, job.source) for job in plan([VIDEOS])] == [
        ("a", "s3://bucket/videos/a.mp4"),
        ("b", "s3://bucket/videos/b.mkv"),
        ("broken", "s3://bucket/videos/broken.mp4"),
        ("sub/c", "s3://bucket/videos/sub/c.mp4"),
    ]
    assert [job.key for job in plan(["s3://bucket/videos/*.mp4"])] == ["a", "broken", "sub/c"]
    assert [job.key for job in plan(["s3://bucket/videos/s*/*"])] == ["sub/c"]
    assert [job.key for job in plan(["s3://bucket/videos/a.mp4"])] == ["a"]
    with pytest.raises(SourceNotFound, match="there is no video in s3://bucket/nothing/"):
        plan(["s3://bucket/nothing/"])


def refused(*_: object, **__: object) -> None:
    from obstore.exceptions import GenericError

    raise GenericError("Server returned non-2xx status code: 403 Forbidden")


def test_subtitles_beside_an_object_are_found_like_those_beside_a_file(
    store: S3Server, films: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = "s3://bucket/talks/talk.mp4"
    for name in ("talk.mp4", "talk.en.vtt", "talk.de.srt", "talks.srt", "talk.x/y.srt", "other.srt", "t.srt"):
        words = "WEBVTT\n\n00:00.000 --> 00:01.000\n" if name.endswith("vtt") else "1\n00:00:00,000 --> 00:00:01,000\n"
        store.put(f"talks/{name}", f"{words}{name}\n".encode())
    with open_source(films / "a.mp4") as source:
        for choice, name in (("auto", "talk.en.vtt"), ("de", "talk.de.srt"), ("s3://bucket/talks/t.srt", "t.srt")):
            words = words_of(source, video, choice)
            assert words is not None
            assert (words.between(0.0, 1.0), words.record["name"]) == ([name], name)
        assert words_of(source, "s3://bucket/talks/talks.mp4", "auto").record["name"] == "talks.srt"  # type: ignore[union-attr]
        # Whoever may not list reads the video all the same.
        monkeypatch.setattr("obstore.store.S3Store.list", refused)
        assert words_of(source, video, "auto") is None


def test_an_object_is_read_like_its_file_and_leaves_no_copy(
    store: S3Server, films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_source("s3://bucket/videos/a.mp4") as there, open_source(films / "a.mp4") as here:
        assert list(tmp_path.iterdir())
        assert replace(there.info, kind="file", fingerprint=here.info.fingerprint) == here.info
        assert there.info.kind == "s3"
        assert there.info.fingerprint == fingerprint_source("s3://bucket/videos/a.mp4") != here.info.fingerprint
        pairs = zip(there.frames(), here.frames(), strict=True)
        assert all((a.time_s, a.image.tobytes()) == (b.time_s, b.image.tobytes()) for a, b in pairs)
        assert there.damage.ok
    assert not list(tmp_path.iterdir())
    store.put("other/a.mp4", (films / "a.mp4").read_bytes())
    before = fingerprint("s3://bucket/other/a.mp4")
    store.put("other/a.mp4", (films / "b.mkv").read_bytes())
    assert fingerprint("s3://bucket/other/a.mp4") != before


@pytest.mark.usefixtures("store")
def test_an_unreadable_object_is_one_error_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SourceNotFound, match=r"there is nothing at s3://bucket/videos/gone\.mp4"):
        open_source("s3://bucket/videos/gone.mp4")
    with pytest.raises(SourceUnreadable, match=r"cannot open s3://bucket/videos/broken\.mp4"):
        open_source("s3://bucket/videos/broken.mp4")
    with pytest.raises(SourceUnreadable, match="names no bucket"):
        open_source("s3://")
    for verb in ("head", "list"):
        monkeypatch.setattr(f"obstore.store.S3Store.{verb}", refused)
    for ask in (lambda: fingerprint("s3://bucket/videos/a.mp4"), lambda: list(list_objects(VIDEOS))):
        with pytest.raises(SourceError, match="cannot read s3://bucket/videos/"):
            ask()
    assert not list(tmp_path.iterdir())


def test_a_bucket_becomes_a_bucket_of_states_and_then_nothing_is_left(
    store: S3Server, in_bucket: Recipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    remote, place = [job for job in plan([VIDEOS]) if job.key != "broken"], f"{in_bucket.place}/"
    assert ends(outcomes(remote, InlinePool(in_bucket, 2), in_bucket)) == dict.fromkeys(singly, ("watched", 1))
    # Objects beside a state and at other prefixes are ignored.
    for key in (f"{tmp_path.name}/notes.txt", f"{tmp_path.name}-y/d.safetensors"):
        store.put(key, b"")
    assert find_states(place) == [locate_state(place, key) for key in ("a", "b", "sub/c")]
    for key, single in singly.items():
        check_same_memory(locate_state(place, key), single, tmp_path)
    assert [(row["source"], row["complete"]) for row in survey(place)] == [
        ("a.mp4", True),
        ("b.mkv", True),
        ("c.mp4", True),
    ]
    before = store.objects()
    again = outcomes(remote, InlinePool(in_bucket), in_bucket)
    assert {one.status for one in again.values()} == {"done"}
    assert store.objects() == before


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("place", ["recipe", "in_bucket"])
def test_two_fleets_at_one_place_never_lose_or_double_a_state(
    place: str, request: pytest.FixtureRequest, jobs: list[Job], singly: dict[str, bytes], tmp_path: Path
) -> None:
    recipe: Recipe = request.getfixturevalue(place)
    jobs = [job for job in jobs if job.key != "b"]
    both, met = threading.Barrier(2), set[tuple[int, object]]()
    found: dict[int, dict[str, Outcome]] = {}

    def meet(index: int, verb: str, args: tuple[object, ...]) -> None:
        """Wait for the other fleet before a video is watched for the first time, unless the other has ended."""
        if verb == "watch" and (key := (threading.get_ident(), args[0].job)) not in met:
            met.add(key)
            with suppress(threading.BrokenBarrierError):
                both.wait(20)

    def run(fleet: int) -> None:
        found[fleet] = outcomes(jobs, InlinePool(recipe, 1, meet), recipe)
        both.abort()

    threads = [threading.Thread(target=run, args=(fleet,)) for fleet in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A third run finishes what they left.
    outcomes(jobs, InlinePool(recipe), recipe)
    failures = [one.failure for ends in found.values() for one in ends.values() if one.failure]
    assert {failure.kind for failure in failures} <= {"StateLocked"}
    for job in jobs:
        check_same_memory(locate_state(recipe.place, job.key), singly[job.key], tmp_path)
    assert find_states(f"{recipe.place}/") == [locate_state(recipe.place, job.key) for job in jobs]
