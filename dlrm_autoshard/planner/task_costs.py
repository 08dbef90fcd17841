"""Fast cost predictions for one task: any set of its units on any of its ranks.

costs.rank_ms(rank_U)                        # [W, 4] stages of every rank under a placement
costs.step_ms(rank_U)                        # sum over stages of the slowest rank
costs.stage_ms(sums_NK, ranks_N)             # the same for any device summaries, as search and rollouts need
costs.total_ms(stages_W4, sums_WK)           # the step from these, including links between hosts
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.costs import COMPUTE, EXCHANGE
from dlrm_autoshard.planner.corrections.corrections import Corrections
from dlrm_autoshard.planner.costs.cost_model import COST, DIM, NUM_SUMMARY, CostModel
from dlrm_autoshard.planner.costs.exchange_model import TRAFFIC, ExchangeModel, HostLinks
from dlrm_autoshard.planner.task import PlacementTask

# Axes: U units, W ranks, H hosts, N candidates, K summary columns, 4 stages in the order of PLANNED_STAGES.

CHUNK = 65_536
BYTES_PER_ID, RANGED_NS = 8, 20.0
"""RANGED_NS: ns to find the row range of an id on the asking rank; 16 to 25 with 2 to 8 ranges."""
FUSED = slice(NUM_SUMMARY, NUM_SUMMARY + 2)
"""Summary columns after the cost model's own."""


class TaskCosts:
    """Predicts from sums over units, so a candidate (a unit more here, one less there) costs a vector addition and a
    small network; thousands are evaluated at once.

    Searches see the two exchanges as what a rank sends and what it receives: as for other stages, the slowest ranks add
    up to the exchange model's cost within a host. With several hosts, the slowest host's link (`links`) is added.
    """

    def __init__(
        self,
        task: PlacementTask,
        model: CostModel,
        exchange: ExchangeModel,
        corrections: Corrections | None = None,
    ) -> None:
        corrections = corrections or Corrections()
        world_size, topology = task.world_size, task.topology
        self._task, self._model, self._exchange, self._corrections = task, model, exchange, corrections
        summary_TK = model.summaries(task.tables, task.stats, task.batch_size)
        summary_TK[:, DIM] *= np.array([[stat.features] for stat in task.stats])
        summary_TK[:, COST] *= corrections.table_factors_T2(task.tables)
        fused_T2 = summary_TK[:, COST] * corrections.fused_logs_T2(task.tables).astype(np.float32)
        self.summary_TK = np.concatenate([summary_TK, fused_T2], axis=1)
        self.summary_UK = task.units.sum_over_tables(self.summary_TK)
        self.launch_S, self.world_size = model.launch_S, world_size
        self.factor_W2 = corrections.rank_factors_W2(world_size, topology.speed).astype(np.float32)
        self.fastest = int(self.factor_W2.sum(axis=1).argmin())
        dims = float(summary_TK[:, DIM].sum())
        self._exchange_W2, self.exchange_spread = corrections.exchange_factors_W2(world_size), exchange.spread
        slowest_2 = self._exchange_W2.max(axis=0)
        self.comms_base_2, self.comms_per_dim_2 = (
            (lines_22 @ slowest_2).astype(np.float32) for lines_22 in exchange.lines(dims, task.batch_size, world_size)
        )
        links = exchange.links(world_size, task.batch_size, topology.hosts)
        self.links = HostLinks(links.host_W, task.batch_size, links.price_SL * slowest_2[:, None])
        # Ids go to the owner of every shard of a table, at the price of as many bytes of vectors.
        mb_T = np.array([stat.mean_pooling for stat in task.stats]) * task.batch_size / world_size * BYTES_PER_ID * 1e-6
        price = exchange.prices_SP[0, TRAFFIC].sum() * (1 - 1 / world_size)
        again_T = np.array([table.columns[0] > 0 for table in task.tables])
        ranged_T = ~again_T & [table.shard.rows is not None for table in task.tables]
        self.ids_ms_U = task.units.sum_over_tables(mb_T * (price * again_T + RANGED_NS / BYTES_PER_ID * ranged_T))

    def device_ms(self, summaries: np.ndarray) -> np.ndarray:
        """Returns ms [..., 2] of forward and backward computation for device summaries [..., K], on the fastest
        rank."""
        own = summaries[..., :NUM_SUMMARY]
        ms = self._model.device_ms(own)
        fused_logs = summaries[..., FUSED] / np.maximum(own[..., COST], 1e-9)
        return ms * self._corrections.set_factors(ms, own, fused_logs).astype(np.float32)

    def stages(self, sums_NDK: np.ndarray, ranks_D: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns ms [..., 4] of forward, sending, receiving and backward for devices of ranks `ranks_D`, by default
        all in order."""
        stages = np.empty((*sums_NDK.shape[:-1], 4), dtype=np.float32)
        stages[..., COMPUTE] = self.device_ms(sums_NDK) * self.factor_W2[ranks_D]
        stages[..., EXCHANGE] = self.comms_base_2 + sums_NDK[..., DIM] * self.comms_per_dim_2
        return stages

    def total_ms(self, stages_NW4: np.ndarray, sums_NWK: np.ndarray) -> np.ndarray:
        """Returns the step's ms [...] from all ranks' stages and summaries: the slowest rank of each stage, and the
        slowest host's link."""
        links_N = self.links.ms(self.links.dims(sums_NWK[..., DIM.start])).max(axis=-2).sum(axis=-1)
        total: np.ndarray = stages_NW4.max(axis=-2).sum(axis=-1) + links_N
        return total

    def stage_ms(self, sums_NK: np.ndarray, ranks_N: np.ndarray) -> np.ndarray:
        """Returns stages [N, 4] of ranks `ranks_N` that own the units summed in `sums_NK`."""
        chunks = [self.stages(sums_NK[i : i + CHUNK], ranks_N[i : i + CHUNK]) for i in range(0, len(sums_NK), CHUNK)]
        return np.concatenate(chunks).astype(np.float64) if chunks else np.zeros((0, 4))

    def sums(self, rank_U: np.ndarray) -> np.ndarray:
        """Returns every rank's summary [W, K]; units with rank -1 are not placed yet."""
        placed = rank_U >= 0
        sums = np.zeros((self.world_size, self.summary_UK.shape[1]), dtype=np.float32)
        np.add.at(sums, rank_U[placed], self.summary_UK[placed])
        return sums

    def rank_ms(self, rank_U: np.ndarray) -> np.ndarray:
        """Returns ms [W, 4]; in an exchange, which ends on all ranks at once, all take as long as the slowest."""
        sums, task = self.sums(rank_U), self._task
        ms_W4 = self.stage_ms(sums, np.arange(self.world_size))
        dims_W = sums[:, DIM].ravel().astype(np.float64)
        ms_W4[:, EXCHANGE] = self._exchange.ms(dims_W, task.batch_size, task.topology.hosts) * self._exchange_W2
        ms_W4[:, EXCHANGE.start] += self.ids_ms_U[rank_U >= 0].sum()
        return ms_W4

    def step_ms(self, rank_U: np.ndarray) -> float:
        return float(self.rank_ms(rank_U).max(axis=0).sum())

    def alone_ms(self) -> np.ndarray:
        """Returns the ms [U] that each unit adds to the fastest rank, all stages."""
        with_nothing_UK = np.concatenate([self.summary_UK, np.zeros_like(self.summary_UK[:1])])
        ms = self.stage_ms(with_nothing_UK, np.full(len(with_nothing_UK), self.fastest)).sum(axis=1)
        return np.maximum(ms[:-1] - ms[-1], 1e-6)
