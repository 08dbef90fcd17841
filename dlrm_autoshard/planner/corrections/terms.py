"""The terms that a measured stage's logarithm consists of, and how they vary before anything was measured.

rows = observed.evidence().in_eras(eras).rows            # `observed.py`
rows.covariance(rows, Spreads(), frozenset())            # [N, N], prior
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

# Axes: N observations (a rank's stage in a profile, or a start-up shard's), T tables and parts, R whole tables, B of
# `Parts`.


@dataclass(frozen=True)
class Spreads:
    """Prior standard deviations of log factors, except `stages_alike`. Those with a GRID (`conditioning.py`) take
    the likeliest value, starting from the prior's; the others hardly matter once anything was measured."""

    table: float = 0.1  # a table's own, in every plan: held-out single tables of the shipped costs
    width: float = 0.2  # of a part, beside its table's: halves took 0.56 of a table, predicted 0.65 to 0.75
    change: float = 0.15  # of a table whose lookups, or their reuse, have become e times as many
    fused: float = 0.03  # a table's own, where it is fused with many others
    load: float = 0.01  # of sets that load their rank alike, beside what sets of middling load take (`costs/loads.py`)
    together: float = 0.03  # of one set of tables, beside its tables': held-out sets of the shipped costs
    stages_alike: float = 0.7  # correlation of what tables and sets are off by forward and backward (README.md)
    noise: float = 0.01  # of an interval's figures, beside what the profile itself reports
    scale: float = 0.5  # all tables of a stage: another machine, a GPU instead of a CPU
    light: float = 0.7  # of what any stage takes (`lightness`): a light rank's took 1.4 to 1.6 of its probe's
    rank: float = 0.02  # ranks of one machine
    rank_moment: float = 0.03  # a rank in one interval of training, in all of its stages (README.md)
    slow_rank: float = 0.7  # a rank whose core is shared by one or two other processes
    dense: float = 0.15  # a rank's dense part, beside `FOLLOWS`
    core: float = 0.05  # what its core's share tells, likewise
    exchange: float = 0.3  # one rank's exchanges, beside the others': its link may be slow
    exchange_noise: float = 0.05  # of one rank's in one interval, beside what the profile reports
    exchanged: float = 0.1  # of one interval: where ranks wait longer for each other, exchanges took 10% longer

    def of_stages(self, same: np.ndarray) -> np.ndarray:
        """Returns the correlation of tables' and sets' errors, by whether the stage is the same."""
        alike: np.ndarray = np.where(same, 1.0, self.stages_alike)
        return alike


@dataclass(frozen=True)
class Common:
    """Products of two lists of observations, [N, M] for each term: a stage's source, its lightness, tables, their
    widths, their data's change, tables among many others, similar loads, similar sets; the rank, and the rank in
    that interval (where equal, `Rows.of_rank` of both); and whether both are its dense part, its core's share, the
    same stage. key_N: `rank_keys`."""

    source: np.ndarray
    light: np.ndarray
    table: np.ndarray
    width: np.ndarray
    change: np.ndarray
    fused: np.ndarray
    load: np.ndarray
    together: np.ndarray
    rank: np.ndarray
    rank_moment: np.ndarray
    dense: np.ndarray
    core: np.ndarray
    same_stage: np.ndarray
    key_N: np.ndarray

    def covariance(self, spreads: Spreads, slow: frozenset[int]) -> np.ndarray:
        """Returns [N, M]. slow: keys of ranks far from the others."""
        found = spreads.table**2 * self.table + spreads.fused**2 * self.fused + spreads.load**2 * self.load
        found += spreads.together**2 * self.together
        if self.width.any():
            found += spreads.width**2 * self.width
        if self.change.any():
            found += spreads.change**2 * self.change
        found *= spreads.of_stages(self.same_stage)
        found += spreads.scale**2 * self.source + spreads.light**2 * self.light
        found += self.rank * rank_variances(self.key_N, spreads, slow)[:, None]
        found += spreads.rank_moment**2 * self.rank_moment
        found += spreads.dense**2 * self.dense + spreads.core**2 * self.core
        return found


def rank_variances(key_N: np.ndarray, spreads: Spreads, slow: frozenset[int]) -> np.ndarray:
    """Returns prior variances [N] of ranks by their keys (`Rows.rank_keys`). slow: keys of ranks far from the
    others."""
    variances: np.ndarray = spreads.rank**2 + spreads.slow_rank**2 * np.isin(key_N, list(slow))
    return variances


def variances(directions: int, wholes: int, spreads: Spreads) -> np.ndarray:
    """Returns prior variances [B] along the directions of `Parts`, whole tables first."""
    return np.where(np.arange(directions) < wholes, spreads.table, spreads.width) ** 2


DENSE, CORE, FOLLOWS = 2, 3, 0.75
"""Signs of slow ranks beside their tables, as stages beside forward (0) and backward (1): the dense part, and how much
longer than it computes it waits for its core. And by how much of the logarithm by which a rank is slow either is: the
dense part of nine profiles of jobs with half a core taken 0.5 to 1.07, in the mean 0.79; waiting 0.68 to 0.8."""


@dataclass(frozen=True)
class Rows:
    """Features of stages' logarithms. source: where the scale comes from. rank, profile: -1 for none. Eras number
    stretches of time in which ranks stayed as they were (`in_eras`). Shares are along the directions of `Parts`,
    first of its num_wholes whole tables. light_N, change_NF, many_N, load_NF: `lightness`, `changes`, `many`,
    `LoadRange.features`."""

    stage_N: np.ndarray
    source_N: np.ndarray
    rank_N: np.ndarray
    era_N: np.ndarray
    profile_N: np.ndarray
    light_N: np.ndarray
    share_NB: np.ndarray
    change_NF: np.ndarray
    many_N: np.ndarray
    load_NF: np.ndarray
    num_wholes: int

    def and_also(self, other: Rows) -> Rows:
        """Returns both lists of rows, which have the same directions."""
        names = [field.name for field in fields(self) if field.name != "num_wholes"]
        both = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        return Rows(**both, num_wholes=self.num_wholes)

    def in_eras(self, eras: Sequence[int]) -> Rows:
        """Returns the rows with profiles assigned to eras. eras: one per profile."""
        return replace(self, era_N=np.array([*eras, 0])[self.profile_N])  # the last for those of none

    def variance_B(self, spreads: Spreads) -> np.ndarray:
        """Returns the prior variance along each direction."""
        return variances(self.share_NB.shape[1], self.num_wholes, spreads)

    def covariance(self, other: Rows, spreads: Spreads, slow: frozenset[int]) -> np.ndarray:
        """Returns the prior covariance [N, M]."""
        return self.common(other).covariance(spreads, slow)

    @cached_property
    def own(self) -> Common:
        return self.common(self)

    def common(self, other: Rows) -> Common:
        same_stage = self.stage_N[:, None] == other.stage_N
        both = min(self.share_NB.shape[1], other.share_NB.shape[1])  # of widths that one does not know it has nothing
        wholes, rest = slice(0, self.num_wholes), slice(self.num_wholes, both)
        tables_NM = self.share_NB[:, wholes] @ other.share_NB[:, wholes].T
        both_many = np.outer(self.many_N, other.many_N)
        same_source, same_rank = self.source_N[:, None] == other.source_N, self._same_rank(other)
        of_rank = same_rank * np.outer(self.of_rank, other.of_rank)
        # A probe's plans are measured interleaved, so that a moment is all plans' moment.
        in_interval_M = (other.profile_N >= 0) & ~other.probed
        same_interval = (self.profile_N[:, None] == other.profile_N) & in_interval_M
        return Common(
            source=sources_alike(same_source) * same_stage * (other.stage_N != CORE),
            light=np.outer(self.light_N, other.light_N) * same_source * same_stage,
            table=tables_NM,
            width=self.share_NB[:, rest] @ other.share_NB[:, rest].T,
            change=self.change_NF[:, : 2 * both] @ other.change_NF[:, : 2 * both].T,
            fused=tables_NM * both_many,
            load=(self.load_NF @ other.load_NF.T) * both_many,
            together=self.sets_alike(other),
            rank=of_rank,
            rank_moment=of_rank * same_interval,
            dense=same_rank & same_stage & (other.stage_N == DENSE),
            core=same_rank & same_stage & (other.stage_N == CORE),
            same_stage=same_stage,
            key_N=self.rank_keys,
        )

    def sets_alike(self, other: Rows) -> np.ndarray:
        """Returns [N, M]: similarity of sets of tables, the eighth power of their shares' cosine, as similar sets
        are fused alike."""
        share_NR, share_MR = (rows.share_NB[:, : self.num_wholes] for rows in (self, other))
        length_N, length_M = (np.linalg.norm(shares, axis=1) for shares in (share_NR, share_MR))
        cosine = share_NR @ share_MR.T / np.maximum(np.outer(length_N, length_M), 1e-12)
        alike: np.ndarray = cosine**8 * np.sqrt(np.outer(self.many_N, other.many_N))
        return alike

    def _same_rank(self, other: Rows) -> np.ndarray:
        key_M = other.rank_keys
        same: np.ndarray = (self.rank_keys[:, None] == key_M) & (key_M >= 0)
        return same

    @property
    def probed(self) -> np.ndarray:
        """Returns [N]: whether a probe measured it, not training."""
        probed: np.ndarray = self.source_N == 0
        return probed

    @cached_property
    def of_rank(self) -> np.ndarray:
        """Returns [N]: the part of the rank's logarithm that each has."""
        part: np.ndarray = np.where(self.stage_N >= DENSE, FOLLOWS, 1.0)
        return part

    @cached_property
    def rank_keys(self) -> np.ndarray:
        """Returns a number for each rank and era; -1 for no rank."""
        keys: np.ndarray = np.where(self.rank_N < 0, -1, self.era_N * 1_000_000 + self.rank_N)
        return keys


def changes(share_NB: np.ndarray, log_data_B2: np.ndarray) -> np.ndarray:
    """Returns [N, 2B]: shares times how far the table's log lookups and log reuse are from their first values ([B,
    2], or [N, B, 2]; `Observed.log_data_KR2`). A width's error changes with them, too."""
    return (share_NB[:, :, None] * log_data_B2).reshape(len(share_NB), -1)


LIGHT = 0.1
"""Part of the costliest set's stage, below which another's is light."""


def lightness(ms_N: np.ndarray, costliest_N: np.ndarray) -> np.ndarray:
    """Returns [N]: from 1, for stages that take nothing beside the costliest, towards 0 for those that take as long.
    It is the part that any stage takes: caches turned cold between lookups, a probe's launch."""
    part: np.ndarray = LIGHT * costliest_N / np.maximum(LIGHT * costliest_N + ms_N, 1e-12)
    return part


def sources_alike(same: np.ndarray) -> np.ndarray:
    """Returns the correlation of sources' errors; that of probes and training is high."""
    alike: np.ndarray = np.where(same, 1.0, 0.9)
    return alike
