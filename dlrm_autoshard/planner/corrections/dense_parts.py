"""What the dense part took on each rank: the same work on all, so it tells how slow ranks are, whatever they own.

rows, values_D, noise_D = dense_rows(profiles, eras, like=rows)      # beside the rows of what ranks' tables took
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.planner.corrections.terms import DENSE, Rows

NOISE = 0.05
"""Standard deviation of one rank's in one interval, of logarithms, beside what the profile reports: on two cores, of
jobs in which nothing changed, one rank's beside the other's was off by 0.03 to 0.08."""
MOST_ROWS, MOST_RANKS = 128, 64
"""Of the newest profiles, and of each profile; of more ranks those that are furthest from the middle."""


def dense_rows(profiles: Sequence[StepProfile], eras: Sequence[int], like: Rows) -> tuple[Rows, np.ndarray, np.ndarray]:
    """(rows, logarithms of ms, relative noise of the profile). like: rows with the same directions.

    What the work is nobody predicts: each profile's is of a scale of its own, much like the others' (`sources_alike`),
    beside which ranks are compared.
    """
    found: list[tuple[int, int, float]] = []
    for number in reversed(range(len(profiles))):
        dense_ms = profiles[number].dense_ms
        if dense_ms is None or len(dense_ms) == 1 or min(dense_ms) <= 0:
            continue
        log_W = np.log(dense_ms)
        ranks = np.argsort(-np.abs(log_W - np.median(log_W)), kind="stable")[:MOST_RANKS]
        if found and len(found) + len(ranks) > MOST_ROWS:
            break
        found += [(number, int(rank), float(log_W[rank])) for rank in ranks]
    count = len(found)
    number_D, rank_D = (np.array([row[i] for row in found], dtype=int) for i in (0, 1))
    log_D = np.array([row[2] for row in found])
    rows = Rows(
        stage_N=np.full(count, DENSE),
        source_N=-1 - number_D,
        rank_N=rank_D,
        era_N=np.array([eras[number] for number in number_D], dtype=int),
        profile_N=number_D,
        light_N=np.zeros(count),
        share_NB=np.zeros((count, like.share_NB.shape[1])),
        change_NF=np.zeros((count, like.change_NF.shape[1])),
        many_N=np.zeros(count),
        load_NF=np.zeros((count, like.load_NF.shape[1])),
        num_wholes=like.num_wholes,
    )
    noise_D = np.array([profiles[number].noise for number in number_D])
    return rows, log_D - (log_D.mean() if count else 0.0), noise_D
