"""A simulated job with resharding, for tests of decisions: all costs are simulated, and no rank runs.

job = Training(seed=0)
job.run(3)                  # ["moved", "kept", "kept"]
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decide import History
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.config import AutoshardConfig, ReshardConfig
from dlrm_autoshard.costs import StepProfile, stages_W4, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.probe.simulator import SimulatedCluster
from dlrm_autoshard.records.decisions import DecisionLog
from dlrm_autoshard.records.jsonl import read_jsonl
from dlrm_autoshard.tables import TableConfig, TableStats

BATCH, STEPS, DENSE_MS = 2048, 500, 4.0


@pytest.fixture(autouse=True)
def unhurried_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that no clock ends or skips, so that slow machines decide like fast ones."""
    monkeypatch.setattr(thresholds, "LOOK_SHARE", 1000.0)
    monkeypatch.setattr(History, "looked", lambda *_, **__: None)


_STARTS: dict[Any, tuple[Planner, SimulatedCluster, ShardingPlan]] = {}
"""Jobs after their start, cached because it takes a second and is always the same."""


class Training:
    """A simulated job with resharding, run interval by interval. records: its decisions.jsonl."""

    def __init__(
        self,
        seed: int = 0,
        world_size: int = 2,
        noise: float = 0.01,
        num_tables: int = 24,
        splits: Splits = Splits(),
    ) -> None:
        draw, self.splits = np.random.default_rng(seed), splits
        self.tables = [
            TableConfig(f"t{i}", int(10 ** draw.uniform(3, 6)), 4 * int(draw.integers(4, 32)))
            for i in range(num_tables)
        ]
        self.stats = [TableStats(float(np.exp(draw.uniform(0, 4))), batch_size=BATCH) for _ in self.tables]
        self.exact = SimulatedCluster(seed)
        self.noise = np.random.default_rng([seed, 9])
        self.topology = Topology(world_size)
        self.bytes_of = {table.name: table.weight_bytes for table in self.tables}
        self.folder = tempfile.TemporaryDirectory()
        self.log = DecisionLog(Path(self.folder.name) / "decisions.jsonl")
        self.step, self.total = 0, 100_000
        key = (seed, world_size, noise, num_tables, splits)
        if key not in _STARTS:
            self.planner, self.cluster = Planner(seed=seed), SimulatedCluster(seed, noise=noise)
            self.plan = self.start_plan()
            _STARTS[key] = copy.deepcopy((self.planner, self.cluster, self.plan))
        self.planner, self.cluster, self.plan = copy.deepcopy(_STARTS[key])
        self.controller = self.make_controller()

    def make_controller(self, planner: Planner | None = None, **reshard: Any) -> Controller:
        config = AutoshardConfig(enabled=True, reshard=ReshardConfig(**reshard))
        return Controller(config, planner or self.planner, self.task, self.bytes_of, self.log)

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_jsonl(self.log.path)

    @property
    def task(self) -> PlacementTask:
        return PlacementTask.build(self.tables, self.stats, self.topology, batch_size=BATCH, splits=self.splits)

    def start_plan(self) -> ShardingPlan:
        """Starts like a job: measures finalists on the ranks."""
        return self.planner.plan(self.task, measure=lambda plans: [self.measure(p) for p in plans]).plan

    def measure(self, plan: ShardingPlan) -> Any:
        return self.cluster.profile(self.tables, self.stats, plan, BATCH)

    def true_ms(self, plan: ShardingPlan) -> float:
        self.exact.slowdown = self.cluster.slowdown
        return DENSE_MS + step_cost_ms(self.exact.profile(self.tables, self.stats, plan, BATCH).ranks)

    def interval(
        self,
        *,
        early: bool = False,
        slower: float = 1.0,
        noise: float | None = None,
    ) -> Decision:
        """slower: times longer that steps take, by what is not in their stages. noise: of what is measured, if not the
        usual one."""
        profile = self.measure(self.plan)
        if noise is not None:
            profile = replace(profile, noise=noise)
        step_ms = slower * self.true_ms(self.plan) * float(np.exp(self.cluster.noise * self.noise.standard_normal()))
        self.step += STEPS
        interval = Interval(
            self.step // STEPS, self.step, profile, 1000 * BATCH / step_ms, self.total - self.step,
            timed_SW4=self.timed(profile), early=early,
        )  # fmt: skip
        decision = self.controller.decide(interval, self.plan)
        if decision.new_plan is not None:
            moves = self.plan.moves_to(decision.new_plan)
            self.plan = decision.new_plan
            made = [move.record(self.bytes_of[move.shard.table]) for move in moves]
            decision = self.controller.moved(made, 0.1 + sum(move["bytes"] for move in made) / 1e9)
        return decision

    def timed(self, profile: StepProfile, count: int = 6) -> np.ndarray:
        """[S, W, 4] sampled steps about the profile."""
        ranks_W4 = stages_W4(profile.ranks)
        draw_S = np.random.default_rng([self.step, count]).standard_normal((count, *ranks_W4.shape))
        timed: np.ndarray = ranks_W4 * np.exp(self.cluster.noise * draw_S)
        return timed

    def run(self, intervals: int) -> list[str]:
        return [self.interval().action for _ in range(intervals)]

    def best_known_ms(self) -> float:
        """Returns the best plan that a search with exact costs finds (the simulator's own)."""
        best_ms, _, best = min((self.true_ms(p), p.fingerprint, p) for p in self._many_plans())
        improved = True
        while improved:
            improved = False
            for table in self.tables:
                for rank in range(self.topology.world_size):
                    other = ShardingPlan({**best.rank_of, table.name: rank}, best.world_size)
                    other_ms = self.true_ms(other)
                    if other_ms < best_ms - 1e-9:
                        best, best_ms, improved = other, other_ms, True
        return best_ms

    def best_known_split_ms(self, table: TableConfig) -> float:
        """With `table` in 1, 2 or 4 parts: moves one by one from a longest-first start, by the exact costs."""
        best_ms = float("inf")
        for parts in (1, 2, 4):
            width = table.embedding_dim // parts
            pieces = [table.part(i * width, (i + 1) * width) for i in range(parts)]
            shards = [*pieces, *(other for other in self.tables if other is not table)]
            order = sorted(shards, key=lambda t: -t.embedding_dim * self.stats_of(t).mean_pooling)
            load, rank_of = [0.0] * self.topology.world_size, dict.fromkeys((t.name for t in shards), 0)
            for shard in order:
                rank = load.index(min(load))
                rank_of[shard.name] = rank
                load[rank] += shard.embedding_dim * self.stats_of(shard).mean_pooling
            plan = ShardingPlan(rank_of, len(load)).ordered([t.name for t in self.tables])
            moves = [(t.name, rank) for t in shards for rank in range(len(load))]
            plan_ms = self.true_ms(plan)
            for name, rank in [*moves, *moves]:
                other = ShardingPlan({**plan.rank_of, name: rank}, len(load))
                other_ms = self.true_ms(other)
                if other_ms < plan_ms:
                    plan, plan_ms = other, other_ms
            best_ms = min(best_ms, plan_ms)
        return best_ms

    def stats_of(self, table: TableConfig) -> TableStats:
        return self.stats[[t.name for t in self.tables].index(table.shard.table)]

    def _many_plans(self) -> Sequence[ShardingPlan]:
        return [p for p, _ in self.planner.propose(self.task, self.plan)]

    def worst_heuristic(self) -> ShardingPlan:
        names = ("size_greedy", "dim_greedy", "lookup_greedy", "size_lookup_greedy", "random")
        plans = [Planner(name).plan(self.task).plan for name in names]
        return max(plans, key=self.true_ms)
