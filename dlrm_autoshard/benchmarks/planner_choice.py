"""Which of the measured finalists to take: the best by all evidence, as `auto` does, or the one that measured least?

Each planning is a job's start on two pinned ranks, with a task of its own. What it measured it chose by; then all of
its finalists are measured anew, in turns on the same ranks, and only that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.autoshard.initial_plan import place
from dlrm_autoshard.benchmarks.harness import median_with_interval, on_pinned_ranks
from dlrm_autoshard.benchmarks.planner_quality import Cell
from dlrm_autoshard.config import parse_sections
from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.distributed.runtime import runtime_of
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.probe.rank_probe import RankProbe

TITLE = "at a job's start: the finalist that the evidence favours, beside the one that measured least"
ROUGH_TIME = "20 min"

WORLD_SIZE, BATCH, TABLES, ROUNDS = 2, 2048, 30, 8


def run(quick: bool) -> dict[str, Any]:
    return summarise([planning(number, 2 if quick else ROUNDS) for number in range(2 if quick else 20)])


def planning(number: int, rounds: int) -> dict[str, Any]:
    """chosen, least: positions of the plan that was chosen and of the one that measured least. again_ms: step costs of
    each finalist when measured anew, by round."""
    found: dict[str, Any] = on_pinned_ranks(_plan_and_judge, WORLD_SIZE, number, rounds, timeout=180)[0]
    return found


def _plan_and_judge(rank: int, world_size: int, number: int, rounds: int) -> dict[str, Any] | None:
    group = torch.distributed.group.WORLD
    assert group is not None
    runtime, pool = runtime_of(group, torch.device("cpu")), Cell(TABLES, WORLD_SIZE).task(number)
    config = parse_sections(autoshard={"enabled": True, "splits": {"max_parts": 1}})
    placement = place(
        config.autoshard, runtime, pool.tables, lambda: pool.stats, batch_size=BATCH,
        optimizer=config.tables.optimizer, exchange_dtype="fp32", seed=number,
    )  # fmt: skip
    probe = RankProbe.at_start(runtime, placement.task, config.tables.optimizer.name, "fp32")

    def judge() -> dict[str, Any]:
        result = placement.result
        assert result is not None
        finalists = [candidate for candidate in result.candidates if candidate.measured_ms is not None]
        least = min(range(len(finalists)), key=lambda i: finalists[i].measured_ms or 0.0)
        plans = [candidate.plan for candidate in finalists]
        return {
            "chosen": plans.index(result.chosen.plan),
            "least": least,
            "again_ms": [_measured(probe, plans, turn) for turn in range(rounds)],
        }

    return probe.on_rank_zero(judge)


def _measured(probe: RankProbe, plans: Sequence[ShardingPlan], turn: int) -> list[float]:
    """Step cost of each plan; every other time in the opposite order."""
    order = list(range(len(plans)))[:: 1 if turn % 2 else -1]
    profiles = dict(zip(order, probe.measure([plans[i] for i in order]), strict=True))
    return [step_cost_ms(profiles[i].ranks) for i in range(len(plans))]


def summarise(plannings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of the chosen plan's cost, each planning's median over its rounds."""
    to_least, to_best, slowest = [], [], 0
    for planning in plannings:
        costs = np.median(planning["again_ms"], axis=0)
        chosen = costs[planning["chosen"]]
        to_least.append(float(chosen / costs[planning["least"]]))
        to_best.append(float(chosen / costs.min()))
        slowest += bool(len(costs) > 1 and chosen == costs.max())
    differ = [ratio for ratio, p in zip(to_least, plannings, strict=True) if p["chosen"] != p["least"]]
    mean = float(np.mean(to_least))
    draws = np.random.default_rng(0).integers(len(to_least), size=(2000, len(to_least)))
    low, high = np.quantile(np.array(to_least)[draws].mean(1), [0.025, 0.975])
    best = median_with_interval(to_best)
    return {
        "figures": {
            "plannings": len(plannings),
            "in which they differ": len(differ),
            "chosen / least measured, mean": mean,
            "chosen / best of the finalists, median": best.median,
            "chosen is the slowest finalist": slowest,
        },
        "targets": {"chosen / least measured, mean": "<= 1.0"},
        "spread": {
            "chosen / least measured, mean": [float(low), float(high)],
            "chosen / best of the finalists, median": [best.low, best.high],
        },
        "notes": [
            f"{TABLES} tables that no cost model was fitted to, {WORLD_SIZE} ranks, batch {BATCH}.",
            "Where they differ: " + (", ".join(f"{ratio:.3f}" for ratio in sorted(differ)) or "never") + ".",
        ],
    }
