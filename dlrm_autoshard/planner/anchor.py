"""What predictions of the live plan are off by, carried over to other plans.

    anchor = Anchor()
    anchor.learn(profiles, predict)             # newest last; predict(profile): [W, 4] ms with this anchor applied
    anchor.tables["ad_id"]                      # (0.06, -0.02): it takes e^0.06 of what is predicted forward
    anchor.exchange[1]                          # (0.10, 0.10): and rank 1's exchanges e^0.1

Arithmetic alone, so it follows every interval, also where refining the networks does not pay. What a rank's computation
is off by goes with its tables wherever they move; what its exchanges are off by stays with the rank. So predictions of
the plan that runs meet what was measured of late, those of its neighbours nearly so, and those of plans that share
nothing with it are left in the middle.

"Of late": profiles of the plan that ran last, older ones counting less, and hardly where ranks or data were other ones
(a straggler has come or gone): one interval says what has changed, several in a row average the machine's noise away.

Axes: P profiles, W ranks, 4 stages in the order of PLANNED_STAGES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_autoshard.costs import COMPUTE, EXCHANGE, PLANNED_STAGES, StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.replay import DECAY

RECENT = 6
"""Profiles looked back on."""
ALIKE = 0.15
"""Part of its time by which a profile may differ from the newest one and still speak for the same state of things."""
MOST = 1.2
"""Largest correction: e^1.2. What is further off is an accident of measurement."""

Pair = tuple[float, float]


class Anchor:
    """tables: log corrections of each table's forward and backward. exchange: of each rank's two exchanges."""

    def __init__(self) -> None:
        self.tables: dict[str, Pair] = {}
        self.exchange: dict[int, Pair] = {}

    def learn(self, profiles: Sequence[StepProfile], predict: Callable[[StepProfile], np.ndarray]) -> None:
        self.tables, self.exchange = {}, {}
        recent = _of_the_live_plan(profiles)[-RECENT:]
        if not recent:
            return
        newest = recent[-1]
        measured_PW4 = np.array([[[rank.stage(s) for s in PLANNED_STAGES] for rank in p.ranks] for p in recent])
        off_PW4 = _log_ratio(measured_PW4, np.stack([predict(profile) for profile in recent]))
        weight_P = DECAY ** np.arange(len(recent) - 1, -1, -1.0) * _likeness(off_PW4, measured_PW4[-1])
        wanted_W4 = np.average(off_PW4, axis=0, weights=weight_P).clip(-MOST, MOST)
        self._add(newest.plan, wanted_W4)
        # How tables add up bends a little with their costs, so the rest is put right once more.
        reached_W4 = _log_ratio(predict(newest), measured_PW4[-1]) + off_PW4[-1]
        self._add(newest.plan, (wanted_W4 - reached_W4).clip(-0.2, 0.2) * (measured_PW4[-1] > 0))

    def factors_T2(self, names: Sequence[str]) -> np.ndarray:
        """[T, 2] of tables, forward and backward."""
        return np.exp(np.array([self.tables.get(name, (0.0, 0.0)) for name in names]))

    def exchange_W2(self, world_size: int) -> np.ndarray:
        """[W, 2] of each rank's exchanges, forward and backward."""
        return np.exp(np.array([self.exchange.get(rank, (0.0, 0.0)) for rank in range(world_size)]))

    def to_json(self) -> dict[str, Any]:
        return {"tables": self.tables, "exchange": {str(rank): pair for rank, pair in self.exchange.items()}}

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.tables = {name: (float(f), float(b)) for name, (f, b) in record["tables"].items()}
        self.exchange = {int(rank): (float(f), float(b)) for rank, (f, b) in record["exchange"].items()}

    def _add(self, plan: ShardingPlan, log_W4: np.ndarray) -> None:
        for table, rank in plan.rank_of.items():
            self.tables[table] = _sum(self.tables.get(table), log_W4[rank, COMPUTE])
        for rank, logs in enumerate(log_W4):
            self.exchange[rank] = _sum(self.exchange.get(rank), logs[EXCHANGE])


def _of_the_live_plan(profiles: Sequence[StepProfile]) -> list[StepProfile]:
    return [p for p in profiles if p.plan == profiles[-1].plan and p.source == profiles[-1].source]


def _likeness(off_PW4: np.ndarray, newest_W4: np.ndarray) -> np.ndarray:
    """[P] 1 where a profile was off as the newest one is; 0 where things were other than now."""
    share_W4 = newest_W4 / newest_W4.sum() if newest_W4.any() else newest_W4
    apart_P = (np.abs(off_PW4 - off_PW4[-1]) * share_W4).sum(axis=(1, 2))
    likeness: np.ndarray = np.exp(-((apart_P / ALIKE) ** 2) / 2)
    return likeness


def _log_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """log(above / below); 0 where either is: a rank that owns nothing is off by nothing."""
    there = (above > 0) & (below > 0)
    logs: np.ndarray = np.log(np.where(there, above, 1.0) / np.where(there, below, 1.0))
    return logs


def _sum(before: Pair | None, more: np.ndarray) -> Pair:
    forward, backward = before or (0.0, 0.0)
    return forward + float(more[0]), backward + float(more[1])
