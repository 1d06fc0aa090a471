"""The page in a real browser: the system's Chromium, without a window, and a server on loopback."""

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from protokv.core.parts import Utterance
from protokv.state.checkpoint import save_state
from protokv.state.commit import lock
from protokv.state.reader import load_state
from protokv.state.sources import WallClockLog
from protokv.stream.answer import Answer
from protokv.stream.evidence import Evidence, EvidenceSpan
from protokv.stream.session import Session
from tests.serve.conftest import server, watch

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

SCRIPT = "<img src=x onerror=document.title='hacked'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three states: one of a file, one that is live, and one with a name that is a script."""
    folder = tmp_path_factory.mktemp("states")
    watch(folder / "clip.safetensors", 0, 24)
    state = load_state(folder / "clip.safetensors")
    log = WallClockLog(anchors=[(0.0, time.time() - 12)], committed_at=time.time())
    log.begin_gap(11.0, "no frames")
    live = {"name": "rtsp://camera/1", "kind": "rtsp", "live": asdict(log)}
    save_state(replace(state, source=live, complete=False), folder / "door.safetensors")
    save_state(
        replace(state, source={**(state.source or {}), "name": SCRIPT}),
        folder / f"{SCRIPT}.safetensors",
    )
    return folder


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Open a page in a tab of its own; it must not fail in any script, nor ask another server for
    anything.
    """
    wrong = list[str]()
    contexts = list[Any]()

    def open_page(address: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        origin = "/".join(address.split("/")[:3])
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith((origin, "data:")) or wrong.append(request.url),
        )
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

    def stream(_: Session, question: str, __: Any, *, evidence: bool, **___: Any) -> Any:
        yield SCRIPT
        assert go.wait(30)
        yield " star"
        found = (
            Evidence((EvidenceSpan(7.0, 8.0, 0.61, (Utterance(7.0, 8.0, SCRIPT),)),), True)
            if evidence
            else None
        )
        return Answer(question, f"{SCRIPT} star", 12.0, 1.0, 2.0, 20, 2, -0.1, evidence=found)

    monkeypatch.setattr(Session, "begin_answer", stream)
    return go


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with server(folder) as address:
        yield f"http://{address}/"


def test_an_answer_comes_in_pieces_as_text_with_its_spans(
    opened: Any, address: str, words: threading.Event
) -> None:
    page = opened(address)
    page.get_by_role("link", name=SCRIPT).click()
    playwright.expect(page.locator("#name")).to_have_text(SCRIPT)
    assert page.locator("#strip img").count() == 12
    playwright.expect(page.locator("#standing li").first).to_contain_text("0:12 what is it")
    # With the keyboard alone.
    page.focus("#question")
    page.keyboard.type("What appeared?")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".answer")).to_have_text(SCRIPT)
    assert page.locator("#send").inner_text() == "Stop"
    words.set()
    playwright.expect(page.locator(".answer")).to_have_text(f"{SCRIPT} star")
    playwright.expect(page.locator("article li")).to_contain_text("61\u00a0% of attention")
    playwright.expect(page.locator("article")).to_contain_text(f"0:07 {SCRIPT}")
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == f"{SCRIPT} · ProtoKV"
    # On a phone the page scrolls to each answer.
    page = opened(f"{address}#clip", viewport={"width": 390, "height": 420}, has_touch=True)
    for _ in range(3):
        page.fill("#question", "What appeared?")
        page.tap("#send")
        playwright.expect(page.locator("article").first).to_contain_text("61\u00a0% of attention")
        playwright.expect(page.locator("article .answer").first).to_be_in_viewport(ratio=1)


def test_a_live_state_has_its_clock_and_the_page_asks_for_the_token(
    opened: Any, folder: Path
) -> None:
    with lock(folder / "door.safetensors"), server(folder, token="right") as address:
        page = opened(f"http://{address}/#door")
        page.wait_for_selector("#door:not([hidden])")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#refused")).to_have_text("The token is wrong.")
        assert page.locator("#states li").count() == 0
        page.fill("#token", "right")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#live")).to_be_visible()
        playwright.expect(page.locator("#facts")).to_contain_text("ago (source lost)")
        page.reload()
        playwright.expect(page.locator("#facts")).to_contain_text("0:12 so far")
