"""The page in a real browser: the system's Chromium, without a window, and a server on loopback."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protokv.core.parts import Evidence, Moment, Said
from protokv.core.session import Answer, Session
from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.serve import page as page_routes
from protokv.state import checkpoint
from protokv.state.api import load_state, save_state
from protokv.state.watched import WallClockLog
from tests.cli.conftest import write_video
from tests.mock_backbone import MockBackbone
from tests.serve.test_serve import server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

SCRIPT = "<img src=x onerror=document.title='hacked'>"
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three states: one whose video is at hand, one that is live, and one with a name that is a script."""
    folder = tmp_path_factory.mktemp("states")
    config, model = DurableConfig(budget=40), MockBackbone()
    list(ingest(write_video(folder / "clip.mp4", 12), folder / "clip.safetensors", config, backbone=model))
    state = load_state(folder / "clip.safetensors")
    log = WallClockLog(anchors=[(0.0, time.time() - 12)], committed_at=time.time())
    log.lose(11.0, "no frames")
    live = {"name": "rtsp://camera/1", "kind": "rtsp", "live": log.to_dict()}
    save_state(replace(state, source=live, complete=False), folder / "door.safetensors")
    save_state(replace(state, source={**(state.source or {}), "name": SCRIPT}), folder / f"{SCRIPT}.safetensors")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with server(folder, videos=(folder,)) as address:
        yield f"http://{address}/"


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Open a page in a tab of its own; it must not fail in any script, nor ask another server for anything."""
    wrong: list[str] = []
    contexts = []

    def open_page(address: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        origin = "/".join(address.split("/")[:3])
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith((origin, "data:")) or wrong.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Answer in two words, the second of them once the event is set; they stand on second 7."""
    go = threading.Event()

    def stream(session: Session, question: str, _: Any, *, evidence: bool, **__: Any) -> Any:
        yield SCRIPT
        assert go.wait(30)
        yield " star"
        found = Evidence((Moment(7.0, 8.0, 0.61, (Said(7.0, 8.0, SCRIPT),)),), True) if evidence else None
        beyond = bool(session.beyond_model)
        return Answer(question, f"{SCRIPT} star", 12.0, 1.0, 2.0, 20, 2, -0.1, evidence=found, beyond_model=beyond)

    monkeypatch.setattr(Session, "stream", stream)
    return go


def test_an_answer_comes_in_pieces_and_plays_the_moment_that_it_stood_on(
    opened: Any, address: str, words: threading.Event
) -> None:
    page = opened(f"{address}#clip")
    page.wait_for_selector("#player:not([hidden])")
    assert page.locator("#strip img").count() == 12
    # With the keyboard alone.
    page.focus("#question")
    page.keyboard.type("What appeared?")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".answer")).to_have_text(SCRIPT)
    assert page.locator("#send").inner_text() == "Stop"
    words.set()
    playwright.expect(page.locator(".answer")).to_have_text(f"{SCRIPT} star")
    moment = page.get_by_role("button", name="Stood on 0:07 to 0:08")
    assert "61\u00a0% of attention" in moment.inner_text()
    playwright.expect(page.locator("article")).to_contain_text(f"0:07 {SCRIPT}")
    page.evaluate(
        """() => {
            const video = document.querySelector("video");
            window.seeked = new Promise(go => {
                video.addEventListener("seeked", () => go(video.currentTime));
                setTimeout(go, 20_000, -1);
            });
        }"""
    )
    moment.focus()
    page.keyboard.press("Enter")
    assert 6.9 <= page.evaluate("() => window.seeked") < 8.5
    assert page.title() == "clip · ProtoKV"
    assert page.locator("#send").inner_text() == "Ask"


def test_a_question_goes_on_from_the_answers_before_it_until_start_over_or_another_state(
    opened: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[tuple[str, str]]] = []
    waiting = threading.Event()

    def stream(session: Session, question: str, _: Any, *, turns: Any, **__: Any) -> Any:
        heard.append(list(turns))
        yield f"{question}! "
        assert question != "wait" or waiting.wait(30)
        return Answer(question, f"{question}!", 12.0, 1.0, 2.0, 20, 2, -0.1, turns=min(len(turns), 1))

    monkeypatch.setattr(Session, "stream", stream)
    page = opened(f"{address}#clip")

    def ask(text: str, *, stop: bool = False) -> None:
        page.fill("#question", text)
        page.press("#question", "Enter")
        playwright.expect(page.locator(".answer").first).to_contain_text(f"{text}!")
        if stop:
            page.press("#question", "Enter")
        playwright.expect(page.locator("#send")).to_have_text("Ask")

    page.wait_for_selector("#ask:not([hidden])")
    ask("wait", stop=True)
    waiting.set()
    playwright.expect(page.locator("#talk")).to_be_hidden()
    for text in ("one", "two", "three"):
        ask(text)
    playwright.expect(page.locator("article").first).to_contain_text("Earlier questions that the model read: 1 of 2.")
    # With the keyboard alone.
    page.focus("#send")
    page.keyboard.press("Tab")
    playwright.expect(page.get_by_role("button", name="Start over")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.locator("article").count() == 0
    playwright.expect(page.locator("#talk")).to_be_hidden()
    playwright.expect(page.locator("#question")).to_be_focused()
    ask("four")
    page.get_by_role("link", name="door").click()
    playwright.expect(page.locator("#name")).to_have_text("door")
    ask("five")
    one, two = ("one", "one!"), ("two", "two!")
    assert heard == [[], [], [one], [one, two], [], []]


def test_names_and_answers_are_text_whatever_they_hold(opened: Any, address: str, words: threading.Event) -> None:
    words.set()
    page = opened(address)
    page.get_by_role("link", name=SCRIPT).click()
    playwright.expect(page.locator("#name")).to_have_text(SCRIPT)
    playwright.expect(page.locator("#why")).to_contain_text("No player:")
    page.fill("#question", SCRIPT)
    page.press("#question", "Enter")
    playwright.expect(page.locator(".answer")).to_have_text(f"{SCRIPT} star")
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == f"{SCRIPT} · ProtoKV"
    assert page.locator(".shot:enabled").count() == 0


def test_a_phone_shows_the_list_and_then_one_state_in_light_and_in_dark(opened: Any, address: str) -> None:
    papers = set()
    for scheme in ("light", "dark"):
        page = opened(address, viewport={"width": 320, "height": 640}, color_scheme=scheme)
        page.wait_for_selector("#states li:nth-child(3) img")
        assert not page.is_visible("#main")
        page.get_by_role("link", name="clip").click()
        page.wait_for_selector("#player:not([hidden])")
        assert not page.is_visible("nav")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 320
        page.get_by_role("link", name="All states").click()
        playwright.expect(page.locator("nav")).to_be_visible()
        papers.add(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2


def test_a_live_state_shows_its_clock_and_what_is_wrong(
    opened: Any, folder: Path, words: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (page_routes, checkpoint):
        monkeypatch.setattr(module, "beyond_model", lambda _: ["rtsp://camera/1"])
    words.set()
    with server(folder) as address:
        check_a_live_state(opened(f"http://{address}/#door"))


def check_a_live_state(page: Any) -> None:
    playwright.expect(page.locator("#live")).to_be_visible()
    playwright.expect(page.locator("#facts")).to_contain_text("last seen")
    playwright.expect(page.locator("#facts")).to_contain_text("ago (source lost)")
    playwright.expect(page.locator("#facts")).to_contain_text("0:12 so far")
    playwright.expect(page.locator(".warn")).to_contain_text("rtsp://camera/1 is not of it: its answers mean nothing")
    page.fill("#question", "what is it")
    page.press("#question", "Enter")
    playwright.expect(page.locator("article .warn")).to_have_text("An answer would mean nothing: see above.")
    page.get_by_role("button", name="Ask all the same").click()
    playwright.expect(page.locator("article .warn")).to_have_text("This answer means nothing: see above.")
    assert page.locator("article").count() == 1


def test_the_page_asks_for_the_token_and_keeps_it_in_its_tab(opened: Any, folder: Path) -> None:
    with server(folder, videos=(folder,), token="right") as address:
        page = opened(f"http://{address}/#clip")
        page.wait_for_selector("#door:not([hidden])")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#refused")).to_have_text("The token is wrong.")
        assert page.locator("#states li").count() == 0
        page.fill("#token", "right")
        page.keyboard.press("Enter")
        page.wait_for_selector("#player:not([hidden])")
        page.reload()
        page.wait_for_selector("#player:not([hidden])")
        playwright.expect(page.locator("video")).to_have_js_property("duration", 12)
        page.context.close()
