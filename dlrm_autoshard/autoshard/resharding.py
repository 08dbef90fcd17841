"""Resharding on all ranks: rank 0 decides, everybody hears of it, tables move, rank 0 writes down what came of it.

    decision = resharding.after_interval(interval)      # on every rank between two steps; interval: rank 0's

Where decision.new_plan is set, tables have moved, and ids on their way have other owners now. What to decide and why is
controller.py's; how tables travel is `move_to`'s: distributed/moves/reshard.py's, or TorchRec's (torchrec/move.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.config import ReshardConfig
from dlrm_autoshard.distributed.moves.movable import PlacedTables
from dlrm_autoshard.distributed.moves.reshard import ReshardRefused, ReshardStats
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.plans import write_plan


class MoveTo(Protocol):
    """Makes the plan the live one, on all ranks. ReshardRefused on all of them where the old one still is."""

    def __call__(self, plan: ShardingPlan, /, *, checksums: bool = False) -> ReshardStats: ...


class Resharding:
    """Carries decisions out on all ranks."""

    def __init__(
        self,
        settings: ReshardConfig,
        runtime: Runtime,
        embeddings: PlacedTables,
        move_to: MoveTo,
        controller: Controller | None,
        run_dir: Path,
    ) -> None:
        """controller: rank 0's, where there is a planner."""
        self._settings, self._runtime, self._run_dir = settings, runtime, run_dir
        self._embeddings, self._move_to, self.controller = embeddings, move_to, controller

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

        decision = self._runtime.from_rank_0(decide)
        if decision is None or decision.new_plan is None:
            return decision
        try:
            stats = self._move_to(decision.new_plan, checksums=self._settings.checksums)
        except ReshardRefused as refusal:
            why = str(refusal)
            return self._runtime.from_rank_0(lambda: controller.refused(why) if controller else decision)
        if self._runtime.rank == 0:
            write_plan(self._run_dir, decision.step, self._embeddings.plan)
        return self._runtime.from_rank_0(
            lambda: controller.moved(stats.moves, stats.seconds) if controller else decision
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Rank 0's; None elsewhere."""
        if self.controller is None:
            return None
        return {"world_size": self._runtime.world_size, **self.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.controller is not None:
            self.controller.load_state_dict(state, same_ranks=state.get("world_size") == self._runtime.world_size)
