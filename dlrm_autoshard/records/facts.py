"""Measurements of one interval (an epoch or part of one): by one rank, and by all ranks together.

mine = RankInterval(epoch=0, first_step=0, end_step=64, rank=1, host="a", device="cpu", tables=("user",),
                 table_bytes=60_352, stages={"fwd_compute": StageTime(12.4, 13.0, 0.3, 20), ...},
                 step_ms=31.0, throughput=33_000.0, cpu_share=0.99, peak_memory_bytes=2**29)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.costs import (
    DENSE_STAGES,
    PLANNED_STAGES,
    STAGES,
    WAITS,
    RankCost,
    StageTime,
    balance_gain,
    balanced_cost_ms,
    step_cost_ms,
)
from dlrm_autoshard.formats.json_file import checked
from dlrm_autoshard.formats.numbers import Amount, Count, Finite
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.jsonl import SCHEMA, ReportError
from dlrm_autoshard.tables import Shard, side_by_side


def rank_file(run_dir: Path, rank: int) -> Path:
    """Returns costs/rank_00001.jsonl."""
    return run_dir / "costs" / f"rank_{rank:05d}.jsonl"


class StageRecord(TypedDict):
    """`StageTime` as JSON."""

    median_ms: Finite
    p95_ms: Finite
    iqr_ms: Finite
    samples: Count
    mean_ms: NotRequired[Finite | None]


class RankRecord(TypedDict):
    """`RankInterval` as JSON, without values derived from `detail`."""

    epoch: Count
    first_step: Count
    end_step: Count
    rank: Count
    host: str
    device: str
    tables: list[str]
    table_bytes: Count
    step_ms: Amount
    throughput: Amount
    cpu_share: Amount | None
    peak_memory_bytes: Count
    detail: dict[str, StageRecord]


@dataclass(frozen=True)
class RankInterval:
    """One rank's steps [first_step, end_step), timed on sampled steps.

    stages: time in each of costs.STAGES and costs.WAITS; stages that were not measured are missing.
    step_ms: a typical sampled step: the sum of its stages and waits.
    throughput: examples/s of this rank's share of the batch over all steps.
    cpu_share: CPU time / wall time of the compute stages; well below 1 if another process used the rank's core; None
    on CUDA, where it is not measured. table_bytes: weights and optimizer state of the tables owned.
    peak_memory_bytes: of the process or the device.
    """

    epoch: int
    first_step: int
    end_step: int
    rank: int
    host: str
    device: str
    tables: tuple[str, ...]
    table_bytes: int
    stages: Mapping[str, StageTime]
    step_ms: float
    throughput: float
    cpu_share: float | None
    peak_memory_bytes: int

    def __post_init__(self) -> None:
        unknown = set(self.stages) - set(STAGES) - set(WAITS)
        if unknown:
            raise ReportError(f"rank {self.rank} has unknown stages: {', '.join(sorted(unknown))}.")

    def ms(self, stage: str) -> float:
        """Returns the time of a stage or wait in a typical step; 0 if it was not timed."""
        return self.stages[stage].typical_ms if stage in self.stages else 0.0

    @property
    def wait_ms(self) -> float:
        return sum(self.ms(name) for name in WAITS)

    @property
    def cost(self) -> RankCost:
        """Medians of the planned stages, which outliers do not affect."""
        return RankCost(**{f"{n}_ms": self.stages[n].median_ms if n in self.stages else 0.0 for n in PLANNED_STAGES})

    @property
    def dense_ms(self) -> float | None:
        """Milliseconds of the dense part; None in custom loops, where it may include waiting."""
        timed = [self.stages[name].median_ms for name in DENSE_STAGES if name in self.stages]
        return sum(timed) if len(timed) == len(DENSE_STAGES) else None

    def to_json(self) -> dict[str, Any]:
        record = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "stages"}
        return {
            "schema": SCHEMA,
            **record,
            "tables": list(self.tables),
            **{name: self.ms(name) if name in self.stages else None for name in STAGES},
            "wait": self.wait_ms,
            "detail": {name: time.to_json() for name, time in self.stages.items()},
        }

    @staticmethod
    def from_json(record: Any) -> RankInterval:
        """Parses a record; FormatError names the bad key. Unknown keys, as newer versions write, are ignored."""
        values: dict[str, Any] = {**checked(RankRecord, record, extra="ignore")}
        stages = {name: StageTime(**time) for name, time in values.pop("detail").items()}
        return RankInterval(**values | {"tables": tuple(values["tables"])}, stages=stages)


@dataclass(frozen=True)
class TableUse:
    """A table or shard in one interval: its rank, its size and how the data used it."""

    name: str
    rank: int
    num_embeddings: int
    embedding_dim: int
    bytes: int
    mean_pooling: float
    mean_reuse: float
    features: float = 1

    @property
    def shard(self) -> Shard:
        return Shard(self.name)


def pooling_of_tables(uses: Iterable[TableUse]) -> dict[str, float]:
    """Returns each table's ids per sample. A column shard sees all ids of its table, a row shard only its share."""
    pooling: dict[str, dict[tuple[int, int], float]] = {}
    for use in uses:
        pooling.setdefault(use.shard.table, {})[use.shard.rows or (0, 0)] = use.mean_pooling
    return {table: sum(of[rows] for rows in side_by_side(of)) for table, of in pooling.items()}


@dataclass(frozen=True)
class IntervalFacts:
    """All ranks' measurements by column: `stage_ms["fwd_compute"][r]` is rank r's time in a typical step.

    stage_ms has all of costs.STAGES and wait_ms all of costs.WAITS. unmeasured: stages that no rank timed, as in custom
    loops; stage_ms has 0 for them. error_ms: standard errors of stage_ms where known. noise: relative spread of the
    planned stages over sampled steps, on the noisiest rank. predicted: the planner's prediction for this plan, if any.
    """

    epoch: int
    first_step: int
    end_step: int
    batch_size: int
    stage_ms: Mapping[str, tuple[float, ...]]
    wait_ms: Mapping[str, tuple[float, ...]]
    step_ms_by_rank: tuple[float, ...]
    throughput_by_rank: tuple[float, ...]
    cpu_share: tuple[float | None, ...]
    table_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    samples: int
    noise: float
    tables: tuple[TableUse, ...]
    predicted: tuple[RankCost, ...] | None = None
    error_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.step_ms_by_rank)

    @property
    def step_ms(self) -> float:
        """A typical sampled step of the slowest rank. Ranks differ little, because they meet at every collective."""
        return max(self.step_ms_by_rank)

    @property
    def mean_step_ms(self) -> float:
        """Mean over all steps, from the throughput. Sampled steps take longer: they have a barrier before every
        collective and overlap nothing."""
        return 1e3 * self.batch_size / self.throughput if self.throughput > 0 else 0.0

    @property
    def throughput(self) -> float:
        return sum(self.throughput_by_rank)

    @property
    def measured(self) -> tuple[RankCost, ...]:
        return tuple(
            RankCost(**{f"{name}_ms": self.stage_ms[name][rank] for name in PLANNED_STAGES})
            for rank in range(self.world_size)
        )

    @property
    def slowest_sum_ms(self) -> float:
        """Sum over stages of the slowest rank's time."""
        return sum(max(times) for times in self.stage_ms.values())

    @property
    def balance_gain(self) -> float:
        """Fraction of a step that perfect balance of the planned stages would save (`costs.balance_gain`)."""
        return balance_gain(self.measured, self.mean_step_ms)

    @property
    def balanced_ms(self) -> float:
        """A sampled step if the four planned stages were perfectly balanced."""
        return self.step_ms - step_cost_ms(self.measured) + balanced_cost_ms(self.measured)

    @property
    def accounted(self) -> float:
        """(Stages + waits) / step time, on the rank where it is furthest from 1."""
        every = [*self.stage_ms.values(), *self.wait_ms.values()]
        shares = [sum(t[r] for t in every) / step for r, step in enumerate(self.step_ms_by_rank) if step > 0]
        return max(shares, key=lambda share: abs(share - 1.0), default=1.0)

    @property
    def plan(self) -> ShardingPlan:
        return ShardingPlan({table.name: table.rank for table in self.tables}, self.world_size)
