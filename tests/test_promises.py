"""Every promise of train/PROMISES.md is held by a test that exists, and the README leads to the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "dlrm_autoshard" / "train" / "PROMISES.md"


def test_every_promise_names_tests_that_exist() -> None:
    promises = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    promises = [line for line in promises if not line.startswith(("| promise", "| ---"))]
    assert len(promises) > 15
    for promise in promises:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", promise)
        assert named, promise
        for file, test in named:
            tree = ast.parse((REPOSITORY / file).read_text())
            found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
            assert found, f"{file} has no {test}"
            slow = any("mark.slow" in ast.unparse(mark) for mark in found[0].decorator_list)
            assert not slow, f"{test} holds a promise, so it may not be left out"


def test_the_readme_leads_to_the_promises() -> None:
    assert "(dlrm_autoshard/train/PROMISES.md)" in (REPOSITORY / "README.md").read_text()
