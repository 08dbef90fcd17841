"""What a run writes down about each epoch's steps: a `RankEpoch` by every rank, one `EpochProfile` of them all.

    mine = RankEpoch(epoch=0, first_step=0, end_step=64, rank=1, host="a", device="cpu", tables=("user",),
                     table_bytes=60_352, stages={"fwd_compute": StageTime(12.4, 13.0, 0.3, 20), ...},
                     step_ms=31.0, throughput=33_000.0, cpu_share=0.99, peak_memory_bytes=2**29)
    append_jsonl(rank_file(run_dir, mine.rank), mine.to_json())             # costs/rank_00001.jsonl, each rank its own
    profile = EpochProfile.gather(all_ranks, plan, tables, stats, predicted)              # on rank 0
    append_jsonl(epochs_file(run_dir), profile.to_json())                   # costs/epochs.jsonl
    profile.straggler                                                       # who, in which stage, why, which tables

An `EpochProfile` keeps facts only; what follows from them (slowest ranks, imbalance, straggler: see diagnosis.py) is
computed, and written into its JSON for readers that don't have this package. SCHEMA.md lists every key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dlrm_autoshard.costs import (
    PLANNED_STAGES,
    STAGES,
    WAITS,
    RankCost,
    StageTime,
    balance_gain,
    balanced_cost_ms,
    step_cost_ms,
)
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records import diagnosis
from dlrm_autoshard.records.jsonl import SCHEMA, ReportError
from dlrm_autoshard.tables import TableConfig, TableStats


def rank_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "costs" / f"rank_{rank:05d}.jsonl"


def epochs_file(run_dir: Path) -> Path:
    return run_dir / "costs" / "epochs.jsonl"


@dataclass(frozen=True)
class RankEpoch:
    """One rank's epoch: steps [first_step, end_step), timed on sampled steps.

    stages: time in each of costs.STAGES and costs.WAITS; one that is not there took no time.
    step_ms: of a typical sampled step, from the first stage to the last: the sum of its stages and waits.
    throughput: examples/s of this rank's share of the batch over the whole epoch, sampled or not.
    cpu_share: CPU time / wall time of the stages that compute; well below 1 means that something else had the rank's
    core; None where it is not measured (CUDA). table_bytes: weights and optimizer state of the tables owned.
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
            raise ReportError(f"rank {self.rank} timed stages that do not exist: {', '.join(sorted(unknown))}.")

    def ms(self, stage: str) -> float:
        """A stage or a wait in a typical step; 0 where it was not timed."""
        return self.stages[stage].typical_ms if stage in self.stages else 0.0

    @property
    def wait_ms(self) -> float:
        return sum(self.ms(name) for name in WAITS)

    @property
    def cost(self) -> RankCost:
        """The stages that placement decides, as the planner knows them: medians, which no odd step moves."""
        return RankCost(**{f"{n}_ms": self.stages[n].median_ms if n in self.stages else 0.0 for n in PLANNED_STAGES})

    def to_json(self) -> dict[str, Any]:
        record = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "stages"}
        return {
            "schema": SCHEMA,
            **record,
            "tables": list(self.tables),
            **{name: self.ms(name) for name in STAGES},
            "wait": self.wait_ms,
            "detail": {name: time.to_json() for name, time in self.stages.items()},
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> RankEpoch:
        try:
            values = {field.name: record[field.name] for field in fields(RankEpoch) if field.name != "stages"}
            stages = {name: StageTime(**time) for name, time in record["detail"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"this is not a rank's epoch: {_missing(error)}.") from error
        return RankEpoch(**{**values, "tables": tuple(values["tables"])}, stages=stages)


@dataclass(frozen=True)
class TableUse:
    """One table in one epoch: where it lived, how large it is and what the data did to it."""

    name: str
    rank: int
    num_embeddings: int
    embedding_dim: int
    bytes: int
    mean_pooling: float
    mean_reuse: float


@dataclass(frozen=True)
class EpochProfile:
    """All ranks' epoch, column by column: `stage_ms["fwd_compute"][r]` is rank r's in a typical step.

    stage_ms has every one of costs.STAGES and wait_ms every one of costs.WAITS. noise: relative spread of the
    sampled steps' planned stages, on the noisiest rank. predicted: what the planner had expected of this plan, if it
    had been asked.
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

    @staticmethod
    def gather(
        ranks: Sequence[RankEpoch],
        plan: ShardingPlan,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        batch_size: int,
        predicted: Sequence[RankCost] | None = None,
    ) -> EpochProfile:
        """From every rank's record, in any order; tables and stats in canonical order; batch_size over all ranks."""
        ranks = sorted(ranks, key=lambda rank: rank.rank)
        if [rank.rank for rank in ranks] != list(range(plan.world_size)):
            raise ReportError(
                f"records of ranks {[rank.rank for rank in ranks]} for a plan of {plan.world_size} ranks."
            )
        return EpochProfile(
            epoch=ranks[0].epoch,
            first_step=ranks[0].first_step,
            end_step=ranks[0].end_step,
            batch_size=batch_size,
            stage_ms={name: tuple(rank.ms(name) for rank in ranks) for name in STAGES},
            wait_ms={name: tuple(rank.ms(name) for rank in ranks) for name in WAITS},
            step_ms_by_rank=tuple(rank.step_ms for rank in ranks),
            throughput_by_rank=tuple(rank.throughput for rank in ranks),
            cpu_share=tuple(rank.cpu_share for rank in ranks),
            table_bytes=tuple(rank.table_bytes for rank in ranks),
            peak_memory_bytes=tuple(rank.peak_memory_bytes for rank in ranks),
            hosts=tuple(rank.host for rank in ranks),
            devices=tuple(rank.device for rank in ranks),
            samples=min((time.samples for rank in ranks for time in rank.stages.values()), default=0),
            noise=max(diagnosis.relative_spread([rank.stages.get(name) for name in PLANNED_STAGES]) for rank in ranks),
            tables=tuple(
                TableUse(
                    table.name, plan.rank_of[table.name], table.num_embeddings, table.embedding_dim,
                    table.weight_bytes, stat.mean_pooling, stat.mean_reuse,
                )
                for table, stat in zip(tables, stats, strict=True)
            ),
            predicted=None if predicted is None else tuple(predicted),
        )  # fmt: skip

    @property
    def world_size(self) -> int:
        return len(self.step_ms_by_rank)

    @property
    def step_ms(self) -> float:
        """Measured; ranks meet at every collective, so they differ by little. The slowest counts."""
        return max(self.step_ms_by_rank)

    @property
    def mean_step_ms(self) -> float:
        """Over all steps, sampled or not, from the throughput. Sampled steps take longer: they meet before every
        collective, and nothing overlaps."""
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
        """Sum over all stages of the slowest rank: what the step takes by the stages' own account."""
        return sum(max(times) for times in self.stage_ms.values())

    @property
    def balance_gain(self) -> float:
        """The part of a step that perfect balance of what placement decides would save (`costs.balance_gain`)."""
        return balance_gain(self.measured, self.mean_step_ms)

    @property
    def balanced_ms(self) -> float:
        """The sampled step at perfect balance of what placement decides: the four planned stages."""
        return self.step_ms - step_cost_ms(self.measured) + balanced_cost_ms(self.measured)

    @property
    def accounted(self) -> float:
        """Stages and waits / step time, on the rank where they add up worst. 1.0: nothing missing or counted twice."""
        every = [*self.stage_ms.values(), *self.wait_ms.values()]
        shares = [sum(t[r] for t in every) / step for r, step in enumerate(self.step_ms_by_rank) if step > 0]
        return max(shares, key=lambda share: abs(share - 1.0), default=1.0)

    @property
    def straggler(self) -> diagnosis.Straggler | None:
        return diagnosis.find_straggler(self)

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured of the step's planned cost; negative: slower than it was expected to be."""
        return diagnosis.prediction_error(self.predicted, self.measured)

    @property
    def plan(self) -> ShardingPlan:
        return ShardingPlan({table.name: table.rank for table in self.tables}, self.world_size)

    def to_json(self) -> dict[str, Any]:
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        columns = {field.name: [getattr(t, field.name) for t in self.tables] for field in fields(TableUse)}
        straggler = self.straggler
        return {
            "schema": SCHEMA,
            **facts,
            "stage_ms": dict(self.stage_ms),
            "wait_ms": dict(self.wait_ms),
            "tables": columns,
            "predicted": None if self.predicted is None else [cost.to_json() for cost in self.predicted],
            # What follows from the facts, for readers without this package.
            "step_ms": self.step_ms,
            "mean_step_ms": self.mean_step_ms,
            "slowest_sum_ms": self.slowest_sum_ms,
            "balanced_ms": self.balanced_ms,
            "balance_gain": self.balance_gain,
            "accounted": self.accounted,
            "throughput": self.throughput,
            "stages": diagnosis.stage_summary(self),
            "waited_for": diagnosis.waited_for(self),
            "straggler": None if straggler is None else straggler.to_json(),
            "prediction_error": self.prediction_error,
            "prediction_error_by_stage": diagnosis.prediction_error_by_stage(self.predicted, self.measured),
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> EpochProfile:
        try:
            facts = {field.name: record[field.name] for field in fields(EpochProfile)}
            columns = record["tables"]
            tables = tuple(
                TableUse(*row) for row in zip(*(columns[field.name] for field in fields(TableUse)), strict=True)
            )
            predicted = facts["predicted"] and tuple(RankCost.from_json(cost) for cost in facts["predicted"])
            by_stage = {
                name: {stage: tuple(facts[name][stage]) for stage in stages}
                for name, stages in (("stage_ms", STAGES), ("wait_ms", WAITS))
            }
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ReportError(f"this is not an epoch's profile: {_missing(error)}.") from error
        tuples = {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
        return EpochProfile(**{**facts, **tuples, **by_stage, "tables": tables, "predicted": predicted})


def _missing(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
