"""Imports run one way: errors -> tables -> plan -> costs -> {planner, simulator, reshard_rule, report};
distributed -> model; everything -> trainer -> cli. Read from the source, so that an import in a function counts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dlrm_autoshard"
WITHOUT_RANKS = (
    "errors",
    "tables",
    "plan",
    "costs",
    "config",
    "config_errors",
    "reshard_rule",
    "simulator",
    "planner",
    "report",
    "data",
)
DISTRIBUTED = ("torch.distributed", "fbgemm_gpu", "dlrm_autoshard.distributed")


def files(room: str) -> list[Path]:
    return [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else sorted((PACKAGE / room).glob("**/*.py"))


def imports(path: Path) -> set[str]:
    """Every dotted name that the file imports: `from a.b import c` counts as a.b and a.b.c."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; the package uses full names"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")  # torch.distributed, without an import of its own
    return names


def reaches(path: Path, *targets: str) -> set[str]:
    return {name for name in imports(path) for target in targets if name == target or name.startswith(f"{target}.")}


@pytest.mark.parametrize("room", WITHOUT_RANKS)
def test_rooms_that_know_no_ranks_import_none(room: str) -> None:
    if room == "reshard_rule" and not files(room):
        pytest.skip("not there")
    assert files(room)
    for path in files(room):
        assert not reaches(path, *DISTRIBUTED), path


@pytest.mark.parametrize("room", ["distributed", "model"])
def test_what_runs_on_ranks_knows_no_planner_report_or_trainer(room: str) -> None:
    for path in files(room):
        above = ("planner", "report", "simulator", "trainer", "cli", "benchmarks")
        assert not reaches(path, *(f"dlrm_autoshard.{name}" for name in above)), path


def test_fbgemm_lives_in_distributed_alone() -> None:
    outside = [p for p in PACKAGE.glob("**/*.py") if p.parent.name not in ("distributed", "benchmarks")]
    assert outside
    for path in outside:
        assert not reaches(path, "fbgemm_gpu"), path


def test_the_ground_floor_does_not_look_up() -> None:
    floors = ["errors", "tables", "plan", "costs"]
    for height, floor in enumerate(floors):
        below = {f"dlrm_autoshard.{name}" for name in floors[:height]}
        own = {name for name in reaches(PACKAGE / f"{floor}.py", "dlrm_autoshard")}
        assert all(any(name == b or name.startswith(f"{b}.") for b in below) for name in own), (floor, own)


def test_nobody_imports_the_command_line() -> None:
    for path in PACKAGE.glob("**/*.py"):
        assert not reaches(path, "dlrm_autoshard.commands.main"), path


def test_the_command_line_starts_without_torch() -> None:
    """So that `dlrm-autoshard doctor` works where torch cannot be imported, and help comes at once."""
    code = "import sys; from dlrm_autoshard.commands.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'fbgemm_gpu', 'pandas', 'altair')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
