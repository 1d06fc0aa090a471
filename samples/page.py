"""Draw the picture of the page of `protokv serve`: `python -m samples.page`.

It watches the shipped samples with the embedded model, serves them on loopback, asks in Chromium
(`playwright`), and writes `docs/page.jpg`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import uvicorn
from playwright.sync_api import sync_playwright

import protokv
from protokv.serve import StateFolder, build_app, make_uvicorn_config

SAMPLES = Path(__file__).parent
PICTURE = SAMPLES.parent / "docs" / "page.jpg"
MOST_BYTES = 150_000
QUESTIONS = ("Where was the disk?", "What color was the star?")


def draw(folder: Path) -> None:
    """Watch, serve, ask, and take the picture of the page."""
    backbone = protokv.load_backbone("protokv/mini", device="cpu")
    for name in ("short", "minute", "long"):
        state = folder / f"{name}.safetensors"
        protokv.ingest(
            SAMPLES / name / "video.mp4",
            state,
            protokv.DurableConfig(budget=512),
            backbone=backbone,
        )
    server = uvicorn.Server(
        make_uvicorn_config(build_app(StateFolder(folder, backbone)), "127.0.0.1", 8765)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 700})
        page.goto("http://127.0.0.1:8765/#long")
        for question in QUESTIONS:
            page.fill("#question", question)
            page.press("#question", "Enter")
            page.get_by_role("button", name="Ask").wait_for(timeout=60_000)
        page.locator("#question").blur()
        page.screenshot(path=str(PICTURE), type="jpeg", quality=80)
        browser.close()
    server.should_exit = True
    thread.join()
    assert PICTURE.stat().st_size <= MOST_BYTES, f"{PICTURE} is too large"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))
