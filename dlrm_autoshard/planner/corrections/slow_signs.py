"""Signs of how slow ranks are beside their tables: the dense part, the same work on all, and waiting for a core.

signs = Signs.of(profiles)
signs.rows(like=rows)                    # beside the rows of what ranks' tables took
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.planner.corrections.terms import CORE, DENSE, Rows

NOISE = 0.05
"""Standard deviation of one rank's in one interval, of logarithms, beside what the profile reports of dense parts. On
two cores, where nothing changed, one rank's dense part beside the other's was off by 0.03 to 0.08; the share of a core
that was half taken differed by 0.06 from interval to interval, where stages differed by 0.3."""
SHARED = 0.9
"""Part of the largest share of a core below which another shares its own. A rank may be slow with a core to
itself, so that says nothing, but of one that shared it once."""
MOST_ROWS, MOST_RANKS = 128, 64
"""Most rows of either sign, of the newest profiles; and of dense parts of one profile, those furthest from the
middle."""

_Sign = tuple[int, int, int, float, float]
"""Stage, profile, rank, logarithm, and its noise by the profile."""


@dataclass(frozen=True)
class Signs:
    """stage_D, profile_D, rank_D: where each sign was measured; log_D: its logarithm; noise_D: its relative noise,
    from its profile."""

    stage_D: np.ndarray
    profile_D: np.ndarray
    rank_D: np.ndarray
    log_D: np.ndarray
    noise_D: np.ndarray

    @staticmethod
    def of(profiles: Sequence[StepProfile]) -> Signs:
        dense, core = _dense_parts(profiles), _cores(profiles)
        middle = np.mean([log for *_, log, _ in dense]) if dense else 0.0
        found = [*((stage, n, rank, log - float(middle), noise) for stage, n, rank, log, noise in dense), *core]
        numbers = [np.array([row[i] for row in found], dtype=int) for i in range(3)]
        return Signs(*numbers, *(np.array([row[i] for row in found], dtype=np.float64) for i in (3, 4)))

    def rows(self, like: Rows) -> Rows:
        """Returns the signs as rows. like: rows with the same directions."""
        count = len(self.stage_D)
        return Rows(
            stage_N=self.stage_D,
            source_N=-1 - self.profile_D,
            rank_N=self.rank_D,
            era_N=np.zeros(count, dtype=int),
            profile_N=self.profile_D,
            light_N=np.zeros(count),
            share_NB=np.zeros((count, like.share_NB.shape[1])),
            change_NF=np.zeros((count, like.change_NF.shape[1])),
            many_N=np.zeros(count),
            load_NF=np.zeros((count, like.load_NF.shape[1])),
            num_wholes=like.num_wholes,
        )


def _dense_parts(profiles: Sequence[StepProfile]) -> list[_Sign]:
    """Returns signs from dense parts, whose work nobody predicts: each profile has a scale of its own, much like the
    others' (`sources_alike`), relative to which ranks are compared."""
    found: list[_Sign] = []
    for number in reversed(range(len(profiles))):
        dense_ms, noise = profiles[number].dense_ms, profiles[number].noise
        if dense_ms is None or len(dense_ms) == 1 or min(dense_ms) <= 0:
            continue
        log_W = np.log(dense_ms)
        ranks = np.argsort(-np.abs(log_W - np.median(log_W)), kind="stable")[:MOST_RANKS]
        if found and len(found) + len(ranks) > MOST_ROWS:
            break
        found += [(DENSE, number, int(rank), float(log_W[rank]), noise) for rank in ranks]
    return found


def _cores(profiles: Sequence[StepProfile]) -> list[_Sign]:
    """Returns signs from the core shares of ranks that shared a core in some profile, relative to the rank with the
    largest share: if all share alike, as with more ranks than cores, none is slow."""
    shares_of = {number: profile.core_shares for number, profile in enumerate(profiles) if profile.core_shares}
    known = [(number, [share / max(shares) for share in shares]) for number, shares in shares_of.items()]
    sharing = {rank for _, shares in known for rank, share in enumerate(shares) if share < SHARED}
    found: list[_Sign] = []
    for number, shares in reversed(known):
        of_ranks = [rank for rank in sorted(sharing) if rank < len(shares)][: MOST_ROWS - len(found)]
        found += [(CORE, number, rank, -float(np.log(max(shares[rank], 1e-3))), 0.0) for rank in of_ranks]
    return found
