"""Draw terminal.svg: three commands about the ten-minute video, and their output.

python samples/terminal.py [FILE]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from textwrap import wrap
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

SAMPLES = Path(__file__).parent
COMMANDS = (
    ("ingest", "video.mp4", "--budget", "512"),
    ("query", "video.safetensors", "Where did the cross appear?"),
    ("inspect", "video.safetensors"),
)
WIDTH = 80
ON_DISK = re.compile(r"^( file bytes| size) +([\d.]+) KiB")


def run(command: Sequence[str], folder: Path) -> list[str]:
    """Run a command as on a terminal; return its lines without blank ones and the progress."""
    arguments = [
        str(SAMPLES / "long" / "video.mp4") if part == "video.mp4" else part for part in command
    ]
    program = [sys.executable, "-m", "protokv", *arguments, "--format", "table"]
    done = subprocess.run(
        program,
        cwd=folder,
        env=os.environ | {"COLUMNS": str(WIDTH), "PROTOKV_MODEL": "protokv/mini"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        check=True,
    )
    return wrap_lines(line for line in done.stdout.splitlines() if "frames/s, state" not in line)


def wrap_lines(lines: Iterable[str]) -> list[str]:
    """Return lines as a terminal of the picture's width shows them, without blank ones."""
    return [part for line in lines for part in wrap(line.rstrip(), WIDTH, break_on_hyphens=False)]


def draw(answers: Iterable[tuple[Sequence[str], Sequence[str]]]) -> str:
    """Draw commands, each with its lines, as an SVG."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for command, lines in answers:
        words = " ".join(f'"{part}"' if " " in part else part for part in command)
        console.print(Text.assemble(("$ ", "bold green"), (f"protokv {words}", "bold")))
        for line in lines:
            console.print(Text(line), soft_wrap=True)
    # The picture ends within the last line.
    console.print()
    # Rich names fonts on another machine, and a picture must not ask it.
    svg = console.export_svg(title="protokv", unique_id="terminal")
    return re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL)


def read_lines(svg: str) -> list[str]:
    """Return the lines of text of a drawing, the commands too, without its title.

    Raises:
        ElementTree.ParseError: it is not XML.
    """
    lines: dict[float, str] = {}
    for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if "clip-path" in text.attrib:
            height = float(text.attrib["y"])
            lines[height] = lines.get(height, "") + "".join(text.itertext())
    found = [line.replace("\N{NO-BREAK SPACE}", " ").rstrip() for _, line in sorted(lines.items())]
    return [line for line in found if line]


def drop_varying(lines: Iterable[str]) -> list[str]:
    """Remove the date, the seconds taken, the size on disk, which the header changes by a few
    bytes, and the one in memory, which depends on the processor."""
    timeless = (re.sub(r"^( written| elapsed) .*", r"\1", line) for line in lines)
    timeless = (re.sub(r"[\d.]+ MiB in memory", "MiB in memory", line) for line in timeless)
    return [ON_DISK.sub(r"\1", line).rstrip() for line in timeless]


def find_sizes(lines: Iterable[str]) -> list[float]:
    """Return every size on disk, in KiB."""
    return [float(size) for line in lines for _, size in ON_DISK.findall(line)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        svg = draw([(command, run(command, Path(folder))) for command in COMMANDS])
    Path(sys.argv[1] if len(sys.argv) > 1 else SAMPLES / "terminal.svg").write_text(
        svg, encoding="utf-8"
    )
