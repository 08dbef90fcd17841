"""Imports run one way, through LAYERS in their order; MAY_USE says who may use torch.distributed and fbgemm.

Read from the source, so that an import inside a function counts. Of the tests, none imports another."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layers import LAYERS

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "dlrm_autoshard"
INSIDE = {
    "planner": ("costs", "corrections", "search", "dreamshard", "baselines", "moves"),
    "distributed": ("tables", "lookup", "ranks", "moves"),
}
"""Folders in a folder, in the order of imports."""
WITHOUT_RANKS = (*LAYERS[: LAYERS.index("distributed")], "planner", "report")
MAY_USE = {
    "torch.distributed": (
        "distributed/",
        "probe/",
        "torchrec/",
        "benchmarks/",
        "training/checkpoints/checkpoint.py",
    ),
    "fbgemm_gpu": ("distributed/", "torchrec/", "benchmarks/"),
}


def layer_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


@functools.cache
def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every dotted name that the file imports: `from a.b import c` counts as a.b and a.b.c."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; the package uses full names"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")  # torch.distributed, without an import of its own
    return frozenset(names)


def reaches(path: Path, *targets: str) -> set[str]:
    return {name for name in imports(path) for target in targets if name == target or name.startswith(f"{target}.")}


def own_imports() -> Iterator[tuple[str, str]]:
    """(importer, imported), both modules of this package."""
    known = modules()
    for name, path in known.items():
        for imported in imports(path) & known.keys() - {name, "dlrm_autoshard"}:
            yield name, imported


def test_every_module_is_in_a_layer_of_the_list() -> None:
    assert {layer_of(module) for module in modules()} == {*LAYERS, "__init__"}
    at_the_root = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert len(at_the_root) <= 8, at_the_root


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_layers_before_it(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    wrong = [(one, other) for one, other in own_imports() if layer_of(one) == layer and layer_of(other) in above]
    assert not wrong


@pytest.mark.parametrize("folder", INSIDE)
def test_a_folder_in_a_folder_imports_only_those_before_it(folder: str) -> None:
    def number(module: str) -> int:
        parts = module.split(".")
        return INSIDE[folder].index(parts[2]) if parts[1] == folder and parts[2] in INSIDE[folder] else -1

    assert set(INSIDE[folder]) == {path.parent.name for path in (PACKAGE / folder).glob("*/*.py")}
    wrong = [(one, other) for one, other in own_imports() if -1 < number(one) < number(other)]
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for one, other in own_imports():
        graph.setdefault(one, set()).add(other)
    done: set[str] = set()

    def follow(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in sorted(graph.get(module, ())):
                follow(other, (*way, module))
            done.add(module)

    for module in sorted(graph):
        follow(module, ())


@pytest.mark.parametrize("layer", WITHOUT_RANKS)
def test_layers_that_know_no_ranks_import_none(layer: str) -> None:
    for module, path in modules().items():
        if layer_of(module) == layer:
            assert not reaches(path, "torch.distributed", "fbgemm_gpu", "dlrm_autoshard.distributed"), path


@pytest.mark.parametrize("library", MAY_USE)
def test_libraries_of_ranks_are_used_where_it_is_said(library: str) -> None:
    for path in modules().values():
        if not path.relative_to(PACKAGE).as_posix().startswith(MAY_USE[library]):
            assert not reaches(path, library), path


def test_what_runs_on_ranks_knows_no_planner_report_or_trainer() -> None:
    for module, path in modules().items():
        if layer_of(module) in ("distributed", "model"):
            assert not reaches(path, *(f"dlrm_autoshard.{name}" for name in ("planner", "report", "records"))), path


def read_from(start: str, *folders: str) -> tuple[list[str], int]:
    """The modules directly in these folders that are reached from `start` through one another, and their lines."""
    graph: dict[str, set[str]] = {}
    for one, other in own_imports():
        graph.setdefault(one, set()).add(other)
    read: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in read and module.rpartition(".")[0] in {f"dlrm_autoshard.{folder}" for folder in folders}:
            read.add(module)
            waiting += graph.get(module, ())
    return sorted(read), sum(len(modules()[module].read_text().splitlines()) for module in read)


def test_a_decision_is_read_in_one_folder_and_one_sitting() -> None:
    """From what is measured to what is moved; behind it are the planner, which is asked for candidates and their costs,
    and `reshard`, by which tables travel."""
    files, lines = read_from("dlrm_autoshard.autoshard.resharding", "autoshard")
    assert len(files) <= 6 and lines <= 1000, (files, lines)


def test_a_step_is_read_in_two_folders_and_one_sitting() -> None:
    """From a batch to updated weights, in the trainer and in a loop of one's own, which have one engine; behind it are
    how ranks of one host exchange (`shared_memory`) and those of several sum (`sums`), in what bits (`wire`,
    `packed_ids`, `id_messages`) over what link (`link_speed`), what is different on a GPU (`device`, `device_ids`),
    means where only some tables average and gradients that are cut (`columns`), small tables that every rank has
    (`replicas`), rows of one table on several ranks (`row_ranges`), vectors that are not pooled (`sequences`),
    ids that are sent once (`filled_bags`), what ranks tell each other of a batch (`note`), and where tables lie
    (`distributed.tables`)."""
    files, lines = read_from("dlrm_autoshard.distributed.step", "distributed", "distributed.lookup")
    exchanged = ("shared_memory", "wire", "packed_ids", "id_messages", "link_speed", "device_ids")
    lookup = (*exchanged, "columns", "replicas", "row_ranges", "sequences", "dedup", "filled_bags", "note")
    behind = {f"dlrm_autoshard.distributed.{name}" for name in ("device", "sums", *(f"lookup.{n}" for n in lookup))}
    lines -= sum(len(modules()[module].read_text().splitlines()) for module in behind)
    assert len({*files} - behind) <= 7 and lines <= 1669, (files, lines)


def test_no_start_imports_a_policy_that_learns() -> None:
    """Nor does a planner's state hold the weights of one that nobody asked for."""
    code = """if True:
        import sys
        from dlrm_autoshard.autoshard import autoshard, initial_plan, resharding
        from dlrm_autoshard.plan import Topology, round_robin
        from dlrm_autoshard.planner.planner import Planner
        from dlrm_autoshard.planner.task import PlacementTask
        from dlrm_autoshard.probe.calibration import start_costs
        from dlrm_autoshard.tables import TableConfig, TableStats
        tables = [TableConfig(f"t{i}", 1000, 16) for i in range(4)]
        task = PlacementTask.build(tables, [TableStats(1.0)] * 4, Topology(2), batch_size=64)
        planner = Planner("auto")
        start_costs(planner, task, fingerprint={})
        planner.plan(task)
        planner.propose(task, round_robin(task.names, task.topology))
        Planner("auto").load_state_dict(planner.state_dict())
        policies = ("planner.baselines", "planner.dreamshard.policy", "planner.dreamshard.dreamshard")
        sys.exit(str([name for name in sys.modules if name.startswith(tuple(f"dlrm_autoshard.{p}" for p in policies))]))
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False).stderr
    assert said.strip() == "[]", said


def test_a_start_plan_is_read_in_two_folders_and_one_sitting() -> None:
    """From a task to a plan, with `initial_plan`, which asks for it; behind it are how costs are learned (`costs`,
    `corrections`, `probe`), the policies that are there by name, and how memory is filled to the last byte."""
    files, lines = read_from("dlrm_autoshard.planner.planner", "planner", "planner.search")
    files.remove(behind := "dlrm_autoshard.planner.tight_fit")
    lines -= len(modules()[behind].read_text().splitlines())
    lines += len(modules()["dlrm_autoshard.autoshard.initial_plan"].read_text().splitlines())
    assert len(files) + 1 <= 17 and lines <= 2430, (files, lines)


def test_every_layer_says_what_it_is() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        said = ast.get_docstring(ast.parse(path.read_text()))
        assert said and len(said.splitlines()) <= 6, path


def test_no_file_imports_from_a_file_of_tests() -> None:
    """What several files of tests need lies in a module whose name does not begin with `test_`."""
    files = {path.stem for path in TESTS.rglob("test_*.py")}
    assert Path(__file__).stem in files
    for path in (*TESTS.rglob("*.py"), *PACKAGE.rglob("*.py")):
        wrong = {name for name in imports(path) if files.intersection(name.split(".")[:2])}
        assert not wrong, f"{path}: {sorted(wrong)}"


def test_the_command_line_starts_without_torch() -> None:
    """So that `dlrm-autoshard doctor` works where torch cannot be imported, and help comes at once."""
    code = "import sys; from dlrm_autoshard.commands.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'fbgemm_gpu', 'pandas', 'altair')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
