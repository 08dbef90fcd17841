"""Autoshard behind anybody's training loop: plan, profile, refine, decide, move and report, at each call of `step()`.

autoshard = Autoshard(bags, every_steps=500, run_dir="runs/mine")    # on every rank, before the first step
autoshard.step()                                                     # on every rank, after each optimizer step
autoshard.finish()                                                   # writes runs/mine/report.html
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.autoshard.initial_plan import Placement, choose_plan, find_topology, from_rank_0
from dlrm_autoshard.autoshard.recorder import Recorder
from dlrm_autoshard.autoshard.resharding import Resharding
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.distributed.movable import ArrivedIds, MovableBags
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.epoch import epochs_file
from dlrm_autoshard.records.jsonl import append_jsonl
from dlrm_autoshard.tables import TableStats, memory_bytes


class Autoshard:
    """Statistics come from the first step's ids, on which the first plan rests; tables move to it after that step."""

    def __init__(
        self,
        bags: MovableBags,
        *,
        run_dir: str | Path,
        every_steps: int = 500,
        sample_every: int = 20,
        total_steps: int | None = None,
        **settings: Any,
    ) -> None:
        """every_steps: between decisions. sample_every: steps between those whose stages are timed, with barriers.

        total_steps: of the whole training, which a move must pay for itself in; where it is not said, as many steps are
        expected to come as have been done. settings: the other keys of the YAML's `autoshard:` section.
        """
        reshard_keys = {"every_steps": every_steps, **settings.pop("reshard", {})}
        self.settings = AutoshardConfig(**{"enabled": True, "reshard": reshard_keys, **settings})
        self.run_dir, self.steps = Path(run_dir), 0
        self._bags, self._every, self._sample_every, self._total = bags, every_steps, sample_every, total_steps
        self._runtime = bags.runtime
        self._recorder = Recorder(self.run_dir, self._runtime, bags.sharded, bags.clock)
        self._placement: Placement | None = None
        self._resharding: Resharding | None = None
        self._stats: tuple[TableStats, ...] = ()
        self._samples = 0  # of one rank's batch
        self._step = ExitStack()  # the step that is being timed
        self._hearing = True
        bags.on_lookup(self._hear)
        from_rank_0(self._runtime, self._claim)

    def step(self) -> Decision | None:
        """After an optimizer step, on every rank. What was decided, where it was time to; tables may have moved."""
        self._step.close()
        if self._samples == 0:
            raise UserError("Autoshard.step() was called before the embeddings were looked up in training.")
        self.steps += 1
        self._recorder.count(self._samples)
        decision = None
        if self._placement is None or self.steps % self._every == 0:
            # The training loop's own random numbers (Dropout's, say) are as they would be without us.
            with torch.random.fork_rng([] if self._bags.device.type == "cpu" else [self._bags.device]):
                if self._placement is None:
                    self._place()
                else:
                    decision = self._close_interval()
        due = (self.steps - 1) % self._sample_every == self._sample_every // 2
        self._hearing = due or self._placement is None
        self._step.enter_context(self._bags.clock.step(sampled=due))
        return decision

    def finish(self) -> Path | None:
        """Writes the report of the intervals so far; its path, on rank 0."""
        self._step.close()
        if self._runtime.rank or not epochs_file(self.run_dir).exists():
            return None
        from dlrm_autoshard.records.run import RunRecord
        from dlrm_autoshard.report.html import write_html  # the plotting library, which training has no use for

        return write_html(self.run_dir, RunRecord.load(self.run_dir))

    # -- how -----------------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        if epochs_file(self.run_dir).exists():
            raise UserError(f"'{self.run_dir}' has the records of another run: name another run_dir, or move it away.")
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def _hear(self, ids: ArrivedIds, batch_size: int) -> None:
        self._samples = batch_size
        if self._hearing:
            world_size = self._runtime.world_size
            self._recorder.observer.observe(ids, world_size, batch_size * world_size)

    def _place(self) -> None:
        """The first plan: on the first step's statistics, by measurements on these ranks."""
        bags, runtime, sharded = self._bags, self._runtime, self._bags.sharded
        owned = [table.name for table in sharded.output_tables if bags.plan.rank_of[table.name] == runtime.rank]
        by_rank = runtime.all_gather(self._recorder.observer.summary(owned))
        seen = {name: stat for own in by_rank for name, stat in own.items()}
        self._stats = tuple(seen[table.name] for table in bags.tables)
        optimizer, batch_size = sharded.config.optimizer.name, self._samples * runtime.world_size
        task = PlacementTask.build(
            sharded.tables,
            self._stats,
            find_topology(self.settings, runtime),
            batch_size=batch_size,
            table_bytes=memory_bytes(sharded.tables, self._stats, optimizer, batch_size),
        )
        self._placement = choose_plan(self.settings, task, runtime, optimizer, bags.exchange_dtype)
        bags.move_to(self._placement.plan)
        self._resharding = Resharding(self.settings, runtime, sharded, bags.move_to, self._placement, self.run_dir)
        if runtime.rank == 0:
            bags.plan.save(self.run_dir / "plan" / f"step_{self.steps:08d}.json")
            if self._placement.result is not None:
                evidence = {"step": self.steps, **self._placement.result.to_json()}
                append_jsonl(self.run_dir / "plan" / "evidence.jsonl", evidence)
        self._recorder.open(self.steps)

    def _close_interval(self) -> Decision | None:
        placement, resharding = self._placement, self._resharding
        assert placement is not None and resharding is not None
        predicted = None
        if placement.planner is not None:
            predicted = placement.planner.predict(replace(placement.task, stats=self._stats), self._bags.plan)
        number = self.steps // self._every - 1
        closed = self._recorder.close(number, self.steps, placement.task.batch_size, self._stats, predicted)
        interval = None
        if closed is not None:
            record, profile = closed
            if profile is not None:
                self._stats = profile.stats
                left = self.steps if self._total is None else max(0, self._total - self.steps)
                interval = Interval(number, self.steps, profile, record.throughput, left, record.samples)
        decision = resharding.after_interval(interval)
        self._recorder.open(self.steps)
        return decision
