"""Prices changes of rank in a running job: a part of every step that the new plan will serve for.

moving = Moving.of(task, current, ms_per_byte=1e-9)
moving.ms(units, ranks), moving.home_U           # home: the rank that has most of a unit now
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.task import PlacementTask


@dataclass(frozen=True)
class Moving:
    """The cost of moving. ms_UW: ms per step for the bytes of a unit that are not on a rank yet. home_U: the rank
    that has most of each unit, even if moving is free."""

    ms_UW: np.ndarray
    home_U: np.ndarray

    @staticmethod
    def of(task: PlacementTask, current: ShardingPlan, ms_per_byte: float) -> Moving:
        held_UW = np.zeros((len(task.units), task.world_size))
        np.add.at(held_UW, task.units.unit_of_T, held_bytes(task, current))
        return Moving(ms_per_byte * (held_UW.sum(axis=1, keepdims=True) - held_UW), held_UW.argmax(axis=1))

    def ms(self, units: np.ndarray, ranks: np.ndarray | int) -> np.ndarray:
        away_ms: np.ndarray = self.ms_UW[units, ranks]
        return away_ms

    def total_ms(self, rank_U: np.ndarray) -> float:
        return float(self.ms(np.arange(len(rank_U)), rank_U).sum())


def held_bytes(task: PlacementTask, current: ShardingPlan) -> np.ndarray:
    """Returns [T, W]: bytes of each shard that are on each rank under `current`, however it splits the table."""
    bytes_TW = np.zeros((len(task.tables), task.world_size))
    for row, table in zip(bytes_TW, task.tables, strict=True):
        shard = table.shard
        for part in current.parts_of(shard.table):
            if (common := part & shard) is not None:
                held = table.holding(common)
                row[current.rank_of[part]] += held.weight_bytes + held.optimizer_bytes(task.splits.optimizer)
    return bytes_TW
