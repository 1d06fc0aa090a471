"""The house stays small: a budget of syntax nodes, short lines, one meaning a name, and a method
that can be read in one sitting.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("protokv", "protokv_cli")
BENCHMARKS = ROOT / "tests/benchmarks"
TAKES_ANY_NUMBER = {
    *("zeros", "ones", "expand", "view", "reshape", "zip", "max", "min", "__init__"),
    # Tensors of a call, names of options, parts of a page, files and trees.
    *("run", "call", "list_set_options", "table", "refuse_input_as_target", "count_bytes"),
}

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="needs the repository"
)

# A command and the function that it calls do the same thing.
SHARED = {"ingest"}


def _read_files(*folders: str) -> dict[Path, str]:
    """Return the text of each Python file in these folders of the repository."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file: file.read_text(encoding="utf-8") for file in files}


def _read_trees(*folders: str) -> list[ast.Module]:
    """Return the syntax trees of these files."""
    return list(map(ast.parse, _read_files(*folders).values()))


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
    weight = sum(_weigh(tree) for tree in _read_trees(*folders))
    assert weight <= most, f"{name}: {weight:,} syntax nodes of {most:,}; take something away"


def _is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment makes a tuple on its right side and takes it apart again."""
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def test_few_assignments_assign_tuples_to_tuples() -> None:
    nodes = [node for tree in _read_trees(*PACKAGES) for node in ast.walk(tree)]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    assert sum(map(_is_packed, assignments)) <= 0.03 * len(assignments)


def _find_public_names() -> dict[str, set[str]]:
    """Return the public classes and functions at the top of modules, each with the modules that
    define it.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for path, text in _read_files(*PACKAGES).items():
        for node in ast.parse(text).body:
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
    found = {
        str(file.relative_to(ROOT)): defined.findall(text)
        for file, text in _read_files(*PACKAGES).items()
    }
    assert not {name: names for name, names in found.items() if names}


def test_the_method_can_be_read_in_one_sitting() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    chapter = guide.split("## The method in one sitting")[1].split("\n## ")[0]
    files = [ROOT / "protokv" / name for name in re.findall(r"^\| `(.+?\.py)` \|", chapter, re.M)]
    assert len(files) > 9
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 3450


def _read_comment_sentences(text: str) -> list[str]:
    """Return the sentences of the comments of a Python file; lines that follow each other are one
    comment.
    """
    comments: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"# *(noqa|type:)", token.string):
            continue
        alone = token.line.lstrip().startswith("#")
        words = token.string.lstrip("# ")
        if alone and token.start[0] == last + 1:
            comments[-1] += f" {words}"
        else:
            comments.append(words)
        last = token.start[0] if alone else -1
    return [one for comment in comments for one in re.split(r"(?<=[.!?])\s+", comment)]


def test_sentences_of_comments_begin_with_their_subject() -> None:
    each = map(_read_comment_sentences, _read_files("protokv").values())
    sentences = [one for found in each for one in found if re.match("[A-Za-z]", one)]
    odd = [one for one in sentences if re.match(r"(?i)(of|what|where|those|by|in|that)\b", one)]
    assert len(sentences) > 500
    assert len(odd) <= 0.06 * len(sentences), "\n".join(odd)


def _counts_on_a_star(call: ast.Call) -> bool:
    """Return whether a call stars something among other positions, as in `f(*pair, name)`. Sizes of
    tensors and other alike things may be given so, and a class may pass on what it gets.
    """
    starred = [isinstance(argument, ast.Starred) for argument in call.args]
    called = ast.unparse(call.func).rpartition(".")[2]
    return any(starred) and len(starred) > 1 and called not in TAKES_ANY_NUMBER


def test_no_call_stars_a_tuple_into_positions() -> None:
    calls = [
        node
        for tree in _read_trees(*PACKAGES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _counts_on_a_star(node)
    ]
    assert [ast.unparse(call) for call in calls] == []


def test_findings_are_short() -> None:
    pages = (*(ROOT / "samples").rglob("*.md"), ROOT / "protokv/mini/README.md")
    texts = [page.read_text(encoding="utf-8") for page in (*pages, *BENCHMARKS.rglob("*.md"))]
    words = [word for text in texts for word in text.split() if re.search("[A-Za-z]", word)]
    assert 0 < len(words) <= 15_000
