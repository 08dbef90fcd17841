"""Predicts what a fused shard's computation takes, from its tables alone.

    fit_cost_model(model, samples)                    # ShardSamples of the micro-benchmark or training (`fit_costs`)
    model.shard_ms(samples)                           # [N, 2] forward and backward in ms

DreamShard's shape (a shared table network, a sum over tables, a head for each stage) on physics: see `CostModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_autoshard.formats.arrays import array_like
from dlrm_autoshard.planner.costs.features import NUM_NETWORK, WORK, network_features, work
from dlrm_autoshard.planner.costs.mlp import Mlp, load_weights, weights_to_json
from dlrm_autoshard.planner.costs.replay import ShardSample
from dlrm_autoshard.planner.costs.shard_set import ShardSet
from dlrm_autoshard.tables import TableConfig, TableStats

EMBED = 6
LOADS = ("ids", "read_bytes", "distinct_bytes")
NUM_LOGS = 3 + len(LOADS)
NUM_SUMMARY = 3 + NUM_LOGS + EMBED
"""A table's summary, which adds up over a device: 1, dim, forward ms, backward ms, loads, a weight, its square, and a
learned embedding times the weight.

Tables are weighted by what their work costs at its prices, so that one that costs hardly anything changes hardly
anything: counted as one, a tenth of a device's cost changed what was predicted of it by up to -5%.

The loads compete for caches, so what fusion changes depends on their sums; the embedding is small on purpose: what a
search finds is where the model errs in its favour, and a large one errs somewhere.
"""
DIM, COST = slice(1, 2), slice(2, 4)
LOGGED, WEIGHT, EMBEDDED = slice(2, 1 + NUM_LOGS), 1 + NUM_LOGS, slice(3 + NUM_LOGS, NUM_SUMMARY)
"""Columns of a summary: the sum of embedding dims; forward and backward ms; what is taken in logs; the weight, before
its square; the embedding."""

PRIOR_NS = {
    # forward, backward; nanoseconds an operation (microseconds a table) of one CPU core
    "tables": (5.0, 10.0),
    "bags": (10.0, 10.0),
    "pooled_values": (0.15, 0.15),
    "ids": (4.0, 12.0),
    "read_bytes": (0.02, 0.05),
    "distinct_rows": (5.0, 15.0),
    "distinct_bytes": (0.1, 0.2),
    "sorting": (0.0, 1.0),
    "l2_miss_ids": (5.0, 5.0),
    "l3_miss_ids": (10.0, 10.0),
    "l2_miss_bytes": (0.02, 0.02),
    "far_rows": (10.0, 10.0),
}
LOAD_COLUMNS = [WORK.index(name) for name in LOADS]
TABLE_BOUND = 1.5
"""A table's network changes what the prices say by e^1.5 at most."""
FUSION_BOUND = 0.6
"""Computing tables together changes the sum of their costs by e^0.6 at most."""
LAUNCH_MS = (0.02, 0.05)
LEAST_LOAD = 1e-3
LOG_SCALE = 1 / 6
"""On base-2 logarithms, so that they are about -1 to 3."""


def tables_that_count(summary_NK: np.ndarray) -> np.ndarray:
    """Returns the effective number of tables [...]: n tables of equal weight count as n."""
    weight, squares = summary_NK[..., WEIGHT], summary_NK[..., WEIGHT + 1]
    alike: np.ndarray = np.clip(
        weight**2 / np.maximum(squares, LEAST_LOAD**2), 1.0, np.maximum(summary_NK[..., 0], 1.0)
    )
    return alike


class CostModel:
    """table cost  = work . prices             work: ids, bytes, distinct rows, ... ; prices >= 0, solved in closed form
                     x exp(network(table))     what the prices miss about one table
       device cost = (launch + sum of table costs) x exp(network(summary of the device))     what fusion changes

    With no data it is a roofline estimate; with ten samples the prices are right; with hundreds the networks take the
    rest. Costs are learned in log space, because what matters is relative error.

    Axes: N shards or devices, R different tables among them, K summary columns, S = 2 stages (forward, backward).
    """

    def __init__(self, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.table_net = Mlp([NUM_NETWORK, 64, 32, EMBED + 2], generator)
        self.device_net = Mlp([NUM_LOGS + EMBED, 32, 2], generator)
        self.nets = {"table_net": self.table_net, "device_net": self.device_net}
        for net in self.nets.values():
            net.parameters[-2] *= 0.01  # start as the physical base alone
        self.prices_PS = np.array([PRIOR_NS[name] for name in WORK], dtype=np.float32)
        self.launch_S = np.array(LAUNCH_MS, dtype=np.float32)

    def prices_alone(self) -> None:
        """Silences both networks, for all tables and sets, until they are trained again."""
        for net in self.nets.values():
            for parameter in net.parameters[-2:]:
                parameter[:] = 0

    def table_factors(self, features_RF: np.ndarray) -> np.ndarray:
        """Returns [R, S]: the factors by which the table network corrects the priced work."""
        return np.exp(TABLE_BOUND * np.tanh(self.table_net(features_RF)[:, :2] / TABLE_BOUND))

    def summarise(
        self, features_RF: np.ndarray, work_RP: np.ndarray
    ) -> tuple[np.ndarray, Callable[[np.ndarray], None]]:
        """Returns summaries [R, K] of tables and the function that takes gradients back. A device's summary is the
        sum over its tables."""
        out_RO, net_backward = self.table_net.forward(features_RF)
        bent_RS = np.tanh(out_RO[:, :2] / TABLE_BOUND)
        priced_RS = work_RP @ self.prices_PS
        weight_R1 = priced_RS.sum(axis=1, keepdims=True)
        cost_RS = priced_RS * np.exp(TABLE_BOUND * bent_RS)
        summary_RK = np.empty((len(out_RO), NUM_SUMMARY), dtype=out_RO.dtype)
        summary_RK[:, 0] = 1
        summary_RK[:, 1] = work_RP[:, 2] / work_RP[:, 1]  # dim: pooled values a bag
        summary_RK[:, COST] = cost_RS
        summary_RK[:, COST.stop : LOGGED.stop] = work_RP[:, LOAD_COLUMNS]
        summary_RK[:, WEIGHT : EMBEDDED.start] = np.concatenate([weight_R1, weight_R1**2], axis=1)
        summary_RK[:, EMBEDDED] = out_RO[:, 2:] * weight_R1

        def backward(grad_RK: np.ndarray) -> None:
            grad_cost_RS = grad_RK[:, COST] * cost_RS * (1 - bent_RS**2)
            net_backward(np.concatenate([grad_cost_RS, grad_RK[:, EMBEDDED] * weight_R1], axis=1), to_inputs=False)

        return summary_RK, backward

    def devices(self, summary_NK: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Returns ms [N, S] of devices, 0 for an empty one, and the function from gradients of log ms to gradients
        of summaries."""
        weight_N1 = np.maximum(summary_NK[:, WEIGHT : WEIGHT + 1], LEAST_LOAD)
        clamped = np.maximum(summary_NK[:, LOGGED], LEAST_LOAD)
        inputs = np.empty((len(summary_NK), NUM_LOGS + EMBED), dtype=summary_NK.dtype)
        logs = inputs[:, :NUM_LOGS]
        logs[:, 0] = tables_that_count(summary_NK)
        logs[:, 1:] = clamped
        np.log2(logs, out=logs)
        logs *= LOG_SCALE
        np.divide(summary_NK[:, EMBEDDED], weight_N1, out=inputs[:, NUM_LOGS:])
        out_NS, net_backward = self.device_net.forward(inputs)
        bent_NS = np.tanh(out_NS)
        raw_NS = summary_NK[:, COST] + self.launch_S
        ms_NS = np.exp(FUSION_BOUND * bent_NS)
        ms_NS *= raw_NS
        ms_NS *= summary_NK[:, :1] > 0.5

        def backward(grad_log_NS: np.ndarray) -> np.ndarray:
            grad_inputs = net_backward(grad_log_NS * FUSION_BOUND * (1 - bent_NS**2))
            grad_NK = np.zeros_like(summary_NK)
            grad_NK[:, LOGGED] = grad_inputs[:, 1:NUM_LOGS] * (LOG_SCALE / np.log(2)) / clamped
            grad_NK[:, LOGGED] *= summary_NK[:, LOGGED] > LEAST_LOAD
            grad_NK[:, COST] += grad_log_NS / raw_NS
            grad_NK[:, EMBEDDED] = grad_inputs[:, NUM_LOGS:] / weight_N1
            return grad_NK

        return ms_NS, backward

    def device_ms(self, summaries: np.ndarray) -> np.ndarray:
        """Returns ms [..., S] of summaries [..., K]."""
        ms_NS, _ = self.devices(summaries.reshape(-1, NUM_SUMMARY))
        return ms_NS.reshape(*summaries.shape[:-1], 2)

    def summaries(self, tables: Sequence[TableConfig], stats: Sequence[TableStats], batch_size: int) -> np.ndarray:
        work_TP = work(tables, stats, batch_size)
        features = network_features(tables, stats, batch_size, work_TP)
        return self.summarise(features.astype(np.float32), work_TP.astype(np.float32))[0]

    def shard_ms(self, samples: Sequence[ShardSample]) -> np.ndarray:
        """Returns predicted ms [N, 2] of forward and backward computation."""
        return self.predict(ShardSet(samples))

    def predict(self, shards: ShardSet) -> np.ndarray:
        summary_RK, _ = self.summarise(shards.features_RF, shards.work_RP)
        return self.device_ms(shards.sum_over_tables(summary_RK))

    def errors(self, shards: ShardSet) -> tuple[float, float]:
        """Returns mean absolute relative errors of forward and backward."""
        forward, backward = np.abs(self.predict(shards) / shards.target_NS - 1).mean(axis=0)
        return float(forward), float(backward)

    def to_json(self) -> dict[str, Any]:
        prices = {"prices_PS": self.prices_PS.tolist(), "launch_S": self.launch_S.tolist()}
        return {**weights_to_json(self.nets), **prices}

    def load_json(self, record: Mapping[str, Any]) -> None:
        load_weights(self.nets, record)
        self.prices_PS = array_like(record, "prices_PS", self.prices_PS)
        self.launch_S = array_like(record, "launch_S", self.launch_S)
