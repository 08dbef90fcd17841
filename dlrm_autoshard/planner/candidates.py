"""Makes the plans that compete: by heuristics, by searches from them, and by a learned policy.

makers.candidates("auto", task, costs_of)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dlrm_autoshard.planner.dreamshard.settings import DreamShardSettings
from dlrm_autoshard.planner.result import Candidate
from dlrm_autoshard.planner.search.greedy import HEURISTICS, heuristic
from dlrm_autoshard.planner.search.local_search import improve, late, search
from dlrm_autoshard.planner.search.splits import CostsOf, fitting
from dlrm_autoshard.planner.task import PlacementTask

if TYPE_CHECKING:
    from dlrm_autoshard.planner.baselines.policies import Policies

LEARNED = ("dreamshard", "autoshard", "rnn")
ALGORITHMS = ("auto", *LEARNED, "search", *HEURISTICS)
KICKS = 20
MEDIUM = 30_000
"""Units x ranks above which only one search runs."""


class CandidateMakers:
    """Makes candidate plans; learned policies are made on first use."""

    def __init__(self, settings: DreamShardSettings, seed: int = 0, reference: bool = False) -> None:
        self.settings, self.seed, self._reference = settings, seed, reference
        self._policies: Policies | None = None

    def candidates(
        self,
        algorithm: str,
        task: PlacementTask,
        costs_of: CostsOf,
        deadline: float | None = None,
    ) -> list[Candidate]:
        """Returns the plans of all heuristics and of `algorithm`. All split tables that fit no rank whole."""
        task = fitting(task)
        costs = costs_of(task)
        size = len(task.units) * task.world_size
        placements = {name: heuristic(task, name, np.random.default_rng(self.seed)) for name in HEURISTICS}
        if algorithm in ("auto", "search"):
            placements["search"] = search(task, costs, kicks=KICKS, seed=self.seed, deadline=deadline)
        if algorithm in LEARNED:
            placements |= self.policies.place(algorithm, task, costs, deadline)
        if algorithm == "auto":
            ranked = sorted(placements.items(), key=lambda item: costs.step_ms(item[1]))
            for name, rank_U in ranked if size <= MEDIUM else []:
                if name != "search" and not late(deadline):
                    placements[f"{name}+search"] = improve(task, costs, rank_U, seed=self.seed, deadline=deadline)
        return [Candidate(name, task.plan_from(rank_U), costs.step_ms(rank_U)) for name, rank_U in placements.items()]

    @property
    def policies(self) -> Policies:
        """The learned algorithms, made and imported on first use, as no start needs them."""
        if self._policies is None:
            from dlrm_autoshard.planner.baselines.policies import Policies

            self._policies = Policies(self.settings, self.seed, reference=self._reference)
        return self._policies

    @property
    def by_reference(self) -> bool:
        """Whether `dreamshard` is the published version."""
        return self._reference if self._policies is None else self._policies.reference is not None

    def state_dict(self) -> dict[str, Any]:
        """Returns weights by policy; None for those never used."""
        if self._policies is None and not self._reference:
            return {"policy": None, "sequences": None, "reference": None}
        return self.policies.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["policy"] is not None and state["sequences"] is not None:
            self.policies.load_json(state)
