"""An interval's profile: measurements of all ranks and figures derived from them, as in costs/epochs.jsonl.

append_jsonl(rank_file(run_dir, mine.rank), mine.to_json())             # costs/rank_00001.jsonl, each rank its own
profile = IntervalProfile.gather(all_ranks, plan, tables, stats, predicted)              # on rank 0
append_jsonl(epochs_file(run_dir), profile.to_json())                   # costs/epochs.jsonl
profile.straggler                                                       # slowest rank, stage, cause, tables
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.costs import (
    COLLECTIVES,
    PLANNED_STAGES,
    STAGES,
    WAITS,
    CostRecord,
    RankCost,
    prediction_bias,
    prediction_error,
)
from dlrm_autoshard.formats.json_file import FormatError, checked
from dlrm_autoshard.formats.numbers import Amount, Count, Finite
from dlrm_autoshard.plan import ShardingPlan, shards_by_table
from dlrm_autoshard.records import diagnosis
from dlrm_autoshard.records.facts import IntervalFacts, RankInterval, TableUse
from dlrm_autoshard.records.jsonl import SCHEMA, ReportError
from dlrm_autoshard.tables import TableConfig, TableStats, stats_of_part


def epochs_file(run_dir: Path) -> Path:
    """Returns costs/epochs.jsonl."""
    return run_dir / "costs" / "epochs.jsonl"


class TableColumns(TypedDict):
    """`TableUse` of all tables as JSON columns."""

    name: list[str]
    rank: list[Count]
    num_embeddings: list[Count]
    embedding_dim: list[Count]
    bytes: list[Count]
    mean_pooling: list[Amount]
    mean_reuse: list[Amount]
    features: NotRequired[list[Count | Amount]]


class IntervalRecord(TypedDict):
    """`IntervalProfile` as JSON, without derived values."""

    epoch: Count
    first_step: Count
    end_step: Count
    batch_size: Count
    stage_ms: dict[str, list[Finite] | None]
    wait_ms: dict[str, list[Finite]]
    step_ms_by_rank: list[Amount]
    throughput_by_rank: list[Amount]
    cpu_share: list[Amount | None]
    table_bytes: list[Count]
    peak_memory_bytes: list[Count]
    hosts: list[str]
    devices: list[str]
    samples: Count
    noise: Amount
    tables: TableColumns
    predicted: NotRequired[list[CostRecord] | None]
    error_ms: NotRequired[dict[str, list[Amount]]]


@dataclass(frozen=True)
class IntervalProfile(IntervalFacts):
    """All ranks' measurements of an interval, with the straggler and the prediction errors."""

    @staticmethod
    def gather(
        ranks: Sequence[RankInterval],
        plan: ShardingPlan,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        batch_size: int,
        predicted: Sequence[RankCost] | None = None,
    ) -> IntervalProfile:
        """Combines every rank's record, in any order. tables, stats: in canonical order. batch_size: over all ranks."""
        ranks = sorted(ranks, key=lambda rank: rank.rank)
        if [rank.rank for rank in ranks] != list(range(plan.world_size)):
            raise ReportError(
                f"records of ranks {[rank.rank for rank in ranks]} for a plan of {plan.world_size} ranks."
            )
        return IntervalProfile(
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
                    shard.name, plan.rank_of[shard.name], shard.num_embeddings, shard.embedding_dim,
                    shard.weight_bytes, stats_of_part(shard, table, stat).mean_pooling, stat.mean_reuse, stat.features,
                )
                for table, parts, stat in zip(tables, shards_by_table(tables, plan), stats, strict=True)
                for shard in parts
            ),
            predicted=None if predicted is None else tuple(predicted),
            error_ms={name: errors for name in STAGES if (errors := _errors_ms(ranks, name))},
            unmeasured=tuple(
                name for name in STAGES
                if not any(name in rank.stages for rank in ranks) and (len(ranks) > 1 or name not in COLLECTIVES)
            ),
        )  # fmt: skip

    @property
    def straggler(self) -> diagnosis.Straggler | None:
        return diagnosis.find_straggler(self)

    @property
    def prediction_error(self) -> float | None:
        """`costs.prediction_error` of the planner's prediction; None without one."""
        return None if self.predicted is None else prediction_error(self.predicted, self.measured)

    @property
    def prediction_bias(self) -> float | None:
        """`costs.prediction_bias`: positive if the step cost less than predicted."""
        return None if self.predicted is None else prediction_bias(self.predicted, self.measured)

    def to_json(self) -> dict[str, Any]:
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "unmeasured"}
        columns = {field.name: [getattr(t, field.name) for t in self.tables] for field in fields(TableUse)}
        straggler = self.straggler
        return {
            "schema": SCHEMA,
            **facts,
            "stage_ms": {name: None if name in self.unmeasured else times for name, times in self.stage_ms.items()},
            "wait_ms": dict(self.wait_ms),
            "error_ms": dict(self.error_ms),
            "tables": columns,
            "predicted": None if self.predicted is None else [cost.to_json() for cost in self.predicted],
            # Derived values, for readers without this package.
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
            "prediction_bias": self.prediction_bias,
            "prediction_error_by_stage": None
            if self.predicted is None
            else {stage: prediction_error(self.predicted, self.measured, (stage,)) for stage in PLANNED_STAGES},
        }

    @staticmethod
    def from_json(record: Any) -> IntervalProfile:
        """Parses a record; FormatError names the bad key. Unknown and derived keys are ignored."""
        facts: dict[str, Any] = {**checked(IntervalRecord, record, extra="ignore")}
        columns, predicted = facts["tables"], facts.get("predicted")
        columns = {"features": [1] * len(columns["name"]), **columns}
        missing = [name for name in WAITS if name not in facts["wait_ms"]]
        if missing:
            raise FormatError(f"'wait_ms' has no {', '.join(missing)}.")
        facts["unmeasured"] = tuple(name for name in STAGES if facts["stage_ms"].get(name) is None)
        zeros = (0.0,) * len(facts["hosts"])
        facts["stage_ms"] = {name: tuple(facts["stage_ms"].get(name) or zeros) for name in STAGES}
        facts["wait_ms"] = {name: tuple(facts["wait_ms"][name]) for name in WAITS}
        facts["error_ms"] = {
            name: tuple(errors) for name, errors in facts.get("error_ms", {}).items() if name in STAGES
        }
        ranks = {"predicted": predicted or facts["hosts"], **facts["stage_ms"], **facts["wait_ms"]}
        ranks |= {f"error_ms.{name}": errors for name, errors in facts["error_ms"].items()}
        ranks |= {key: value for key, value in facts.items() if isinstance(value, list) and key != "predicted"}
        _same_length("ranks", "step_ms_by_rank", ranks)
        _same_length("tables", "name", columns)
        unknown = any(rank >= len(facts["hosts"]) for rank in columns["rank"])
        if unknown or len(set(columns["name"])) < len(columns["name"]):
            raise FormatError("'tables' names a table twice, or a rank that does not exist.")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()
        }
        rows = zip(*(columns[field.name] for field in fields(TableUse)), strict=True)
        values["tables"] = tuple(TableUse(*row) for row in rows)
        values["predicted"] = None if predicted is None else tuple(RankCost.from_json(cost) for cost in predicted)
        return IntervalProfile(**values)


def _errors_ms(ranks: Sequence[RankInterval], stage: str) -> tuple[float, ...]:
    """Returns standard errors by rank; () if any rank has too few samples."""
    errors = [rank.stages[stage].error_ms for rank in ranks if stage in rank.stages]
    known = tuple(error for error in errors if error is not None)
    return known if len(known) == len(ranks) else ()


def _same_length(of_what: str, key: str, lists: Any) -> None:
    """Raises FormatError unless all lists are as long as that of `key`, and not empty."""
    for name, values in lists.items():
        if len(values) != len(lists[key]) or (of_what == "ranks" and not values):
            raise FormatError(f"'{name}' has {len(values)} {of_what}, '{key}' has {len(lists[key])}.")
