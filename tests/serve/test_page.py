"""The routes of the page: what they tell, whom they tell it, and which files they never show."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from protokv.errors import ConfigError, SourceNotFound, StateMismatch, StateNotFound
from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.serve import States, build_app
from protokv.serve.access import Access
from protokv.serve.footage import Footage
from protokv.state.api import load_state, read_header, save_state
from protokv.video.file import fingerprint
from tests.cli.conftest import write_video
from tests.mock_backbone import MockBackbone

CONFIG = DurableConfig(budget=40)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a state, its video, and a file that is nobody's business."""
    folder = tmp_path_factory.mktemp("states")
    video = write_video(folder / "clip.mp4", 6)
    list(ingest(video, folder / "clip.safetensors", CONFIG, backbone=MockBackbone()))
    (folder / "secret.txt").write_text("nobody's business")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "states")


def client(folder: Path, host: str = "localhost", videos: Path | None = None, **options: Any) -> TestClient:
    app = build_app(States(folder, MockBackbone()), videos=(videos or folder,), **options)
    return TestClient(app, base_url=f"http://{host}")


def claim(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let the state claim another source; it is sealed anew, as a hostile maker would."""
    path = folder / "clip.safetensors"
    state = load_state(path)
    save_state(replace(state, source=change(dict(state.source or {}))), path)


def src(one: TestClient) -> str:
    (video,) = one.get("/page/videos?name=clip").json()["videos"]
    return "/" + video["src"]


def test_a_state_is_told_with_its_pictures_and_its_video_comes_in_ranges(made: Path) -> None:
    with client(made) as one:
        found = one.get("/page/state?name=clip").json()
        assert (found["duration_s"], found["complete"], found["live"]) == (6.0, True, None)
        assert [picture["time_s"] for picture in found["thumbnails"]] == [0, 1, 2, 3, 4, 5]
        assert all(picture["src"].startswith("data:image/jpeg;base64,/9j/") for picture in found["thumbnails"])
        (video,) = one.get("/page/videos?name=clip").json()["videos"]
        assert (video["start_s"], video["end_s"], video["skipped_s"]) == (0.0, 6.0, 0.0)
        whole = (made / "clip.mp4").read_bytes()
        assert one.get(src(one)).content == whole
        part = one.get(src(one), headers={"Range": "bytes=100-199"})
        assert (part.status_code, part.content, part.headers["content-type"]) == (206, whole[100:200], "video/mp4")
        assert part.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_a_state_names_is_shown_only_if_it_is_the_video_that_it_watched(folder: Path) -> None:
    secret = folder / "secret.txt"
    known = {"fingerprint": fingerprint(secret), "size_bytes": secret.stat().st_size}
    head = (folder / "clip.mp4").read_bytes()[:8]
    beginning = hashlib.sha256((8).to_bytes(8, "little") + head).hexdigest()
    shutil.copy(folder / "clip.mp4", folder.parent / "clip.mp4")
    (folder / "link.mp4").symlink_to(folder.parent / "clip.mp4")
    passwd = Path("/etc/passwd")
    claims: dict[str, dict[str, Any]] = {
        "another file": {"name": "secret.txt"},
        "another file, known": {"name": "secret.txt", **known},
        "a path": {"name": "/etc/passwd", "fingerprint": fingerprint(passwd), "size_bytes": passwd.stat().st_size},
        "a path up": {"name": "../clip.mp4"},
        "a link": {"name": "link.mp4"},
        "the first bytes of any video": {"fingerprint": beginning, "size_bytes": 8},
        "no name": {"name": None},
        "no file": {"kind": "rtsp"},
        "the folder": {"name": "."},
    }
    for what, change in claims.items():
        shutil.copy(folder.parent / "clip.mp4", folder / "clip.mp4")
        claim(folder, lambda record, change=change: {**record, **change})
        with client(folder) as one:
            found = one.get("/page/videos?name=clip").json()
            assert found["videos"] == [], what
            assert len(found["why"].splitlines()) == 1, what
            assert one.get("/page/video?name=clip&source=0").status_code >= 400, what
        list(ingest(folder / "clip.mp4", folder / "clip.safetensors", CONFIG, backbone=MockBackbone(), overwrite=True))


def test_a_video_is_not_shown_once_it_changed_or_if_it_lies_elsewhere(folder: Path, tmp_path: Path) -> None:
    with client(folder) as one:
        address = src(one)
        write_video(folder / "clip.mp4", 6, seed=1)
        assert one.get(address).status_code == 409
        (folder / "clip.mp4").unlink()
        assert one.get(address).status_code == 404
    (tmp_path / "videos").mkdir()
    with client(folder, videos=tmp_path / "videos") as one:
        assert "not at hand" in one.get("/page/videos?name=clip").json()["why"]


def test_with_a_token_the_page_is_told_nothing_without_it_and_a_player_needs_a_ticket(made: Path) -> None:
    private = ("/page/state?name=clip", "/page/videos?name=clip", "/v1/models", "/page/video?name=clip&source=0")
    with client(made, host="anywhere.example", token="right") as one:
        assert one.get("/health").json() == {"status": "ok"}
        assert {one.get(path).status_code for path in private} == {401}
        assert "clip" not in one.get("/").text
        one.headers["Authorization"] = "Bearer right"
        assert [one.get(path).status_code for path in private] == [200, 200, 200, 401]
        address = src(one)
        del one.headers["Authorization"]
        assert one.get(address).status_code == 200
        for wrong in (
            address[:-1] + "x",
            address.replace("source=0", "source=1"),
            address.replace("ticket=", "ticket=9"),
        ):
            assert one.get(wrong).status_code == 401


HERE = ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "here.example")
# What a browser sends for the page of another site, and what one parser of addresses or another takes for our name.
ELSEWHERE = [
    "evil.example",
    "localhost.",
    "127.0.0.1.",
    "127.1",
    "0x7f000001",
    "[::ffff:127.0.0.1]",
    "[::1%25lo]",
    "::1",
    "[::1",
    "0.0.0.0",
    "evil.example:99999",
    "evil@localhost",
    "localhost@evil.example",
    "localhost:80@evil.example",
    "localhost/.evil",
    "localhost?.evil",
    "localhost#.evil",
    "localhost,evil",
    "%6cocalhost",
    "none",
]


def test_without_a_token_only_names_of_this_machine_and_pages_of_this_server_are_answered() -> None:
    access = Access(None, "HERE.example")
    for host in HERE:
        for origin in ({}, {"origin": f"http://{host}"}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
            access.check(Headers({"host": host, **origin}))
    for host in (*ELSEWHERE, "", " ", "localhost evil", "localhost\\.evil", "localhost\tevil", "\xe9vil.example"):
        with pytest.raises(HTTPException, match="403"):
            access.check(Headers({"host": host}))
    with pytest.raises(HTTPException, match="403"):
        access.check(Headers({}))
    sites = [
        {"origin": o} for o in ("null", "http://evil.example", "http://localhost:3000", "https://localhost", "file://")
    ]
    for site in (*sites, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}):
        with pytest.raises(HTTPException, match="403"):
            access.check(Headers({"host": "localhost", **site}))
    with pytest.raises(HTTPException, match="403"):
        Access(None).check(Headers({"host": "none"}))


def test_a_token_counts_only_as_bearer_and_only_once() -> None:
    access = Access("right")
    for given in ("Bearer right", "bearer right", "BEARER  right "):
        access.check(Headers({"authorization": given}))
    for given in ("right", "Basic right", "Bearer", "Bearer \xe9", "Bearer Bearer right", "Bearer righ", ""):
        with pytest.raises(HTTPException, match="401"):
            access.check(Headers({"authorization": given}))
    twice = Headers(raw=[(b"authorization", b"Bearer right")] * 2)
    for headers in (twice, Headers({})):
        with pytest.raises(HTTPException, match="401"):
            access.check(headers)
    for token in ("", "two words", "t\xf6ken", "\udcff"):
        with pytest.raises(ConfigError, match="visible ASCII"):
            Access(token)


def test_no_link_and_no_pipe_leads_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    state = folder / "clip.safetensors"
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    (folder / "inner.safetensors").symlink_to(state)
    (folder / "outer.safetensors").symlink_to(elsewhere / state.name)
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "linked").symlink_to(elsewhere, target_is_directory=True)
    (folder / "linked.zarr").symlink_to(elsewhere, target_is_directory=True)
    os.mkfifo(folder / "pipe.safetensors")
    shutil.copy(state, folder / "\udcff.safetensors")
    save_state(load_state(state), folder / "nested.zarr")
    (folder / "nested.zarr" / "out").symlink_to(elsewhere, target_is_directory=True)
    with client(folder) as one:
        names = {model["id"] for model in one.get("/v1/models").json()["data"]}
        assert names == {"clip", "inner", "\\xff", "nested"}
        assert one.get("/page/state?name=inner").status_code == 200
        assert one.get("/page/state?name=nested").status_code == 404
        # It becomes a link after it was found.
        state.unlink()
        state.symlink_to(elsewhere / state.name)
        with pytest.raises(StateNotFound, match="leads elsewhere"):
            States(folder, MockBackbone()).session(state)


def test_the_file_that_was_looked_into_is_sent_and_no_other_of_its_name(folder: Path, tmp_path: Path) -> None:
    secret, video = tmp_path / "secret.mp4", folder / "clip.mp4"
    footage, header = Footage([folder]), read_header(folder / "clip.safetensors")
    (found,) = footage.find(header, Path("clip.safetensors"))
    os.close(found.open())
    # Size and times are made the same, as whoever owns the folder can.
    secret.write_bytes(b"s" * video.stat().st_size)
    os.utime(secret, ns=(0, video.stat().st_mtime_ns))
    video.unlink()
    video.symlink_to(secret)
    with pytest.raises(SourceNotFound, match="changed"):
        found.open()
    with pytest.raises(StateMismatch):
        footage.find(header, Path("clip.safetensors"))


def test_hostile_pictures_and_names_are_refused_in_a_line(folder: Path) -> None:
    path = folder / "clip.safetensors"
    state = load_state(path)
    bad = {**state.tensors, "thumbnails.jpeg": torch.zeros_like(state.tensors["thumbnails.jpeg"])}
    save_state(replace(state, tensors=bad), path)
    with client(folder) as one:
        refused = one.get("/page/state?name=clip")
        assert (refused.status_code, "thumbnails.jpeg" in refused.json()["error"]["message"]) == (409, True)
        for name in ("../clip", "clip.safetensors/..", "", "%00", quote("/etc/passwd")):
            assert one.get(f"/page/state?name={name}").status_code == 404
        for number in ("-1", "1", "x", "9" * 99, "٣", ""):
            assert one.get(f"/page/video?name=clip&source={quote(number)}").status_code in (404, 409)


def test_the_page_loads_nothing_from_elsewhere_and_inserts_text_as_text(made: Path) -> None:
    with client(made) as one:
        page = one.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http:" not in page.text
    assert "https:" not in page.text
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in page.text
