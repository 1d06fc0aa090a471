"""The routes of the page: what they show, and whom they answer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from protokv.errors import ConfigError, StateNotFound
from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.serve import States, build_app
from protokv.serve.access import Access
from tests.cli.conftest import write_video
from tests.mock_backbone import MockBackbone

CONFIG = DurableConfig(budget=40)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    video = write_video(folder / "clip.mp4", 6)
    list(ingest(video, folder / "clip.safetensors", CONFIG, backbone=MockBackbone()))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "states")


def client(folder: Path, host: str = "localhost", **options: Any) -> TestClient:
    return TestClient(build_app(States(folder, MockBackbone()), **options), base_url=f"http://{host}")


def test_a_state_is_shown_with_its_facts_and_pictures(made: Path) -> None:
    with client(made) as one:
        found = one.get("/page/state?name=clip").json()
    assert (found["duration_s"], found["complete"], found["live"]) == (6.0, True, None)
    assert [picture["time_s"] for picture in found["thumbnails"]] == [0, 1, 2, 3, 4, 5]
    assert all(picture["src"].startswith("data:image/jpeg;base64,/9j/") for picture in found["thumbnails"])


def test_with_a_token_nothing_is_said_of_a_state_without_it(made: Path) -> None:
    private = ("/page/state?name=clip", "/v1/models")
    with client(made, host="anywhere.example", token="right") as one:
        assert one.get("/health").json() == {"status": "ok"}
        assert {one.get(path).status_code for path in private} == {401}
        assert "clip" not in one.get("/").text
        one.headers["Authorization"] = "Bearer right"
        assert {one.get(path).status_code for path in private} == {200}


HERE = ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000")
# What a browser sends for the page of another site, and what one parser of addresses or another takes for our name.
ELSEWHERE = ["evil.example", "localhost.", "127.1", "0.0.0.0", "[::ffff:127.0.0.1]", "::1", "evil.example:99999"]
ELSEWHERE += ["evil@localhost", "localhost@evil.example", "localhost/.evil", "localhost,evil", "%6cocalhost", "none"]


def test_without_a_token_only_names_of_this_machine_and_pages_of_this_server_are_answered() -> None:
    access = Access(None)
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
    with client(folder) as one:
        names = {model["id"] for model in one.get("/v1/models").json()["data"]}
        assert names == {"clip", "inner", "\\xff"}
        assert one.get("/page/state?name=inner").status_code == 200
        # It becomes a link after it was found.
        state.unlink()
        state.symlink_to(elsewhere / state.name)
        with pytest.raises(StateNotFound, match="leads elsewhere"):
            States(folder, MockBackbone()).open_session(state)


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
