"""The bench harness: targets are judged honestly, timing is paired, the command prints and writes the record."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.benchmarks import harness
from dlrm_autoshard.commands import main as cli


def add_benchmark(monkeypatch: pytest.MonkeyPatch, folder: Path, outcome: str) -> None:
    """A real benchmark file `soak` that returns this expression, in place of the package's own."""
    source = folder / "soak.py"
    source.write_text(f'TITLE = "a benchmark of a test"\nROUGH_TIME = "1 s"\n\ndef run(quick):\n    return {outcome}\n')
    name = "dlrm_autoshard.benchmarks.soak"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)


def test_the_list_names_each_benchmark_that_exists_with_its_title(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_benchmark(monkeypatch, tmp_path, "{'figures': {}}")
    assert cli.main(["bench", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["soak"] == {"name": "soak", "title": "a benchmark of a test", "rough_time": "1 s"}
    assert set(listed) <= set(harness.NAMES)
    assert all(entry["title"] for entry in listed.values())


def test_a_met_target_exits_zero_and_the_record_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = {
        "figures": {"speedup": 1.25, "moves": 0},
        "targets": {"speedup": ">= 1.2", "moves": "== 0"},
        "spread": {"speedup": [1.21, 1.3]},
    }
    add_benchmark(monkeypatch, tmp_path, repr(outcome))
    assert cli.main(["bench", "soak", "--out", str(tmp_path / "out" / "soak.json")]) == 0
    printed = capsys.readouterr().out
    assert "1.25" in printed and ">= 1.2" in printed and "met" in printed and "1.21 .. 1.3" in printed
    record = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert record["met"] and record["met_by_target"] == {"speedup": True, "moves": True}
    assert record["figures"] == outcome["figures"] and record["environment"]["cores"] >= 1
    assert record["environment"]["packages"]["torch"]


@pytest.mark.parametrize("figures", ["{'speedup': 1.1}", "{'speedup': None}", "{'speedup': float('nan')}", "{}"])
def test_a_target_that_is_missed_or_not_measured_exits_one(
    figures: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_benchmark(monkeypatch, tmp_path, f"{{'figures': {figures}, 'targets': {{'speedup': '>= 1.2'}}}}")
    assert cli.main(["bench", "soak"]) == 1
    assert "missed" in capsys.readouterr().out


def test_an_unknown_name_is_an_error_that_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "warp-speed"]) == 2
    assert "no benchmark 'warp-speed'" in capsys.readouterr().err


def test_contenders_alternate_and_warmup_is_not_counted() -> None:
    order: list[str] = []

    def contender(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    a, b = harness.alternate(lambda: contender("a", 2.0), lambda: contender("b", 1.0), rounds=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert (a, b) == ([2.0] * 3, [1.0] * 3)
    assert harness.paired_ratio(a, b) == harness.Ratio(2.0, 2.0, 2.0)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20), st.floats(0.5, 2.0))
def test_a_slow_spell_that_hits_both_leaves_the_paired_ratio_alone(spells: list[float], ratio: float) -> None:
    found = harness.paired_ratio([spell * ratio for spell in spells], spells)
    assert found.median == pytest.approx(ratio)
    assert found.low <= found.median * 1.000001 and found.high >= found.median * 0.999999


def test_the_interval_covers_the_spread_of_the_rounds() -> None:
    found = harness.paired_ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert found.median == 3.0 and 1.0 <= found.low < 3.0 < found.high <= 5.0
