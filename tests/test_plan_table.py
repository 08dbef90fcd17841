"""What a job says of its plan before the first step: tables of each rank, how full it is, why not another plan."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from dlrm_autoshard.costs import RankCost
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.result import Candidate, PlanResult
from dlrm_autoshard.report.plan_table import (
    candidate_table,
    rank_table,
    tables_by_rank,
    what_splits_would_save,
    why_not_the_fastest,
)
from dlrm_autoshard.tables import TableConfig, TableStats

TABLES = tuple(TableConfig(f"t{number}", 1000, 16) for number in range(9))
STATS = tuple(TableStats(float(number + 1)) for number in range(9))
PLAN = ShardingPlan({table.name: int(table.name == "t8") for table in TABLES}, 2)
OTHER = ShardingPlan(dict.fromkeys(PLAN.rank_of, 0), 2)


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return " ".join(text.split())


def result(chosen_ms: float, other_ms: float) -> PlanResult:
    chosen = Candidate("search", PLAN, 5.0, chosen_ms, "probe", expected_ms=5.1)
    other = Candidate("dim_greedy", OTHER, 7.0, other_ms, "probe", expected_ms=6.0)
    cost = RankCost(fwd_compute_ms=1.0, fwd_comms_ms=1.0, bwd_comms_ms=1.0, bwd_compute_ms=1.0)
    return PlanResult(PLAN, "auto", chosen, (cost, cost), (chosen, other), "a cost model", 1.0, 0)


def test_ranks_are_told_with_their_tables_costliest_first_and_the_part_of_their_memory() -> None:
    assert tables_by_rank(PLAN, TABLES, STATS) == ["rank 0: t7, t6, t5, t4, t3, t2 and 2 more", "rank 1: t8"]
    bytes_of = {table.name: 1 << 20 for table in TABLES}
    assert "8 MiB (50%)" in shown(rank_table(PLAN, TABLES, STATS, bytes_of, None, (16 << 20, 16 << 20)))
    assert "%" not in shown(rank_table(PLAN, TABLES, STATS, bytes_of))


def test_a_plan_that_was_measured_faster_and_not_chosen_is_explained() -> None:
    said = why_not_the_fastest(result(chosen_ms=5.5, other_ms=5.0))
    assert said is not None and said.startswith("'dim_greedy' was measured faster (5.00 ms, chosen plan 5.50 ms)")
    assert why_not_the_fastest(result(chosen_ms=5.0, other_ms=5.5)) is None


def test_what_splits_would_save_is_said_where_it_is_worth_asking_for() -> None:
    whole = result(5.0, 5.5)
    parts = {"t0[0:8]": 0, "t0[8:16]": 1} | {name: rank for name, rank in PLAN.rank_of.items() if name != "t0"}
    twelve = "splitting by columns ('t0' in 2 parts) would save a predicted 12% of the step. This is exact with sgd"
    for part, said in ((0.88, twelve), (0.995, None)):
        split = Candidate("split+search", ShardingPlan(parts, 2), part * whole.predicted_ms)
        sentence = what_splits_would_save(replace(whole, would_split=split))
        assert (sentence or "").startswith(said or "") and (sentence is None) == (said is None)
    assert what_splits_would_save(whole) is None


def test_the_columns_of_the_candidates_are_defined_below_them() -> None:
    text = shown(candidate_table(result(5.0, 5.5)))
    for column in ("predicted", "measured", "expected", "v chosen"):
        assert f"{column}: " in text


def test_where_nothing_was_measured_no_column_says_so() -> None:
    measured = result(5.0, 5.5)
    guessed = tuple(replace(c, measured_ms=None, measured_source=None, expected_ms=None) for c in measured.candidates)
    text = shown(candidate_table(replace(measured, chosen=guessed[0], candidates=guessed)))
    assert (
        "measured" not in text
        and "expected" not in text
        and "predicted: by a cost model. v chosen: difference in it" in text
    )
