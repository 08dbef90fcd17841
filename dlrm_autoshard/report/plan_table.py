"""Prints a plan: which rank owns what, the predicted cost, and the candidates that the plan was chosen from.

console.print(rank_table(plan, tables, stats, table_bytes, predicted))
console.print(candidate_table(result))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from dlrm_autoshard.costs import PLANNED_STAGES, RankCost, balanced_cost_ms, step_cost_ms
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import ShardingPlan, bytes_per_rank
from dlrm_autoshard.planner.result import Candidate, PlanResult
from dlrm_autoshard.tables import TableConfig, TableStats, lookup_work

_MOST_RANKS = 16  # more ranks are shortened in the middle
_WORTH_SAYING = 0.01  # fraction of a step


def rank_table(
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    stats: Sequence[TableStats],
    table_bytes: Mapping[str, int],
    predicted: Sequence[RankCost] | None = None,
    budget_bytes: Sequence[int] | None = None,
) -> Table:
    """Returns a table that fits 80 columns, one row per rank: tables, bytes, lookups per sample, predicted ms by stage
    (the slowest in bold). tables: the plan's shards. budget_bytes: memory limit for tables on each rank.
    """
    lookups = {table.name: stat.mean_pooling for table, stat in zip(tables, stats, strict=True)}
    memory = bytes_per_rank(plan, table_bytes)
    grid = Table(title="sharding plan", title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("rank", "tables", "memory", "lookups"):
        grid.add_column(heading, justify="right")
    slowest: dict[str, float] = {}
    if predicted is not None:
        slowest = {stage: max(cost.stage(stage) for cost in predicted) for stage in PLANNED_STAGES}
        for stage in PLANNED_STAGES:
            grid.add_column(stage.replace("_", "\n"), justify="right")
        grid.caption = (
            f"predicted ms per step; total {step_cost_ms(predicted):.2f} (sum of each stage's slowest rank), "
            f"{balanced_cost_ms(predicted):.2f} if perfectly balanced"
        )
    if budget_bytes is not None:
        grid.caption = f"{grid.caption or ''}\nmemory: in brackets the share of the rank's budget for tables".lstrip()
    for rank in range(plan.world_size):
        if plan.world_size > _MOST_RANKS and _MOST_RANKS // 2 <= rank < plan.world_size - _MOST_RANKS // 2:
            if rank == _MOST_RANKS // 2:
                grid.add_row(*["..."] * len(grid.columns))
            continue
        owned = plan.shards_on(rank)
        share = "" if budget_bytes is None else f" ({memory[rank] / max(budget_bytes[rank], 1):.0%})"
        row = [str(rank), str(len(owned)), gib(memory[rank]) + share, f"{sum(lookups[name] for name in owned):.1f}"]
        if predicted is not None:
            for stage, most in slowest.items():
                ms = predicted[rank].stage(stage)
                row.append(f"[bold]{ms:.2f}[/bold]" if ms == most else f"{ms:.2f}")
        grid.add_row(*row)
    return grid


def tables_by_rank(
    plan: ShardingPlan, tables: Sequence[TableConfig], stats: Sequence[TableStats], most: int = 6
) -> list[str]:
    """Returns lines such as 'rank 0: ad, user and 4 more', tables with most lookups first."""
    work = {t.name: lookup_work(t.embedding_dim, s.mean_pooling) for t, s in zip(tables, stats, strict=True)}
    said = []
    for rank in range(min(plan.world_size, _MOST_RANKS)):
        names = sorted(plan.shards_on(rank), key=lambda name: -work[name])
        more = f" and {len(names) - most} more" if len(names) > most else ""
        said.append(f"rank {rank}: {', '.join(names[:most]) or 'no tables'}{more}")
    if plan.world_size > _MOST_RANKS:
        said.append(f"and {plan.world_size - _MOST_RANKS} more ranks")
    return said


def why_not_the_fastest(result: PlanResult) -> str | None:
    """Returns a sentence if another plan was measured faster than the chosen one, else None."""
    measured = [c for c in result.candidates if c.measured_ms is not None]
    fastest = min(measured, key=lambda c: c.measured_ms or 0.0, default=None)
    chosen = result.chosen
    if fastest is None or fastest.plan.fingerprint == chosen.plan.fingerprint or chosen.measured_ms is None:
        return None
    return (
        f"'{fastest.name}' was measured faster ({fastest.measured_ms:.2f} ms, chosen plan {chosen.measured_ms:.2f} ms),"
        f" but measurements are noisy: combined with its prediction ({fastest.predicted_ms:.2f} ms) it is expected to "
        f"take {fastest.estimate_ms:.2f} ms, the chosen plan {chosen.estimate_ms:.2f} ms"
    )


def what_splits_would_save(result: PlanResult, most: int = 6) -> str | None:
    """Returns a sentence if splits are off and splitting some tables is predicted to save time, else None."""
    saved = 0.0 if result.would_split is None else 1 - result.would_split.predicted_ms / result.predicted_ms
    if result.would_split is None or saved < _WORTH_SAYING:
        return None
    split = result.would_split.plan
    parts = [f"'{table}' in {len(split.parts_of(table))} parts" for table in split.split_tables[:most]]
    more = f" and {len(split.split_tables) - most} more tables" if len(split.split_tables) > most else ""
    return (
        f"splitting by columns ({', '.join(parts)}{more}) would save a predicted {saved:.0%} of the step. This is "
        "exact with sgd, adagrad and adam; rowwise_adagrad needs tables.optimizer.per_part, which changes the optimizer"
    )


def candidate_table(result: PlanResult, most: int = 12) -> Table:
    """Returns a table of the candidate plans, best first."""
    chosen = result.chosen
    grid = Table(title="chosen from", title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    grid.caption = f"ms per step. predicted: by {result.costs_from}. "
    judged = any(candidate.expected_ms is not None for candidate in result.candidates)
    grid.add_column("plan made by")
    for heading in ("predicted", *(("measured", "expected") if judged else ()), "v chosen"):
        grid.add_column(heading, justify="right")
    if judged:
        grid.caption += (
            "measured: on this hardware. expected: both combined, weighted by their noise; the lowest is chosen. v "
            "chosen: difference in it, or in predicted"
        )
    else:
        grid.caption += "v chosen: difference in it"
    makers: dict[str, list[Candidate]] = {}  # several algorithms often find the same plan
    for candidate in result.candidates:
        makers.setdefault(candidate.plan.fingerprint, []).append(candidate)
    for same in list(makers.values())[:most]:
        candidate = chosen if chosen in same else same[0]
        ratio = candidate.estimate_ms / max(chosen.estimate_ms, 1e-9)
        others = f" and {len(same) - 1} more" if len(same) > 1 else ""
        ms = [candidate.predicted_ms, *([candidate.measured_ms, candidate.expected_ms] if judged else [])]
        grid.add_row(
            candidate.name + others,
            *("" if one is None else f"{one:.2f}" for one in ms),
            "chosen" if candidate is chosen else f"{100 * (ratio - 1):+.1f}%",
        )
    if len(makers) > most:
        grid.add_row(f"... and {len(makers) - most} more")
    return grid
