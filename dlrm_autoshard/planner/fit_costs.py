"""Fits the cost model: the prices in closed form, then its two networks, gradients written out by hand.

    report = fit_cost_model(model, samples, updates=300)

The networks are so small that automatic differentiation is nearly all overhead (1 ms an update, against 0.2): written
out, a job's start and every refinement between epochs are done in a fraction of a second. A test holds the gradients
to torch's.

Axes: R different tables, N shards of a batch, S = 2 stages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dlrm_autoshard.planner.by_hand import FlatAdam, Mlp
from dlrm_autoshard.planner.cost_model import (
    FUSION_BOUND,
    LOAD_COLUMNS,
    NUM_LOGS,
    TABLE_BOUND,
    CostModel,
)
from dlrm_autoshard.planner.least_squares import fit_nonnegative
from dlrm_autoshard.planner.replay import ShardSample
from dlrm_autoshard.planner.shard_set import ShardSet

HUBER = 0.02
"""Relative errors below this count squared, above it absolutely: outliers of a noisy machine do not pull."""
LOG2_SCALE = 1 / (6 * np.log(2))


BATCH = 64


@dataclass(frozen=True)
class FitReport:
    """Mean absolute relative error per stage on the samples given, before and after; `samples` of them."""

    samples: int
    updates: int
    error_before: tuple[float, float]
    error_after: tuple[float, float]
    seconds: float


def fit_cost_model(
    model: CostModel,
    samples: Sequence[ShardSample],
    weights: Sequence[float] | None = None,
    *,
    updates: int = 300,
    learning_rate: float = 2e-3,
    seed: int = 0,
    budget_seconds: float | None = None,
) -> FitReport:
    """Solves the prices, then trains both networks; the learning rate falls linearly to 0."""
    started = time.perf_counter()
    given = weights if weights is not None else [1.0] * len(samples)
    kept = [
        (s, w) for s, w in zip(samples, given, strict=True) if s.tables and min(s.fwd_compute_ms, s.bwd_compute_ms) > 0
    ]
    if not kept:
        return FitReport(0, 0, (0.0, 0.0), (0.0, 0.0), 0.0)
    shards, weight_N = ShardSet([sample for sample, _ in kept]), np.array([weight for _, weight in kept])
    before = model.errors(shards)
    _solve_prices(model, shards, weight_N)
    training = CostTraining(model, shards)
    size = (updates, min(BATCH, 4 * len(kept)))
    batches = np.random.default_rng(seed).choice(len(kept), size=size, p=weight_N / weight_N.sum())
    for update, chosen in enumerate(batches):
        if budget_seconds is not None and time.perf_counter() - started > budget_seconds:
            break
        training.gradients(chosen)
        training.adam.step(learning_rate * (1 - update / updates))
    training.adam.finish()
    return FitReport(len(kept), training.adam.updates, before, model.errors(shards), time.perf_counter() - started)


@torch.no_grad()
def _solve_prices(model: CostModel, shards: ShardSet, weight_N: np.ndarray) -> None:
    """The best prices with the networks as they are."""
    out = model.table_net(shards.features_RF)
    factor_RS = (TABLE_BOUND * torch.tanh(out[:, :2] / TABLE_BOUND)).exp()
    fusion_NS = model.fusion(shards.sum_over_tables(model.summarise(shards.features_RF, shards.work_RP)))
    for stage in range(2):
        work_NP = shards.sum_over_tables(shards.work_RP * factor_RS[:, stage : stage + 1])
        columns = torch.cat([work_NP, torch.ones(len(work_NP), 1)], dim=1) * fusion_NS[:, stage : stage + 1]
        now = torch.cat([model.prices_PS[:, stage], model.launch_S[stage : stage + 1]]).double().numpy()
        fitted = fit_nonnegative(columns.double().numpy(), shards.target_NS[:, stage].double().numpy(), weight_N, now)
        model.prices_PS[:, stage] = torch.as_tensor(fitted[:-1])
        model.launch_S[stage] = max(float(fitted[-1]), 1e-4)


class CostTraining:
    def __init__(self, model: CostModel, shards: ShardSet) -> None:
        self.adam = FlatAdam([*model.table_net.parameters(), *model.device_net.parameters()])
        arrays, gradients = self.adam.arrays, self.adam.gradients
        split = len(list(model.table_net.parameters()))
        self.table_net = Mlp(arrays[:split], gradients[:split])
        self.device_net = Mlp(arrays[split:], gradients[split:])

        self.features_RF = shards.features_RF.numpy()
        self.base_RS = (shards.work_RP @ model.prices_PS).numpy()
        self.launch_S = model.launch_S.numpy().copy()
        self.members_NM = shards.members_NM.numpy()
        self.log_target_NS = shards.target_NS.log().numpy()
        loads_RL = torch.cat([torch.ones(len(self.base_RS), 1), shards.work_RP[:, LOAD_COLUMNS]], dim=1)
        loads_NL = shards.sum_over_tables(loads_RL).numpy()
        self.count_N1 = loads_NL[:, :1]
        self.log_count_N1 = np.log2(self.count_N1) / 6
        self.log_loads_NL = np.log2(np.maximum(loads_NL[:, 1:], 1e-3)) / 6

    def gradients(self, chosen: np.ndarray) -> np.ndarray:
        """[N, S] errors of the chosen shards, in logs; the gradient of their mean loss goes to `adam`."""
        inside_NR = np.zeros((len(chosen), len(self.base_RS) + 1), dtype=np.float32)
        inside_NR[np.arange(len(chosen))[:, None], self.members_NM[chosen]] = 1.0
        inside_NR = inside_NR[:, :-1]  # the last column is padding

        out_RO = self.table_net.forward(self.features_RF)
        bent_RS = np.tanh(out_RO[:, :2] / TABLE_BOUND)
        cost_RS = self.base_RS * np.exp(TABLE_BOUND * bent_RS)
        count_N1 = self.count_N1[chosen]
        sums_NO = inside_NR @ np.concatenate([cost_RS, out_RO[:, 2:]], axis=1)
        cost_NS = sums_NO[:, :2]
        clamped_NS = np.maximum(cost_NS, 1e-3)
        inputs = np.concatenate(
            [
                self.log_count_N1[chosen],
                np.log2(clamped_NS) / 6,
                self.log_loads_NL[chosen],
                sums_NO[:, 2:] / count_N1,
            ],
            axis=1,
        )
        bent_NS = np.tanh(self.device_net.forward(inputs))
        raw_NS = cost_NS + self.launch_S
        error_NS = np.log(raw_NS) + FUSION_BOUND * bent_NS - self.log_target_NS[chosen]

        grad_NS = np.minimum(np.maximum(error_NS / HUBER, -1), 1) / error_NS.size
        grad_inputs = self.device_net.backward(grad_NS * FUSION_BOUND * (1 - bent_NS**2))
        grad_cost_NS = grad_NS / raw_NS + grad_inputs[:, 1:3] * (LOG2_SCALE / clamped_NS) * (cost_NS > 1e-3)
        grad_embed = grad_inputs[:, NUM_LOGS:] / count_N1
        grad_RO = inside_NR.T @ np.concatenate([grad_cost_NS, grad_embed], axis=1)
        grad_RO[:, :2] *= cost_RS * (1 - bent_RS**2)
        self.table_net.backward(grad_RO, to_inputs=False)
        return error_NS
