"""The house stays small: a budget of syntax nodes, short lines, one meaning a name, and a method
that can be read in one sitting.
"""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("protokv", "protokv_cli")

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="needs the repository"
)

# A command and the function that it calls do the same thing.
SHARED = {"ingest"}


def _count_lines(folder: Path, pattern: str = "**/*.py") -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob(pattern))


def _read_trees(*folders: str) -> dict[Path, ast.Module]:
    """Return the syntax tree of each Python file in these folders of the repository."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def _has_docstring(node: ast.AST) -> bool:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None


def _weigh(tree: ast.AST) -> int:
    """Return the syntax nodes of a tree without docstrings, each of which is two nodes."""
    return sum(1 - 2 * _has_docstring(node) for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("name", "folders"),
    [("product", PACKAGES), ("tests", ("tests",)), ("samples", ("samples",))],
)
def test_the_weight_in_syntax_nodes_stays_within_its_budget(
    name: str, folders: tuple[str, ...]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    most = project["tool"]["protokv"]["nodes"][name]
    weight = sum(_weigh(tree) for tree in _read_trees(*folders).values())
    assert weight <= most, f"{name}: {weight:,} syntax nodes of {most:,}; take something away"


def test_lines_have_at_most_100_characters() -> None:
    # Text of other people, in data sets and in binary files, stands as it is.
    free = re.compile(r"# (type: ignore|noqa)|^_PROMPT|^Decide whether|^    b\"")
    long = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in _read_trees(*PACKAGES, "tests", "samples")
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1)
        if len(line) > 100 and not free.search(line)
    ]
    assert not long, "\n".join(long)


def _is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment makes a tuple on its right side and takes it apart again."""
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def test_few_assignments_assign_tuples_to_tuples() -> None:
    nodes = [node for tree in _read_trees(*PACKAGES).values() for node in ast.walk(tree)]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    assert sum(map(_is_packed, assignments)) <= 0.03 * len(assignments)


def _find_public_names() -> dict[str, set[str]]:
    """Return the public classes and functions at the top of modules, each with the modules that
    define it.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                names[node.name].add(str(path.relative_to(ROOT)))
    return names


def test_a_public_name_means_one_thing() -> None:
    twice = {name: sorted(where) for name, where in _find_public_names().items() if len(where) > 1}
    offenders = [
        f"{name}: {', '.join(where)}" for name, where in sorted(twice.items()) if name not in SHARED
    ]
    assert not offenders, "\n".join(offenders)


def test_no_name_ends_in_of() -> None:
    defined = re.compile(r"^ *(?:async )?(?:def|class) (\w+_of)\b", re.MULTILINE)
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    found = {
        str(file.relative_to(ROOT)): defined.findall(file.read_text(encoding="utf-8"))
        for file in files
    }
    assert not {name: names for name, names in found.items() if names}


def test_the_method_can_be_read_in_one_sitting() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    chapter = guide.split("## The method in one sitting")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?\.py)` \| ([\d,]+) \|", chapter, re.MULTILINE)
    lines = {
        name: _count_lines((ROOT / "protokv" / name).parent, Path(name).name) for name, _ in rows
    }
    assert lines == {name: int(number.replace(",", "")) for name, number in rows}
    assert 0 < sum(lines.values()) <= 3400
