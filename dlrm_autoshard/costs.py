"""Costs of a training step in ms, by stage and rank.

    step_cost_ms(profile.ranks)            # the planned stages of a step

Each stage ends at a collective, where all ranks wait for the slowest: a step takes the *sum over stages of the slowest
rank*, not the slowest rank's sum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.formats.json_file import FormatError, checked
from dlrm_autoshard.formats.numbers import Amount, BatchSize, Count, Share
from dlrm_autoshard.plan import PlanRecord, ShardingPlan, shard_tables
from dlrm_autoshard.tables import StatsRecord, TableConfig, TableRecord, TableStats, stats_of_part

PLANNED_STAGES = ("fwd_compute", "fwd_comms", "bwd_comms", "bwd_compute")
"""The four stages that placement decides; fields of `RankCost`."""

COMPUTE, EXCHANGE = slice(0, 4, 3), slice(1, 3)
"""Columns of an array [..., 4] in the order of PLANNED_STAGES: compute (forward, backward), and exchanges."""

IQR_OF_NORMAL = 1.35
"""Interquartile range of a normal distribution, in standard deviations."""

STAGES = (
    "data_wait",  # waiting for the loader's next batch
    "input_dist",  # sending ids to their owners
    "fwd_compute",  # fused lookup
    "fwd_comms",  # returning pooled vectors
    "dense_fwd",  # MLPs, interaction, loss
    "dense_bwd",  # backward of the dense part
    "bwd_comms",  # sending vectors' gradients to the owners
    "bwd_compute",  # fused backward and update of the tables
    "grad_allreduce",  # dense gradients, as far as not overlapped
    "dense_optim",  # dense optimizer step
    "other",  # the rest of the step: hooks, metrics, Python
)
DENSE_STAGES = ("dense_fwd", "dense_bwd", "dense_optim")
"""Stages with the same work on every rank."""
COLLECTIVES = ("input_dist", "fwd_comms", "bwd_comms", "grad_allreduce")
"""Stages in which ranks exchange data; they are missing with a single rank."""
COMPUTE_STAGES = ("fwd_compute", "bwd_compute", *DENSE_STAGES)
"""Stages that a rank computes by itself; they take longer if its core is shared."""
WAITS = ("input_dist_wait", "fwd_comms_wait", "bwd_comms_wait", "grad_allreduce_wait")
"""Times of waiting for slower ranks before a collective, not counted as communication."""

Source = Literal["measured", "probe", "simulated", "predicted"]


class CostRecord(TypedDict):
    """`RankCost` as JSON, in ms."""

    fwd_compute: Amount
    fwd_comms: Amount
    bwd_comms: Amount
    bwd_compute: Amount


class StepRecord(TypedDict):
    """`StepProfile` as JSON."""

    plan: PlanRecord
    tables: list[TableRecord]
    stats: list[StatsRecord]
    batch_size: BatchSize
    ranks: list[CostRecord]
    source: Source
    noise: Amount
    hosts: NotRequired[list[Count] | None]
    dense_ms: NotRequired[list[Amount] | None]
    core_shares: NotRequired[list[Share] | None]


@dataclass(frozen=True)
class RankCost:
    """One rank's ms per step in the stages that placement decides."""

    fwd_compute_ms: float = 0.0
    fwd_comms_ms: float = 0.0
    bwd_comms_ms: float = 0.0
    bwd_compute_ms: float = 0.0

    def stage(self, name: str) -> float:
        value: float = getattr(self, f"{name}_ms")
        return value

    @property
    def total_ms(self) -> float:
        return sum(self.stage(name) for name in PLANNED_STAGES)

    def to_json(self) -> dict[str, float]:
        return {name: self.stage(name) for name in PLANNED_STAGES}

    @staticmethod
    def from_json(record: Any) -> RankCost:
        cost: dict[str, Any] = {**checked(CostRecord, record)}
        return RankCost(**{f"{name}_ms": float(cost[name]) for name in PLANNED_STAGES})


@dataclass(frozen=True)
class StepProfile:
    """Cost of one plan: measured if `source` is 'measured' or 'probe'.

    tables, stats: parallel, in canonical order. ranks[r]: rank r's cost. batch_size: global. noise: relative spread of
    a repeated measurement (interquartile range / median), 0 if exact. hosts: each rank's host number; None: all on one.
    dense_ms: each rank's DENSE_STAGES, equal work on all ranks; None: unknown. core_shares: fraction of compute time in
    which each rank had its core; None: unknown, as on GPUs.
    """

    plan: ShardingPlan
    tables: tuple[TableConfig, ...]
    stats: tuple[TableStats, ...]
    batch_size: int
    ranks: tuple[RankCost, ...]
    source: Source
    noise: float = 0.0
    hosts: tuple[int, ...] | None = None
    dense_ms: tuple[float, ...] | None = None
    core_shares: tuple[float, ...] | None = None

    @property
    def standard_error(self) -> float:
        """Relative standard deviation of the figures."""
        return self.noise / IQR_OF_NORMAL

    @property
    def shards(self) -> tuple[tuple[TableConfig, ...], tuple[TableStats, ...]]:
        """The plan's shards, each with its part of its table's statistics."""
        if not self.plan.split_tables:
            return self.tables, self.stats
        shards = shard_tables(self.tables, self.plan)
        of = {table.name: (table, stat) for table, stat in zip(self.tables, self.stats, strict=True)}
        return shards, tuple(stats_of_part(shard, *of[shard.shard.table]) for shard in shards)

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "tables": [table.to_json() for table in self.tables],
            "stats": [stat.to_json() for stat in self.stats],
            "batch_size": self.batch_size,
            "ranks": [rank.to_json() for rank in self.ranks],
            "source": self.source,
            "noise": self.noise,
            "hosts": None if self.hosts is None else list(self.hosts),
            "dense_ms": None if self.dense_ms is None else list(self.dense_ms),
            "core_shares": None if self.core_shares is None else list(self.core_shares),
        }

    @staticmethod
    def from_json(record: Any) -> StepProfile:
        step = checked(StepRecord, record)
        plan = ShardingPlan.from_json(step["plan"])
        named = [table["name"] for table in step["tables"]]
        hosts, dense_ms, core_shares = step.get("hosts"), step.get("dense_ms"), step.get("core_shares")
        for name, by_rank in (("hosts", hosts), ("dense_ms", dense_ms), ("core_shares", core_shares)):
            if by_rank is not None and len(by_rank) != plan.world_size:
                raise FormatError(f"its {name} must have a value per rank.")
        placed = {*plan.tables}
        if len(step["stats"]) != len(named) or len(step["ranks"]) != plan.world_size or set(named) != placed:
            raise FormatError("its plan, tables, stats and ranks do not belong together.")
        return StepProfile(
            plan=plan,
            tables=tuple(TableConfig.from_json(table) for table in step["tables"]),
            stats=tuple(TableStats.from_json(stat) for stat in step["stats"]),
            batch_size=step["batch_size"],
            ranks=tuple(RankCost.from_json(rank) for rank in step["ranks"]),
            source=step["source"],
            noise=step["noise"],
            hosts=None if hosts is None else tuple(hosts),
            dense_ms=None if dense_ms is None else tuple(dense_ms),
            core_shares=None if core_shares is None else tuple(core_shares),
        )


def step_cost_ms(ranks: Sequence[RankCost]) -> float:
    """Returns the sum over stages of the slowest rank's ms."""
    return sum(max(rank.stage(name) for rank in ranks) for name in PLANNED_STAGES)


def prediction_error(
    predicted: Sequence[RankCost], measured: Sequence[RankCost], stages: Sequence[str] = PLANNED_STAGES
) -> float | None:
    """Returns sum |predicted - measured| / sum measured, over all ranks' `stages`; None if nothing took time."""
    pairs = [(p.stage(stage), m.stage(stage)) for p, m in zip(predicted, measured, strict=True) for stage in stages]
    total = sum(took for _, took in pairs)
    return sum(abs(expected - took) for expected, took in pairs) / total if total > 0 else None


def prediction_bias(predicted: Sequence[RankCost], measured: Sequence[RankCost]) -> float | None:
    """Returns (predicted - measured) / measured of the step cost. Errors of single ranks may be larger and cancel; see
    `prediction_error`."""
    cost = step_cost_ms(measured)
    return (step_cost_ms(predicted) - cost) / cost if cost > 0 else None


def balanced_cost_ms(
    ranks: Sequence[RankCost], slowness: Sequence[float] | None = None, *, exchange: bool = True
) -> float:
    """Returns the step's ms if every planned stage's work were perfectly balanced over ranks.

    slowness: factor on each rank's compute time; None: all equal. exchange: False if placement also decides how much
    travels (between hosts), so that balance bounds only compute."""
    return float(_balanced_ms(stages_W4(ranks), slowness, exchange))


def balance_gain(
    ranks: Sequence[RankCost], step_ms: float, slowness: Sequence[float] | None = None, *, exchange: bool = True
) -> float:
    """Returns the fraction of a real step (`step_ms`: the mean of all) that perfect balance would save, the most that
    placement can. Decisions and reports both use it. slowness, exchange: as in `balanced_cost_ms`."""
    return float(balance_gains(stages_W4(ranks), step_ms, slowness, exchange=exchange))


def balance_gains(
    stages_W4: np.ndarray, step_ms: float, slowness: Sequence[float] | None = None, *, exchange: bool = True
) -> np.ndarray:
    """Does the same for stages [..., W, 4] in ms of several steps; returns [...]."""
    excess = stages_W4.max(axis=-2).sum(axis=-1) - _balanced_ms(stages_W4, slowness, exchange)
    gains: np.ndarray = np.maximum(0.0, excess / step_ms) if step_ms > 0 else np.zeros_like(excess)
    return gains


def _balanced_ms(stages_W4: np.ndarray, slowness: Sequence[float] | None, exchange: bool) -> np.ndarray:
    slow_W = np.ones(stages_W4.shape[-2]) if slowness is None else np.array(slowness, dtype=np.float64)
    compute = (stages_W4[..., COMPUTE].sum(axis=-1) / slow_W).sum(axis=-1) / (1 / slow_W).sum()
    travel = stages_W4[..., EXCHANGE].sum(axis=(-2, -1)) / len(slow_W) if exchange else 0.0
    balanced: np.ndarray = compute + travel
    return balanced


def rank_costs(ms_W4: np.ndarray) -> tuple[RankCost, ...]:
    """Converts ms [W, 4], as `stages_W4` returns, to RankCosts."""
    return tuple(RankCost(*row) for row in ms_W4.tolist())


def stages_W4(ranks: Sequence[RankCost]) -> np.ndarray:
    """Returns ms [W, 4], stages as in PLANNED_STAGES."""
    return np.array([[rank.stage(name) for name in PLANNED_STAGES] for rank in ranks])


def imbalance(values: Sequence[float]) -> float:
    """Returns max / mean; 1.0 is perfect balance, and the value if there is no work."""
    total = sum(values)
    return max(values) * len(values) / total if total > 0 else 1.0


@dataclass(frozen=True)
class StageTime:
    """One stage on one rank over the sampled steps of an epoch.

    mean_ms: over typical steps, the middle half by total step time. Unlike medians, these means of stages add up to a
    step.
    """

    median_ms: float
    p95_ms: float
    iqr_ms: float
    samples: int
    mean_ms: float | None = None

    @staticmethod
    def of(seconds: Sequence[float], typical: Sequence[float] = ()) -> StageTime:
        """Summarizes repeated measurements. typical: seconds of the typical steps."""
        ordered = sorted(1e3 * value for value in seconds)
        quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
        p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
        mean = 1e3 * statistics.fmean(typical) if typical else None
        return StageTime(statistics.median(ordered), p95, quartiles[2] - quartiles[0], len(ordered), mean)

    @property
    def typical_ms(self) -> float:
        return self.median_ms if self.mean_ms is None else self.mean_ms

    @property
    def error_ms(self) -> float | None:
        """Standard error of the typical time; None with fewer than three steps, which have no quartiles."""
        if self.samples < 3:
            return None
        few = math.sqrt(1 + 1 / self.samples) * (1 + 1.2 / (self.samples - 2))  # about Student's t
        return few * self.iqr_ms / IQR_OF_NORMAL * math.sqrt(math.pi / 2 / self.samples)

    def to_json(self) -> dict[str, float]:
        return asdict(self)
