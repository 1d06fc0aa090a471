"""The site of the documentation builds without a warning, names all that the code has, and asks no
other machine.
"""

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from protokv.ingestion import IngestEvent
from tests.cli.conftest import Program
from tests.fleet.conftest import InlinePool

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built site. A broken link or anchor, or a page that no menu has, fails the
    build.
    """
    folder = tmp_path_factory.mktemp("site")
    build = [
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        "docs/site/mkdocs.yml",
        "-d",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *build],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.wide
def test_the_page_of_json_has_every_key(
    site: Path, embedded: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (site / "reference" / "json.html").read_text(encoding="utf-8")
    for record in get_args(IngestEvent):
        assert all(f"<code>{one.name}</code>" in page for one in fields(record)), record
    embedded("ingest", ROOT / "samples" / "short" / "video.mp4", "--json")
    asked = embedded(
        *("query", "video.safetensors", "-", "--evidence", "--timings"),
        stdin='{"question": "What shape appeared first?", "answer": "star"}',
    )
    monkeypatch.setattr(
        "protokv.fleet.LocalWorkerPool", lambda recipe, n, *_: nullcontext(InlinePool(recipe, n))
    )
    shutil.copytree(ROOT / "samples" / "short", "videos")
    fleet = ("ingest", "videos/", "-o", "states/", "--json")
    rows = [*asked.rows(), *embedded(*fleet, "--dry-run").rows(), *embedded(*fleet).rows()]
    assert {row.get("type") for row in rows} >= {None, "plan", "forecast", "video", "fleet"}
    assert not [key for row in rows for key in row if f"<code>{key}</code>" not in page]


def test_no_name_of_the_reference_lacks_its_text_and_no_page_asks_another_machine_for_anything(
    site: Path,
) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        source = page.read_text("utf-8")
        assert "from the code:" not in source, page
        assert "No text." not in html.unescape(re.sub(r"<[^>]+>", "", source)), page
        loaded = re.findall(
            r"<(?:script|img|link|iframe|source)[^>]*?(?:src|href)=\"?([^\s\">]+)", source
        )
        assert loaded
        assert not [
            address for address in loaded if "://" in address or address.startswith("//")
        ], page
    for file in (*site.rglob("*.css"), *site.rglob("*.svg")):
        assert not re.search(r"(?:url\(|@import )[\"']?https?:", file.read_text("utf-8")), file


def test_the_pages_of_the_reference_say_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    import reference

    found = [
        part
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for part in reference.PART.finditer(page.read_text())
    ]
    assert {name for _, name, *_ in (part.groups() for part in found)} == reference.TABLES.keys()
    # The numbers of a run differ from run to run.
    stale = [
        part[2] for part in found if part[2] != "runs" and part[3] != reference.TABLES[part[2]]()
    ]
    assert not stale, "write them again: python docs/site/reference.py --write"
