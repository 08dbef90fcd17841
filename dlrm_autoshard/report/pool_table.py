"""Plans as tables for the terminal: what each rank has, and what a plan was chosen from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from dlrm_autoshard.costs import PLANNED_STAGES, RankCost
from dlrm_autoshard.plan import ShardingPlan, bytes_per_rank, gib
from dlrm_autoshard.planner.pool import TablePool
from dlrm_autoshard.planner.result import Candidate

MOST_RANKS = 16  # more are summed up by their extremes


def ranks_table(
    plan: ShardingPlan,
    pool: TablePool,
    table_bytes: Mapping[str, int],
    costs: Sequence[RankCost],
) -> Table:
    """One row a rank; a stage's slowest rank in bold, because the step waits for it."""
    stages = [f"{stage}\nms".replace("_", "\n") for stage in PLANNED_STAGES]
    table = Table("rank", "tables", "memory", "dims", "ids a\nsample", *stages, box=None, header_style="bold")
    used = bytes_per_rank(plan, table_bytes)
    slowest = {stage: max(range(len(costs)), key=lambda r: costs[r].stage(stage)) for stage in PLANNED_STAGES}
    shown = list(range(plan.world_size))
    if plan.world_size > MOST_RANKS:
        shown = sorted({*shown[: MOST_RANKS - 4], *slowest.values()})
    of = {t.name: (t, s) for t, s in zip(pool.tables, pool.stats, strict=True)}
    for rank in shown:
        own = [of[name] for name in plan.tables_on(rank)]
        table.add_row(
            str(rank),
            str(len(own)),
            gib(used[rank]),
            str(sum(t.embedding_dim for t, _ in own)),
            f"{sum(s.mean_pooling for _, s in own):.1f}",
            *(
                f"[bold]{costs[rank].stage(stage):.2f}[/bold]"
                if slowest[stage] == rank
                else f"{costs[rank].stage(stage):.2f}"
                for stage in PLANNED_STAGES
            ),
        )
    if len(shown) < plan.world_size:
        table.caption = f"{plan.world_size - len(shown)} more ranks, none of them the slowest of a stage"
    return table


def candidates_table(candidates: Sequence[Candidate], chosen: Candidate) -> Table:
    table = Table("considered", "predicted ms", "measured ms", "expected ms", "", box=None, header_style="bold")
    for candidate in candidates:
        measured, expected = (
            "" if ms is None else f"{ms:.2f}" for ms in (candidate.measured_ms, candidate.expected_ms)
        )
        mark = "chosen" if candidate is chosen else ""
        table.add_row(candidate.name, f"{candidate.predicted_ms:.2f}", measured, expected, mark)
    return table
