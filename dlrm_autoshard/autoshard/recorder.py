"""What each rank measured over an interval of training, gathered into records and the profile the planner learns from.

An interval is an epoch, or `reshard.every_steps` steps. Each rank appends its own line; rank 0 the gathered one.
"""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dlrm_autoshard.costs import RankCost, StepProfile
from dlrm_autoshard.distributed.movable import ArrivedIds, PlacedTables
from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.records.epoch import EpochProfile, epochs_file
from dlrm_autoshard.records.facts import RankEpoch, rank_file
from dlrm_autoshard.records.jsonl import append_jsonl
from dlrm_autoshard.tables import TableStats, measure_table_stats


class TableObserver:
    """Statistics of the tables this rank owns, from the ids that arrive here: pooling in every sampled step, reuse
    (which costs a sort) in the first of an interval."""

    def __init__(self) -> None:
        self._samples = 0
        self._ids: np.ndarray | None = None
        self._reuse: list[TableStats] = []

    def observe(self, ids: ArrivedIds, world_size: int, real_samples: int) -> None:
        num_bags = ids.batch_size * world_size
        offsets = ids.offsets.cpu().numpy()
        counts = np.diff(offsets[::num_bags])
        self._ids = counts if self._ids is None else self._ids + counts
        self._samples += real_samples
        if not self._reuse:
            lengths_TB = np.diff(offsets).reshape(-1, num_bags)
            self._reuse = measure_table_stats(lengths_TB, ids.values_N.cpu().numpy())

    def summary(self, names: Sequence[str]) -> dict[str, TableStats]:
        """name -> statistics, for the tables this rank looks up, in their order. Starts afresh."""
        if self._ids is None:
            return {}
        pooling = self._ids / self._samples
        result = {
            name: TableStats(float(mean), seen.reuse_histogram, seen.mean_reuse, seen.batch_size)
            for name, mean, seen in zip(names, pooling, self._reuse, strict=True)
        }
        self.__init__()  # type: ignore[misc]
        return result


class Recorder:
    """Opens and closes intervals; knows the run directory."""

    def __init__(self, run_dir: Path, runtime: Runtime, embeddings: PlacedTables, clock: StageClock) -> None:
        self._run_dir, self._runtime, self._embeddings, self._clock = run_dir, runtime, embeddings, clock
        self.observer = TableObserver()
        self.open(0)

    def open(self, step: int) -> None:
        self._clock.reset()
        self.first_step = step
        self._samples = 0
        self._paused = 0.0
        self._started = time.perf_counter()

    def count(self, samples: int) -> None:
        """samples: real ones of this rank."""
        self._samples += samples

    def exclude(self, seconds: float) -> None:
        """Time that is not training (a checkpoint, an evaluation) inside the interval."""
        self._paused += seconds

    def close(
        self,
        epoch: int,
        end_step: int,
        batch_size: int,
        known: Sequence[TableStats],
        predicted: Sequence[RankCost] | None,
    ) -> tuple[EpochProfile, StepProfile | None] | None:
        """Collective. Writes the interval's lines; on rank 0 returns the gathered records, and the profile where steps
        were sampled. known: statistics of tables that nobody observed in this interval. batch_size: global."""
        runtime, embeddings = self._runtime, self._embeddings
        seconds = time.perf_counter() - self._started - self._paused
        plan, tables = embeddings.plan, embeddings.tables
        own = [t for t in tables if plan.rank_of[t.name] == runtime.rank]
        mine = RankEpoch(
            epoch=epoch,
            first_step=self.first_step,
            end_step=end_step,
            rank=runtime.rank,
            host=platform.node(),
            device=str(embeddings.device),
            tables=tuple(t.name for t in own),
            table_bytes=sum(t.weight_bytes + t.optimizer_bytes(embeddings.config.optimizer.name) for t in own),
            stages=self._clock.summary(),
            step_ms=self._clock.step_ms,
            throughput=self._samples / seconds if seconds > 0 else 0.0,
            cpu_share=self._clock.cpu_share,
            peak_memory_bytes=peak_memory(embeddings.device),
        )
        append_jsonl(rank_file(self._run_dir, runtime.rank), mine.to_json())
        looked_up = [t.name for t in embeddings.output_tables if plan.rank_of[t.name] == runtime.rank]
        gathered = runtime.gather((mine, self.observer.summary(looked_up)))
        if gathered is None:
            return None
        seen = {name: stat for _, observed in gathered for name, stat in observed.items()}
        stats = tuple(seen.get(table.name, stat) for table, stat in zip(tables, known, strict=True))
        record = EpochProfile.gather([rank for rank, _ in gathered], plan, tables, stats, batch_size, predicted)
        append_jsonl(epochs_file(self._run_dir), record.to_json())
        if self._clock.samples == 0:
            return record, None
        costs = tuple(rank.cost for rank, _ in gathered)
        return record, StepProfile(plan, tables, stats, batch_size, costs, "measured", record.noise)


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
