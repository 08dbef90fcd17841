"""Computations of ranks, under plans, or of tables alone: what corrections are asked about.

stages = Stages(ms_M, stage_M, rank_M, share_MT, load_ML)
corrections.covariance(stages.and_also(others), tables)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Stages:
    """Expected ms of computations, which stage (0 forward, 1 backward) and rank (-1: any) each is, each table's
    share of it, and how the tables load the rank (`log_loads`)."""

    ms_M: np.ndarray
    stage_M: np.ndarray
    rank_M: np.ndarray
    share_MT: np.ndarray
    load_ML: np.ndarray

    def some(self, which: np.ndarray) -> Stages:
        return Stages(*(getattr(self, field.name)[which] for field in fields(self)))

    def and_also(self, *others: Stages) -> Stages:
        return Stages(*(np.concatenate([getattr(one, f.name) for one in (self, *others)]) for f in fields(self)))

    def distinct(self) -> tuple[Stages, np.ndarray]:
        """Returns each computation once, and the index of each of all in these: plans share many ranks' tables."""
        what = np.column_stack([self.stage_M, self.rank_M, self.share_MT > 0]).astype(np.int32)
        _, first, which_M = np.unique(what, axis=0, return_index=True, return_inverse=True)
        return self.some(first), which_M.ravel()
