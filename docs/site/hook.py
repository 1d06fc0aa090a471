"""MkDocs hook: brings pages of other folders into the site, and fills the tables of the reference
from the code.

A page outside `docs/` has one copy, and `PAGES` says where it stands in the site. Links between
pages lead to files of the checkout; here they are turned to the place in the site. A link to a file
that is no page keeps its text only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "project/contents.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "samples/live/README.md": "project/live.md",
    "samples/README.md": "findings/samples.md",
    "samples/benchmarks/README.md": "findings/benchmarks.md",
    "samples/fleet/README.md": "findings/fleet.md",
    "samples/clients/README.md": "findings/clients.md",
    "samples/studies/delay/README.md": "findings/delay.md",
    "samples/studies/harder/README.md": "findings/harder.md",
    "samples/studies/language/README.md": "findings/language.md",
    "samples/studies/tuned/README.md": "findings/tuned.md",
    "samples/studies/evidence/README.md": "findings/evidence.md",
    "protokv/mini/README.md": "findings/mini.md",
    "tests/benchmarks/README.md": "findings/speed.md",
}
"""A page of the repository -> its place in the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"<!-- from the code: (\w+) -->\n.*?<!-- to here -->", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of other folders, and the pictures that they show."""
    from mkdocs.structure.files import File

    for source, place in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
        for mark, _, target, _ in LINK.findall(text):
            picture = normpath(join(dirname(source), target))
            if mark or picture.endswith(".png"):
                files.append(
                    File.generated(config, f"pictures/{picture}", abs_src_path=str(ROOT / picture))
                )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in tables from the code, and turn links to places of the site."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    markdown = TABLE.sub(lambda found: _from_code(found[1]), markdown)
    place = page.file.src_uri
    source = next((source for source, to in PAGES.items() if to == place), f"docs/{place}")
    # Odd parts are blocks of code.
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lambda found: _turn(found, source, place), part) for part in parts[::2]]
    return "".join(parts)


def _from_code(name: str) -> str:
    # Of the checkout, and not of what is installed.
    for folder in (str(ROOT), str(Path(__file__).parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    import reference

    return reference.TABLES[name]()


def _turn(link: re.Match[str], source: str, place: str) -> str:
    """Return a link from one page of the repository to another as a link between places of the
    site.
    """
    mark, text, target, anchor = link.groups(default="")
    if "://" in target or not target:
        return link[0]
    path = normpath(join(dirname(source), target))
    to = PAGES.get(path) or PAGES.get(f"{path}/README.md")
    if to is None and path.startswith("docs/"):
        to = path.removeprefix("docs/")
    if to is None and path.endswith((".png", ".svg")):
        to = f"pictures/{path}"
    if to is not None:
        return f"{mark}[{text}]({relpath(to, dirname(place) or '.')}{anchor})"
    # A file of the checkout, which the site does not have. A broken link stays, and `--strict`
    # names it.
    return text if (ROOT / path).exists() else link[0]
