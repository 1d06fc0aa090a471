"""The house stays small: budgets of lines, one meaning for a name, and a method that can be read in one sitting."""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("protokv", "protokv_cli")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the repository")

# A command and the function that it calls do the same thing.
SHARED = {"ingest"}


def _count_lines(folder: Path, pattern: str = "**/*.py") -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob(pattern))


def _measure_rooms() -> dict[str, int]:
    """Return the lines of each room of `protokv`, of the command line, and of the files of no room."""
    rooms = {path.name: _count_lines(path) for path in (ROOT / "protokv").iterdir() if any(path.glob("*.py"))}
    return rooms | {"cli": _count_lines(ROOT / "protokv_cli"), "other": _count_lines(ROOT / "protokv", "*.py")}


def test_every_room_keeps_its_budget() -> None:
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["protokv"]["budget"]
    rooms = _measure_rooms()
    assert rooms.keys() == budget["rooms"].keys()
    lines = rooms | {"the product": sum(rooms.values()), "the tests": _count_lines(ROOT / "tests")}
    allowed = budget["rooms"] | {"the product": budget["product"], "the tests": budget["tests"]}
    over = [f"{name}: {lines[name]:,} lines of {most:,}" for name, most in allowed.items() if lines[name] > most]
    assert not over, "over budget, so take something away: " + "; ".join(over)


def _find_public_names() -> dict[str, set[str]]:
    """Return the public classes and functions at the top of modules, each with the modules that define it."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                names[node.name].add(str(path.relative_to(ROOT)))
    return names


def test_a_public_name_means_one_thing() -> None:
    twice = {name: sorted(where) for name, where in _find_public_names().items() if len(where) > 1}
    offenders = [f"{name}: {', '.join(where)}" for name, where in sorted(twice.items()) if name not in SHARED]
    assert not offenders, "\n".join(offenders)


def test_no_name_ends_in_of() -> None:
    defined = re.compile(r"^ *(?:async )?(?:def|class) (\w+_of)\b", re.MULTILINE)
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    found = {str(file.relative_to(ROOT)): defined.findall(file.read_text(encoding="utf-8")) for file in files}
    assert not {name: names for name, names in found.items() if names}


def test_the_method_can_be_read_in_one_sitting() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    chapter = guide.split("## The method in one sitting")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?\.py)` \| ([\d,]+) \|", chapter, re.MULTILINE)
    lines = {name: _count_lines((ROOT / "protokv" / name).parent, Path(name).name) for name, _ in rows}
    assert lines == {name: int(number.replace(",", "")) for name, number in rows}
    assert 0 < sum(lines.values()) <= 2500
