"""Predicts what a fused shard's computation takes, from its tables alone.

    model = CostModel(seed=0)
    fit_cost_model(model, samples)                    # ShardSamples of the micro-benchmark or training (`fit_costs`)
    model.shard_ms(samples)                           # [N, 2] forward and backward in ms

DreamShard's shape (a shared table network, a sum over the device's tables, a head for each stage) on a physical base:

    table cost  = work . prices             work: ids, bytes, distinct rows, ... ; prices >= 0, solved in closed form
                  x exp(network(table))     what the prices miss about one table
    device cost = (launch + sum of table costs) x exp(network(summary of the device))     what fusion changes

With no data it is a roofline estimate; with ten samples the prices are right; with hundreds the networks take the
rest. Costs are learned in log space, because what matters is relative error.

Axes: N shards, R different tables among them, K summary columns, S = 2 stages (forward, backward).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_autoshard.planner.features import NUM_NETWORK, WORK, network_features, work
from dlrm_autoshard.planner.frozen import FrozenNet
from dlrm_autoshard.planner.replay import ShardSample
from dlrm_autoshard.planner.shard_set import ShardSet
from dlrm_autoshard.tables import TableConfig, TableStats

EMBED = 6
LOADS = ("ids", "read_bytes", "distinct_bytes")
NUM_LOGS = 3 + len(LOADS)
NUM_SUMMARY = 1 + NUM_LOGS + EMBED
"""A table's summary, which adds up over a device: 1, dim, forward ms, backward ms, loads, and a learned embedding.

The loads compete for caches, so what fusion changes depends on their sums; the embedding is small on purpose: what a
search looks for is where the model errs in its favour, and a large one errs somewhere.
"""
DIM, COST = slice(1, 2), slice(2, 4)
"""Columns of a summary: the sum of embedding dims, and forward and backward ms."""

BELIEVED_NS = {
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


class CostModel(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table_net = mlp([NUM_NETWORK, 64, 32, EMBED + 2], generator)
        self.device_net = mlp([NUM_LOGS + EMBED, 32, 2], generator)
        for net in (self.table_net, self.device_net):
            last = net[-1]
            assert isinstance(last, nn.Linear)
            last.weight.data.mul_(0.01)  # start as the physical base alone
        believed = torch.tensor([BELIEVED_NS[name] for name in WORK])
        self.prices_PS: Tensor
        self.launch_S: Tensor
        self.register_buffer("prices_PS", believed)
        self.register_buffer("launch_S", torch.tensor(LAUNCH_MS))

    def summarise(self, features_RF: Tensor, work_RP: Tensor) -> Tensor:
        """[R, K] of tables; a device's summary is the sum over its tables."""
        out = self.table_net(features_RF)
        cost_RS = (work_RP @ self.prices_PS) * (TABLE_BOUND * torch.tanh(out[:, :2] / TABLE_BOUND)).exp()
        dims_R1 = work_RP[:, 2:3] / work_RP[:, 1:2]
        loads = work_RP[:, LOAD_COLUMNS]
        return torch.cat([torch.ones_like(dims_R1), dims_R1, cost_RS, loads, out[:, 2:]], dim=1)

    def device_ms(self, summary_NK: Tensor) -> Tensor:
        """[N, 2] ms of devices; an empty one takes exactly 0."""
        raw_NS = summary_NK[..., COST] + self.launch_S
        return raw_NS * self.fusion(summary_NK) * (summary_NK[..., :1] > 0.5)

    def fusion(self, summary_NK: Tensor) -> Tensor:
        """[N, 2] factors, within 0.55 and 1.8: what computing these tables together changes."""
        count_N1 = summary_NK[..., :1].clamp(min=1)
        logs = torch.cat([count_N1, summary_NK[..., 2 : 1 + NUM_LOGS].clamp(min=1e-3)], dim=-1).log2() * (1 / 6)
        out = self.device_net(torch.cat([logs, summary_NK[..., 1 + NUM_LOGS :] / count_N1], dim=-1))
        return (FUSION_BOUND * torch.tanh(out)).exp()

    @torch.no_grad()
    def summaries(self, tables: Sequence[TableConfig], stats: Sequence[TableStats], batch_size: int) -> np.ndarray:
        features = torch.as_tensor(network_features(tables, stats, batch_size), dtype=torch.float32)
        done = torch.as_tensor(work(tables, stats, batch_size), dtype=torch.float32)
        return self.summarise(features, done).numpy()

    def shard_ms(self, samples: Sequence[ShardSample]) -> np.ndarray:
        """[N, 2] predicted forward and backward computation."""
        return self.predict(ShardSet(samples))

    @torch.no_grad()
    def predict(self, shards: ShardSet) -> np.ndarray:
        return self.device_ms(shards.sum_over_tables(self.summarise(shards.features_RF, shards.work_RP))).numpy()

    def errors(self, shards: ShardSet) -> tuple[float, float]:
        """Mean absolute relative error of forward and backward."""
        forward, backward = np.abs(self.predict(shards) / shards.target_NS.numpy() - 1).mean(axis=0)
        return float(forward), float(backward)

    def to_json(self) -> dict[str, Any]:
        return {name: tensor.tolist() for name, tensor in self.state_dict().items()}

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.load_state_dict({name: torch.tensor(values) for name, values in record.items()})


class FrozenDevices:
    """`CostModel.device_ms` in numpy, for search and rollouts."""

    def __init__(self, model: CostModel) -> None:
        self.net = FrozenNet(model.device_net)
        self.launch_S = model.launch_S.numpy().copy()

    def __call__(self, summaries: np.ndarray) -> np.ndarray:
        """[..., 2] from [..., K]."""
        summary_NK = summaries.reshape(-1, summaries.shape[-1])
        count_N1 = np.maximum(summary_NK[:, :1], 1)
        inputs = np.empty((len(summary_NK), NUM_LOGS + EMBED), dtype=np.float32)
        logs = inputs[:, :NUM_LOGS]
        logs[:, :1] = count_N1
        np.maximum(summary_NK[:, 2 : 1 + NUM_LOGS], 1e-3, out=logs[:, 1:])
        np.log2(logs, out=logs)
        logs *= 1 / 6
        np.divide(summary_NK[:, 1 + NUM_LOGS :], count_N1, out=inputs[:, NUM_LOGS:])
        ms_NS = np.exp(FUSION_BOUND * np.tanh(self.net(inputs)))
        ms_NS *= summary_NK[:, COST] + self.launch_S
        ms_NS *= summary_NK[:, :1] > 0.5
        return ms_NS.reshape(*summaries.shape[:-1], 2)


def mlp(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLU between them, initialised from `generator` (He for the hidden ones)."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=(2.0 / fan_in) ** 0.5, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if i == len(sizes) - 2 else [linear, nn.ReLU()]
    return nn.Sequential(*layers)
