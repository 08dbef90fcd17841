"""Resharding on all ranks: rank 0 decides, everybody hears of it, tables move, rank 0 writes down what came of it.

    decision = resharding.after_interval(interval)      # on every rank between two steps; interval: rank 0's

Where decision.new_plan is set, tables have moved, and ids on their way have other owners now. What to decide and why is
controller.py's; how tables travel is distributed/reshard.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.autoshard.initial_plan import Placement, from_rank_0
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.reshard import ReshardRefused, reshard, tensor_bytes
from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.records.decisions import DecisionLog


class Resharding:
    """controller: rank 0's, where there is a planner."""

    def __init__(
        self,
        settings: AutoshardConfig,
        runtime: Runtime,
        embeddings: ShardedEmbeddings,
        placement: Placement,
        run_dir: Path,
    ) -> None:
        self._settings, self._runtime, self._embeddings = settings.reshard, runtime, embeddings
        self._run_dir = run_dir
        self.controller: Controller | None = None
        if placement.planner is not None:
            bytes_of = {table: sum(tensors.values()) for table, tensors in tensor_bytes(embeddings).items()}
            log = DecisionLog(run_dir / "decisions.jsonl")
            self.controller = Controller(settings, placement.planner, placement.task, bytes_of, log)

    @staticmethod
    def is_wanted(settings: AutoshardConfig, world_size: int) -> bool:
        return settings.enabled and settings.reshard.enabled and world_size > 1

    def is_due(self, epoch: int) -> bool:
        """After this interval of `epoch`: each one where they are counted in steps, else its last."""
        return self._settings.every_steps is not None or (epoch + 1) % self._settings.every_epochs == 0

    def after_interval(self, interval: Interval | None) -> Decision | None:
        """Collective. None where nothing was measured, so that there is nothing to decide on."""
        controller = self.controller

        def decide() -> Decision | None:
            if controller is None or interval is None:
                return None
            return controller.decide(interval, self._embeddings.plan)

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

    def state_dict(self) -> dict[str, Any] | None:
        """Rank 0's; None elsewhere."""
        if self.controller is None:
            return None
        return {"world_size": self._runtime.world_size, **self.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.controller is not None:
            self.controller.load_state_dict(state, same_ranks=state["world_size"] == self._runtime.world_size)
