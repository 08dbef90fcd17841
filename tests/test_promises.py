"""Each line of PROMISES.md and GPU_TESTED.md is held by tests that exist; pages that users read lead there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = ["dlrm_autoshard/training/PROMISES.md", "dlrm_autoshard/distributed/GPU_TESTED.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_line_names_tests_that_exist(page: str) -> None:
    promises = [line for line in (REPOSITORY / page).read_text().splitlines() if line.startswith("|")]
    promises = [line for line in promises if not line.startswith(("| promise", "| what", "| ---"))]
    assert len(promises) > 10
    for promise in promises:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", promise)
        assert named, promise
        for file, test in named:
            tree = ast.parse((REPOSITORY / file).read_text())
            found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
            assert found, f"{file} has no {test}"
            marks = [ast.unparse(mark) for mark in found[0].decorator_list]
            marks += [ast.unparse(node.value) for node in tree.body if _sets_marks(node)]
            assert not any("mark.slow" in mark for mark in marks), f"{test} holds a promise, so it may not be left out"
            # Where a machine has not what it takes: said on the page, beside the promise.
            skips = any("skipif" in mark for mark in marks) or "pytest.skip(" in ast.unparse(found[0])
            assert not skips or "where" in promise.lower(), f"{test} is skipped on some machines: say where it is not"


def _sets_marks(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


def test_pages_that_users_read_lead_there() -> None:
    assert "(dlrm_autoshard/training/PROMISES.md)" in (REPOSITORY / "README.md").read_text()
    assert "(GPU_TESTED.md)" in (REPOSITORY / "dlrm_autoshard/distributed/GPU.md").read_text()
