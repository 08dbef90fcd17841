"""The bench harness: targets are judged honestly, timing is paired, the command prints and writes the record."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.benchmarks import harness, paired, readme
from dlrm_autoshard.benchmarks.plans_interleaved import best_of, busy_neighbour, recovered
from dlrm_autoshard.commands import main as cli
from tests.terminal import Terminal


def add_benchmark(monkeypatch: pytest.MonkeyPatch, folder: Path, outcome: str) -> None:
    """A real benchmark file `own-loop` that returns this expression, in place of the package's own."""
    source = folder / "own_loop.py"
    source.write_text(f'TITLE = "a benchmark of a test"\nROUGH_TIME = "1 s"\n\ndef run(quick):\n    return {outcome}\n')
    name = "dlrm_autoshard.benchmarks.own_loop"
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
    assert listed["own-loop"] == {"name": "own-loop", "title": "a benchmark of a test", "rough_time": "1 s"}
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
    monkeypatch.setattr(harness, "QUIET_LOAD", 1e9)  # whatever else runs on this machine
    add_benchmark(monkeypatch, tmp_path, repr(outcome))
    assert cli.main(["bench", "own-loop", "--out", str(tmp_path / "out" / "own-loop.json")]) == 0
    printed = capsys.readouterr().out
    assert "1.25" in printed and ">= 1.2" in printed and "met" in printed and "1.21 to 1.3" in printed
    record = json.loads((tmp_path / "out" / "own-loop.json").read_text())
    assert record["verdict"] == "met" and record["verdicts"] == {"speedup": "met", "moves": "met"}
    assert record["figures"] == outcome["figures"] and record["environment"]["cores"] >= 1
    assert record["environment"]["packages"]["torch"]


def test_a_benchmark_shows_how_long_it_takes_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_benchmark(monkeypatch, tmp_path, "__import__('time').sleep(1.2) or {'figures': {}}")
    with Terminal() as terminal:
        cli.main(["bench", "own-loop"])
    assert "of 1 s" in terminal.said
    assert all(harness.rough_seconds(listing.name) for listing in harness.available())


@pytest.mark.parametrize("figures", ["{'speedup': 1.1}", "{'speedup': None}", "{'speedup': float('nan')}", "{}"])
def test_a_target_that_is_missed_or_not_measured_exits_one(
    figures: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_benchmark(monkeypatch, tmp_path, f"{{'figures': {figures}, 'targets': {{'speedup': '>= 1.2'}}}}")
    assert cli.main(["bench", "own-loop"]) == 1
    assert "missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("figure", "interval", "target", "expected"),
    [
        (1.3, [1.21, 1.4], ">= 1.2", "met"),
        (1.3, [1.19, 1.4], ">= 1.2", "inconclusive"),
        (1.1, [1.05, 1.25], ">= 1.2", "inconclusive"),
        (1.1, [1.05, 1.19], ">= 1.2", "missed"),
        (0.9, [0.8, 1.05], "<= 1.0", "inconclusive"),
        (0, None, "== 0", "met"),
        (1, [0, 1], "== 0", "inconclusive"),
        (None, [1.3, 1.4], ">= 1.2", "missed"),
        (1.3, [], ">= 1.2", "missed"),
        (1.3, [1.25, float("nan")], ">= 1.2", "missed"),
    ],
)
def test_a_target_is_judged_on_the_interval(
    figure: float | None, interval: list[float] | None, target: str, expected: str
) -> None:
    assert harness.verdict(figure, target, interval) == expected


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10))
def test_what_is_met_by_an_interval_is_met_by_all_of_it(low: float, middle: float, high: float) -> None:
    low, middle, high = sorted((low, middle, high))
    verdicts = {harness.verdict(value, "<= 2") for value in (low, middle, high)}
    given_interval = harness.verdict(middle, "<= 2", [low, high])
    assert given_interval == (verdicts.pop() if len(verdicts) == 1 else "inconclusive")


def test_no_quick_run_and_none_beside_other_work_meets_a_target() -> None:
    outcome = {"figures": {"a": 1, "b": 5}, "targets": {"a": "<= 2", "b": "<= 2"}}
    for record in (
        harness.finish("own-loop", True, outcome, 1.0),
        harness.finish("own-loop", False, outcome, 1.0, 1e3),
    ):
        assert record["verdicts"] == {"a": "inconclusive", "b": "missed"} and record["verdict"] == "missed"
        assert record["reservations"]


def test_load_is_weighed_by_the_cores_that_there_were_when_the_benchmark_began() -> None:
    """`planner-quality` keeps to one core: half of the load that two cores bear was too much for its record."""
    record = harness.finish("own-loop", False, {"figures": {}}, 1.0, load_before=0.8, cores=2)
    assert not record["reservations"] and record["environment"]["cores"] == 2
    assert harness.finish("own-loop", False, {"figures": {}}, 1.0, load_before=0.8, cores=1)["reservations"]


def test_an_unknown_name_is_an_error_that_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "warp-speed"]) == 2
    assert "no benchmark 'warp-speed'" in capsys.readouterr().err


def test_contenders_alternate_and_warmup_is_not_counted() -> None:
    order: list[str] = []

    def contender(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    a, b = paired.alternate(lambda: contender("a", 2.0), lambda: contender("b", 1.0), rounds=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert (a, b) == ([2.0] * 3, [1.0] * 3)
    assert paired.paired_ratio([*a, 2.0, 2.0], [*b, 1.0, 1.0]) == paired.Ratio(2.0, 2.0, 2.0)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20), st.floats(0.5, 2.0))
def test_a_slow_stretch_that_hits_both_leaves_the_paired_ratio_alone(slowdowns: list[float], ratio: float) -> None:
    found = paired.paired_ratio([slowdown * ratio for slowdown in slowdowns], slowdowns)
    assert found.median == pytest.approx(ratio)
    assert found.low <= found.median * 1.000001 and found.high >= found.median * 0.999999


def test_the_interval_covers_the_spread_of_the_rounds() -> None:
    found = paired.paired_ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert found.median == 3.0 and 1.0 <= found.low < 3.0 < found.high <= 5.0


@pytest.mark.parametrize("count", [5, 9, 30])
def test_nine_in_ten_intervals_of_a_few_samples_hold_the_true_mean(count: int) -> None:
    """95% should; of plain percentile intervals 83% do with five samples, 90% with nine."""
    draw = np.random.default_rng(0)
    found = [paired.ratio_of_means(row, np.ones(count)) for row in draw.normal(3.0, 1.0, (400, count))]
    assert np.mean([interval.low <= 3.0 <= interval.high for interval in found]) > 0.9


def test_what_was_measured_side_by_side_is_drawn_together() -> None:
    slow = [1.0, 100.0, 3.0, 40.0, 8.0]
    found = paired.ratio_of_means([2 * seconds for seconds in slow], slow)
    assert (found.median, found.low, found.high) == pytest.approx((2.0,) * 3)


def test_a_finding_that_nobody_could_measure_misses_its_target() -> None:
    found = harness.Findings()
    found.put("speedup", None, ">= 1.2")
    found.put("ratio", paired.Ratio(1.23456, 1.1, 1.3), ">= 1.0", digits=2)
    record = harness.finish("own-loop", False, vars(found), 1.0)
    assert record["verdicts"] == {"speedup": "missed", "ratio": "met"}
    assert record["figures"]["ratio"] == 1.23 and record["spread"] == {"ratio": [1.1, 1.3]}


# What resharding recovers ---------------------------------------------------------------------------------------------


def test_the_best_plan_is_measured_on_rounds_that_did_not_choose_it() -> None:
    rates = {"lucky": [9.0, 1.0, 9.0, 1.0], "steady": [5.0, 5.0, 5.0, 5.0]}
    best, chosen = best_of(rates, ["lucky", "steady"])
    assert best == [5.0, 1.0, 5.0, 1.0] and set(chosen) == {"lucky", "steady"}


@given(st.floats(0, 1.5), st.lists(st.floats(0.5, 2), min_size=5, max_size=8))
def test_what_is_recovered_is_a_share_of_the_gap(share: float, slowdowns: list[float]) -> None:
    found, static, best = ([rate * slow for slow in slowdowns] for rate in (1 + share, 1.0, 2.0))
    part = recovered(found, static, best)
    assert part is not None and (part.median, part.low, part.high) == pytest.approx((share,) * 3)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_few_rounds_tell_too_little_of_others(count: int) -> None:
    """Of two, the true median lies outside of them half of the time."""
    few = paired.median_with_interval([1.3] * count)
    assert few.median == 1.3 and harness.verdict(1.3, ">= 1.0", [few.low, few.high]) == "inconclusive"


def test_none_of_a_few_does_not_say_that_there_is_none() -> None:
    none, half = paired.proportion(0, 12), paired.proportion(6, 12)
    assert (none.median, none.low) == (0.0, 0.0) and 0.2 < none.high < 0.3
    assert half.median == 0.5 and 0.2 < half.low < 0.3 and 0.7 < half.high < 0.8


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ([1.2, 1.4], "1.3 (1.2 to 1.4)"),
        ([1.3, 1.3], "1.3"),
        ([-np.inf, np.inf], "1.3 (few samples)"),
        ([1.3, np.inf], "1.3 (so far)"),
        ([-np.inf, 1.4], "1.3 (1.4 or less)"),
        ([1.2, np.inf], "1.3 (1.2 or more)"),
    ],
)
def test_an_interval_is_told_as_far_as_it_has_ends(interval: list[float], said: str) -> None:
    assert readme.cell({"figures": {"x": 1.3}, "spread": {"x": interval}}, "x") == said


def test_draws_in_which_nothing_was_to_be_gained_count() -> None:
    """Left out, they made a share look surer the less there was to share."""
    part = recovered([1.4] * 5, [1.0, 1.0, 1.5, 1.5, 1.5], [1.9, 1.9, 1.2, 1.2, 2.0])
    assert part is not None and part.low == -np.inf


def test_nothing_can_be_recovered_where_no_plan_is_faster() -> None:
    assert recovered([1.0], [1.0], [0.9]) is None


def test_a_busy_neighbour_takes_its_core_only_while_it_is_switched_on() -> None:
    before = {*psutil.Process().children()}
    with busy_neighbour() as share_core:
        (neighbour,) = {*psutil.Process().children()} - before

        def cpu_seconds() -> float:
            return float(neighbour.cpu_times().user + neighbour.cpu_times().system)

        time.sleep(0.2)
        assert neighbour.status() == psutil.STATUS_STOPPED
        share_core(True)
        rested, deadline = cpu_seconds(), time.monotonic() + 30
        while cpu_seconds() < rested + 0.1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert cpu_seconds() >= rested + 0.1
        share_core(False)
    assert not neighbour.is_running()


# The README's figures -------------------------------------------------------------------------------------------------


def test_the_readme_says_what_the_records_say() -> None:
    counted, _ = readme.records()
    marks = readme.FIRST, readme.LAST
    for page, text, (first, last) in (
        ("README.md", readme.pitch(counted), readme.PITCH),
        (readme.ALL, readme.table(counted), marks),
    ):
        written = (Path(__file__).parents[1] / page).read_text()
        assert f"{first}\n{text}\n{last}" in written, "run `dlrm-autoshard bench readme`"


NOTHING_YET = "\n".join(readme.PITCH)


def test_the_pitch_is_of_what_has_a_record() -> None:
    records = {
        "train-wemb": {"figures": {"2 ranks: over torchrec": 1.512}, "measured_at": ["abc1234"]},
        "loop-drift": {"figures": {"recovered": 0.871}, "measured_at": ["def5678"]},
    }
    told = readme.pitch(records)
    said = " ".join(told.split())
    assert "1.5 times as fast" in said and "wins back 87% of" in said and "columns" not in said
    assert "([record at abc1234](dlrm_autoshard/benchmarks/results/train-wemb.json))" in said
    assert readme.pitch({}) == ""
    assert max(map(len, told.splitlines())) <= 120


def test_a_figure_is_shown_only_where_its_record_counts(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "state": harness.STATE,
        "figures": {"moves": 0, "overhead": 0.004},
        "spread": {"overhead": [0.003, 0.0123]},
        "targets": {"moves": "== 0", "overhead": "<= 0.01"},
        "verdicts": {"moves": "met", "overhead": "inconclusive"},
        "reservations": [],
        "environment": {"commit": "abc1234", "cpu": "AMD EPYC 9355", "date": "2026-11-02T10:00:00+00:00"},
    }
    results, page, every = tmp_path / "results", tmp_path / "README.md", tmp_path / "FIGURES.md"
    results.mkdir()
    for file in (page, every):
        file.write_text(f"before\n{NOTHING_YET}\n{readme.FIRST}\nold\n{readme.LAST}\nafter\n")

    def rewritten(**change: Any) -> tuple[str, str]:
        (results / "loop-steady.json").write_text(json.dumps(record | change))
        return readme.rewrite(page, results, every), every.read_text()

    _, full = rewritten()
    assert "| 0.004 (0.003 to 0.0123) | <= 0.01 | inconclusive |" in full
    assert full.startswith("before\n") and full.endswith("after\n") and "old" not in full
    assert "Of 2 targets 1 met, 1 inconclusive, 0 missed." in full
    assert "[Measured](results/loop-steady.json) at abc1234 on AMD's CPU, 2026-11-02." in full
    _, full = rewritten(targets={"new": ">= 2"}, verdicts={"new": "missed"})
    assert "Of 1 targets 0 met, 0 inconclusive, 1 missed." in full
    assert "Targets without a figure, which count as missed: 1." in full
    _, full = rewritten(figures={"new_one": 1.0}, verdicts={"new_one": "missed"})
    assert "| new one | 1 |  | missed |" in full
    for change in ({"state": None}, {"reservations": ["quick"]}, {"environment": {"commit": "abc1234+"}}):
        complaint, full = rewritten(**change)
        assert "0.004" not in full and "loop-steady does not count" in complaint
    assert "`loop-steady`" in full


def test_a_readme_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    page, every = tmp_path / "README.md", tmp_path / "FIGURES.md"
    page.write_text("mine")
    every.write_text(f"{readme.FIRST}\nold\n{readme.LAST}")
    with pytest.raises(harness.BenchError, match="repository's root"):
        readme.rewrite(page, tmp_path, every)
    assert page.read_text() == "mine" and "old" in every.read_text()


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is not None, reason="torchrec is installed here")
def test_without_torchrec_torchrec_loop_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLRM_AUTOSHARD_TORCHREC", raising=False)
    if importlib.util.find_spec("torchrec") is None:
        with pytest.raises(harness.BenchError, match="cannot run here: torchrec is not installed"):
            harness.run_benchmark("torchrec-loop", quick=True)
