"""Fits the cost model: the prices in closed form, then its two networks.

    report = fit_cost_model(model, samples, updates=300)

Axes: R different tables, N shards (of a batch, in `gradients`), S = 2 stages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.planner.costs.cost_model import COST, CostModel
from dlrm_autoshard.planner.costs.least_squares import fit_nonnegative
from dlrm_autoshard.planner.costs.mlp import Adam
from dlrm_autoshard.planner.costs.replay import ShardSample
from dlrm_autoshard.planner.costs.shard_set import ShardSet

HUBER = 0.02
"""Relative errors below this count squared, above it absolutely: outliers of a noisy machine do not pull."""
BATCH = 64
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class FitReport:
    """Mean absolute relative error by stage on the given samples before and after fitting, and their number."""

    samples: int
    updates: int
    error_before: tuple[float, float]
    error_after: tuple[float, float]
    seconds: float


def fit_cost_model(
    model: CostModel,
    samples: Sequence[ShardSample],
    *,
    updates: int = 300,
    seed: int = 0,
    budget_seconds: float | None = None,
) -> FitReport:
    """Solves for the prices, then trains both networks with a learning rate that falls linearly to 0."""
    started = time.perf_counter()
    kept = [s for s in samples if s.tables and min(s.fwd_compute_ms, s.bwd_compute_ms) > 0]
    if not kept:
        return FitReport(0, 0, (0.0, 0.0), (0.0, 0.0), 0.0)
    shards = ShardSet(kept)
    before = model.errors(shards)
    _solve_prices(model, shards)
    adam = Adam(*model.nets.values())
    batches = np.random.default_rng(seed).integers(len(kept), size=(updates, min(BATCH, 4 * len(kept))))
    for update, chosen in enumerate(batches):
        if budget_seconds is not None and time.perf_counter() - started > budget_seconds:
            break
        gradients(model, shards, chosen)
        adam.step(LEARNING_RATE * (1 - update / updates))
    return FitReport(len(kept), adam.updates, before, model.errors(shards), time.perf_counter() - started)


def gradients(model: CostModel, shards: ShardSet, chosen: np.ndarray) -> np.ndarray:
    """Returns log errors [N, S] of the chosen shards; passes the gradient of their mean Huber loss to the networks."""
    tables, inside_NR = shards.batch(chosen)
    summary_RK, tables_backward = model.summarise(shards.features_RF[tables], shards.work_RP[tables])
    ms_NS, devices_backward = model.devices(inside_NR @ summary_RK)
    error_NS = np.log(ms_NS) - shards.log_target_NS[chosen]
    grad_NS = np.minimum(np.maximum(error_NS / HUBER, -1), 1) / error_NS.size
    tables_backward(inside_NR.T @ devices_backward(grad_NS))
    return error_NS


def _solve_prices(model: CostModel, shards: ShardSet) -> None:
    """Finds the best prices for the networks as they are."""
    factor_RS = model.table_factors(shards.features_RF)
    summary_NK = shards.sum_over_tables(model.summarise(shards.features_RF, shards.work_RP)[0])
    raw_NS = summary_NK[:, COST] + model.launch_S
    fusion_NS = model.device_ms(summary_NK) / raw_NS
    for stage in range(2):
        work_NP = shards.sum_over_tables(shards.work_RP * factor_RS[:, stage : stage + 1])
        columns = np.concatenate([work_NP, np.ones((len(work_NP), 1))], axis=1) * fusion_NS[:, stage : stage + 1]
        now = np.append(model.prices_PS[:, stage], model.launch_S[stage]).astype(np.float64)
        fitted = fit_nonnegative(columns, shards.target_NS[:, stage].astype(np.float64), np.ones(len(columns)), now)
        model.prices_PS[:, stage] = fitted[:-1]
        model.launch_S[stage] = max(float(fitted[-1]), 1e-4)
