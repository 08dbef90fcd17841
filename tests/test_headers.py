"""A module's header is short and true: what its example names is there, and takes what the example gives it."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dlrm_autoshard"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
MOST_LINES = 6
OPENINGS = ("Of", "That", "What")
"""Words that no docstring begins with: it starts with a verb, or names what is returned."""
NOT_YET: set[str] = set()
"""Folders, and files, whose docstrings are still to be rewritten: the list only shrinks."""
Definition = ast.FunctionDef | ast.ClassDef


def header(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def examples(path: Path) -> Iterator[ast.Module]:
    """Each line that is Python, by itself; prose is not."""
    for line in header(path).splitlines()[1:]:
        code = line.strip()
        try:
            yield ast.parse(f"{code} pass" if code.endswith(":") else code)
        except SyntaxError:
            continue


def definitions() -> dict[str, list[Definition]]:
    found: dict[str, list[Definition]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


DEFINED = definitions()


def takes(node: Definition, call: ast.Call) -> bool:
    """Whether the definition takes the call's arguments, by number and by name."""
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if not inits:  # a dataclass, or what it inherits
            fields = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
            return bool(node.bases) or fields.issuperset(keyword.arg for keyword in call.keywords if keyword.arg)
        node = inits[0]
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    own = names[1:] if names[:1] in (["self"], ["cls"]) else names
    enough = arguments.vararg is not None or len(call.args) <= len(own)
    by_name = {*own, *(argument.arg for argument in arguments.kwonlyargs)}
    return enough and (arguments.kwarg is not None or all(k.arg in by_name for k in call.keywords if k.arg))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_header_is_short_and_its_example_is_true(path: Path) -> None:
    lines = header(path).splitlines()
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines"
    elsewhere = set(dir(builtins)) | imported(path)
    for example in examples(path):
        for call in (node for node in ast.walk(example) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in DEFINED:
                assert any(takes(node, call) for node in DEFINED[name]), f"{ast.unparse(call)}: no '{name}' takes that"
            elif isinstance(call.func, ast.Name):
                assert name in elsewhere, f"'{name}' of the example is nowhere in the package"


def test_modules_that_headers_and_guides_name_are_there() -> None:
    root = PACKAGE.parent
    there = [path.as_posix() for folder in (PACKAGE, root / "launch", root / "tests") for path in folder.rglob("*.py")]
    texts = {path: header(path) for path in MODULES}
    texts |= {path: path.read_text() for path in (root / "CONTRIBUTING.md", root / "launch/test.sh")}
    for path, text in texts.items():
        for name in re.findall(r"[\w/]+\.py\b(?!:)", text):  # clicks.py:Clicks is anybody's
            assert any(module.endswith(f"/{name}") for module in there), f"{path}: there is no {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_docstrings_begin_plainly_and_public_names_have_one(path: Path) -> None:
    tree = ast.parse(path.read_text())
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    texts = [node.value for node in strings if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    bad = [text for text in texts if text.split()[:1] and text.split()[0].strip("\"'") in OPENINGS]
    public = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"]
    explained = {"add_parser", "run", "main"}  # of commands: the module's header says it
    silent = [node.name for node in public if not ast.get_docstring(node) and node.name not in explained]
    if not {path.parent.relative_to(PACKAGE).as_posix(), path.relative_to(PACKAGE).as_posix()} & NOT_YET:
        assert not bad and not silent, (bad, silent)


def imported(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}
