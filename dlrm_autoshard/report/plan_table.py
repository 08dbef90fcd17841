"""A plan for people: who owns what and what that is predicted to cost, beside everything it was chosen from.

console.print(rank_table(plan, tables, stats, table_bytes, predicted))
console.print(candidate_table(result))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from dlrm_autoshard.costs import PLANNED_STAGES, RankCost, balanced_cost_ms, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan, bytes_per_rank, gib
from dlrm_autoshard.planner.result import Candidate, PlanResult
from dlrm_autoshard.tables import TableConfig, TableStats

_MOST_RANKS = 16  # rows shown before the middle is left out


def rank_table(
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    stats: Sequence[TableStats],
    table_bytes: Mapping[str, int],
    predicted: Sequence[RankCost] | None = None,
) -> Table:
    """One row a rank: tables, bytes, lookups a sample, predicted ms by stage. 80 columns are enough."""
    lookups = {table.name: stat.mean_pooling for table, stat in zip(tables, stats, strict=True)}
    memory = bytes_per_rank(plan, table_bytes)
    grid = Table(title="sharding plan", title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("rank", "tables", "memory", "lookups"):
        grid.add_column(heading, justify="right")
    if predicted is not None:
        for stage in PLANNED_STAGES:
            grid.add_column(stage.replace("_", "\n"), justify="right")
        grid.caption = (
            f"predicted, ms a step; {step_cost_ms(predicted):.2f} in all (each stage's slowest rank), "
            f"{balanced_cost_ms(predicted):.2f} if perfectly balanced"
        )
    for rank in range(plan.world_size):
        if plan.world_size > _MOST_RANKS and _MOST_RANKS // 2 <= rank < plan.world_size - _MOST_RANKS // 2:
            if rank == _MOST_RANKS // 2:
                grid.add_row(*["..."] * len(grid.columns))
            continue
        owned = plan.tables_on(rank)
        row = [str(rank), str(len(owned)), gib(memory[rank]), f"{sum(lookups[name] for name in owned):.1f}"]
        if predicted is not None:
            row += [f"{predicted[rank].stage(stage):.2f}" for stage in PLANNED_STAGES]
        grid.add_row(*row)
    return grid


def candidate_table(result: PlanResult, most: int = 12) -> Table:
    """What the plan was chosen from, best first, each candidate beside the chosen one."""
    chosen = result.chosen
    grid = Table(
        title="chosen from",
        title_justify="left",
        caption=f"ms a step; predictions from {result.costs_from}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    grid.add_column("plan made by")
    for heading in ("predicted", "measured", "expected", "v chosen"):
        grid.add_column(heading, justify="right")
    makers: dict[str, list[Candidate]] = {}  # candidates by plan: several algorithms often find the same one
    for candidate in result.candidates:
        makers.setdefault(candidate.plan.fingerprint, []).append(candidate)
    for same in list(makers.values())[:most]:
        candidate = chosen if chosen in same else same[0]
        ratio = candidate.estimate_ms / max(chosen.estimate_ms, 1e-9)
        others = f" and {len(same) - 1} more" if len(same) > 1 else ""
        grid.add_row(
            candidate.name + others,
            f"{candidate.predicted_ms:.2f}",
            "" if candidate.measured_ms is None else f"{candidate.measured_ms:.2f}",
            "" if candidate.expected_ms is None else f"{candidate.expected_ms:.2f}",
            "chosen" if candidate is chosen else f"{100 * (ratio - 1):+.1f}%",
        )
    if len(makers) > most:
        grid.add_row(f"... and {len(makers) - most} more", "", "", "", "")
    return grid
