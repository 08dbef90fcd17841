"""Resharding on all ranks: rank 0 decides, everybody hears of it, tables move, rank 0 writes down what came of it.

    resharding = Resharding(config, runtime, embeddings, placement, run_dir)
    decision = resharding.after_interval(interval)      # on every rank between two steps; interval: rank 0's
    if decision.new_plan is not None: ...               # tables have moved; ids on their way have other owners now

What to decide and why is controller.py's; how tables travel is distributed/reshard.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_autoshard.autoshard.controller import LoopController
from dlrm_autoshard.autoshard.decision import Decision, Interval, Problem
from dlrm_autoshard.autoshard.initial_plan import Placement, from_rank_0
from dlrm_autoshard.config import Config
from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.reshard import ReshardRefused, reshard, tensor_bytes
from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.records.jsonl import append_jsonl


class Resharding:
    def __init__(
        self, config: Config, runtime: Runtime, embeddings: ShardedEmbeddings, placement: Placement, run_dir: Path
    ) -> None:
        self._settings, self._runtime, self._embeddings = config.autoshard.reshard, runtime, embeddings
        self._run_dir = run_dir
        self._controller: LoopController | None = None  # rank 0's
        if runtime.rank == 0 and placement.planner is not None:
            sizes = {table: sum(tensors.values()) for table, tensors in tensor_bytes(embeddings).items()}
            problem = Problem(placement.topology, placement.constraints, placement.table_bytes, sizes)
            self._controller = LoopController(config.autoshard, placement.planner, problem, self._write)

    @staticmethod
    def is_wanted(config: Config, world_size: int) -> bool:
        return config.autoshard.enabled and config.autoshard.reshard.enabled and world_size > 1

    def after_interval(self, interval: Interval | None) -> Decision | None:
        """Collective. None where nothing was measured, so that there is nothing to decide on."""
        controller = self._controller

        def decide() -> Decision | None:
            if controller is None or interval is None:
                return None
            return controller.after_interval(interval, self._embeddings.plan)

        decision = from_rank_0(self._runtime, decide)
        if decision is None or decision.new_plan is None:
            return decision
        try:
            stats = reshard(
                self._embeddings,
                decision.new_plan,
                group=self._runtime.control,
                checksums=self._settings.checksums,
            )
        except ReshardRefused as refusal:
            why = str(refusal)
            return from_rank_0(self._runtime, lambda: controller.refused(why) if controller else decision)
        if self._runtime.rank == 0:
            self._embeddings.plan.save(self._run_dir / "plan" / f"step_{decision.step:08d}.json")
        return from_rank_0(
            self._runtime, lambda: controller.moved(stats.bytes, stats.seconds) if controller else decision
        )

    def finish(self) -> None:
        if self._controller is not None:
            self._controller.finish()

    def state_dict(self) -> dict[str, Any] | None:
        """Rank 0's; None elsewhere."""
        if self._controller is None:
            return None
        return {"world_size": self._runtime.world_size, **self._controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was learned on another number of ranks says nothing about these."""
        if self._controller is not None and state["world_size"] == self._runtime.world_size:
            self._controller.load_state_dict(state)

    def _write(self, record: Mapping[str, Any]) -> None:
        append_jsonl(self._run_dir / "decisions.jsonl", record)
