"""The planner-quality record: figures that follow from its rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.benchmarks.planner_quality_record import ADDED_UP, LEARNED, SPLIT, summarise
from dlrm_autoshard.planner.search.greedy import KEYS


def row(cell: str, task: int, slowest: dict[str, float], noise: float = 0.0) -> dict[str, Any]:
    """Two ranks and one stage of 10 ms in the mean; `slowest` of the ranks takes that much more, the other less."""
    generator = np.random.default_rng(task)
    stages = {}
    for name in (*KEYS, *LEARNED):
        over = slowest.get(name, 5.0)
        exact = np.array([[10 + over, 0, 0, 0], [10 - over, 0, 0, 0]])
        stages[name] = [(exact * (1 + noise * generator.exponential(size=exact.shape))).tolist() for _ in range(4)]
    return {
        "cell": cell,
        "task": task,
        "stages_ms": stages,
        "predicted_at_start_ms": dict.fromkeys(stages, 10.0),
        "seconds": 1.0,
    }


def test_what_is_removed_of_the_best_heuristics_excess() -> None:
    rows = [row("20x2", task, {"lookup_greedy": 2.0, "auto": 0.5, "dreamshard": 1.0, "search": 2.0}) for task in (0, 1)]
    figures = summarise(rows, ["20x2"], tasks=2)["figures"]
    assert figures["20x2 best heuristic over balance bound"] == pytest.approx(1.2)
    assert figures["20x2 auto / best heuristic"] == pytest.approx(10.5 / 12)
    assert figures["20x2 auto: excess removed"] == pytest.approx(0.75)
    assert figures["all cells: dreamshard: excess removed"] == pytest.approx(0.5)


def test_plans_with_split_tables_count_where_all_rows_of_a_cell_have_them() -> None:
    rows = [row("20x8", task, {"lookup_greedy": 2.0, "auto": 1.5}) for task in (0, 1)]
    for one in rows:
        one["stages_ms"][SPLIT] = [[[10.5, 0, 0, 0], [9.5, 0, 0, 0]]] * 4
        one["predicted_at_start_ms"][SPLIT] = 10.0
    outcome = summarise(rows, ["20x8"], tasks=2)
    assert outcome["figures"][f"20x8 {SPLIT}: excess removed"] == pytest.approx(0.75)
    assert outcome["targets"][f"20x8 {SPLIT}: excess removed"] == ">= 0.667"
    del rows[1]["stages_ms"][SPLIT]
    assert f"20x8 {SPLIT}: excess removed" not in summarise(rows, ["20x8"], tasks=2)["figures"]


def test_auto_is_behind_where_a_heuristic_or_tables_added_up_cost_less() -> None:
    rows = [row("20x2", task, {"lookup_greedy": 2.0, "auto": 1.0}) for task in range(4)]
    for one, over in zip(rows, (0.5, 0.95, 2.0, 2.0), strict=True):
        one["stages_ms"][ADDED_UP] = [[[10 + over, 0, 0, 0], [10 - over, 0, 0, 0]]] * 4
        one["predicted_at_start_ms"][ADDED_UP] = 10.0
    rows[3]["stages_ms"]["auto"] = [[[12.5, 0, 0, 0], [9.0, 0, 0, 0]], [[10.0, 0, 0, 0], [9.0, 0, 0, 0]]] * 2
    figures = summarise(rows, ["20x2"], tasks=4)["figures"]
    assert figures["20x2 auto: tasks behind by > 1%"] == 0.25  # the first; the last one's median is 11.25
    assert figures["all cells: auto: tasks behind by > 1%"] == 0.25


def test_cells_that_were_not_measured_are_targets_all_the_same() -> None:
    outcome = summarise([row("20x2", 0, {})], ["20x2", "20x4"], tasks=20)
    assert outcome["targets"]["20x4 auto / best heuristic"] == "<= 0.999"
    assert "20x4 auto / best heuristic" not in outcome["figures"]
    assert outcome["figures"]["20x2 tasks"] == 1 and outcome["targets"]["20x2 tasks"] == ">= 20"


def test_figures_of_all_cells_have_intervals_over_the_tasks_of_each() -> None:
    rows = [
        row(cell, task, {"lookup_greedy": 2.0, "dreamshard": over + 0.1 * (-1) ** task})
        for cell, over in (("20x2", 1.0), ("20x4", 0.5))
        for task in range(6)
    ]
    outcome = summarise(rows, ["20x2", "20x4"], tasks=6)
    for name, exact in (("dreamshard / best heuristic", 0.5 * (11 + 10.5) / 12), ("dreamshard: excess removed", 0.625)):
        low, high = outcome["spread"][f"all cells: {name}"]
        assert outcome["figures"][f"all cells: {name}"] == pytest.approx(exact)
        assert low < exact < high and high - low < 0.1


def test_it_says_how_exchanges_were_had() -> None:
    even = [
        row("20x2", task, {"lookup_greedy": 2.0, "auto": 2.0 + (-1) ** task, "dreamshard": 1.5}) for task in range(8)
    ]
    clear = [row("20x8", task, {"lookup_greedy": 2.0, "auto": 0.5, "dreamshard": 1.0}) for task in range(8)]
    for measured in even:
        measured |= {"exchange": "measured", "commit": "abc1234"}
    notes = summarise(even + clear, ["20x2", "20x8"], tasks=8)["notes"]
    assert "20x2: compute measured, exchange measured on real ranks; of commits abc1234" in notes
    assert "20x8: compute measured, exchange modelled in 8 of 8 tasks; of commits None" in notes
