"""Measurements beside what was predicted without corrections: what `Corrections` is conditioned on.

observed = Observed.of(profiles, shards, cost_model, exchange_model)
observed.evidence().in_eras(eras)                        # of computation, as logarithms
observed.exchange.factors(eras, spreads)                 # of each rank's exchanges, as logarithms
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dlrm_autoshard.costs import IQR_OF_NORMAL, StepProfile
from dlrm_autoshard.planner.corrections.conditioning import Evidence
from dlrm_autoshard.planner.corrections.exchange_errors import ExchangeErrors
from dlrm_autoshard.planner.corrections.parts import Parts
from dlrm_autoshard.planner.corrections.slow_signs import NOISE, Signs
from dlrm_autoshard.planner.corrections.terms import Rows, changes, lightness
from dlrm_autoshard.planner.costs.cost_model import COST, NUM_SUMMARY, CostModel
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.costs.loads import LoadRange, log_loads, many
from dlrm_autoshard.planner.costs.replay import ShardSample
from dlrm_autoshard.tables import TableConfig, TableStats

MOST_ROWS = 600
"""Stages of profiles and of start-up shards, so that the system stays small. Shards have half of them at least: on many
ranks profiles alone would take them all, and of a table that was only ever seen on one rank nobody could say whether it
or its rank is slow."""
LEAST = 1e-3
"""Lookups a sample, below which it no longer matters how few they are."""
FAR = 2.0
"""Logarithm beyond which it hardly matters how much further data change: what 64 tables alone, at 1 to 100 lookups
a sample, were off by differed by 0.15, 0.22, 0.22, 0.28 (backward) where their logarithms differed by 1.2, 2, 3, 4."""
_SOURCES = ("probe", "measured", "simulated")
_Kind = tuple[tuple[TableConfig, ...], tuple[TableStats, ...]]


@dataclass(frozen=True)
class Observed:
    """Measurements beside uncorrected predictions, for N sets of tables: a rank's in a profile, or a start-up shard.
    inside_NT: which tables are in each; E: all of these, set by set. Tables include measured parts; R: whole tables."""

    profiles: Sequence[StepProfile]
    tables: tuple[TableConfig, ...]
    parts: Parts
    log_data_KR2: np.ndarray  # of each list of tables: how far their log lookups and reuse are from the first (`FAR`)
    kind_N: np.ndarray  # which list a set's tables are of
    inside_NT: np.ndarray
    summary_EK: np.ndarray
    measured_N2: np.ndarray
    noise_N: np.ndarray
    profile_N: np.ndarray  # -1 of a start-up shard
    rank_N: np.ndarray
    model: CostModel
    exchange: ExchangeErrors

    @property
    def now_R2(self) -> np.ndarray:
        """Returns `log_data_KR2` of the newest profile's tables."""
        now: np.ndarray = self.log_data_KR2[0]
        return now

    @property
    def newest_source(self) -> int:
        return _SOURCES.index(self.profiles[-1].source) if self.profiles else 0

    @cached_property
    def _sums_NK(self) -> np.ndarray:
        return self._added_up(self.summary_EK)

    def _added_up(self, values_EK: np.ndarray) -> np.ndarray:
        """Returns [N, K]: sums over each set's tables."""
        count_N = self.inside_NT.sum(axis=1)
        filled_N = np.flatnonzero(count_N)
        sums = np.zeros((len(count_N), values_EK.shape[1]))
        if len(filled_N):
            sums[filled_N] = np.add.reduceat(values_EK, (count_N.cumsum() - count_N)[filled_N])
        return sums

    @cached_property
    def costliest_2(self) -> np.ndarray:
        """Returns predicted forward and backward of the costliest measured set."""
        costliest: np.ndarray = self.model.device_ms(self._sums_NK.astype(np.float32)).max(axis=0)
        return costliest

    @cached_property
    def _log_loads_NL(self) -> np.ndarray:
        return log_loads(self._sums_NK)

    @cached_property
    def load_range(self) -> LoadRange:
        return LoadRange.of(self._log_loads_NL)

    @staticmethod
    def of(
        profiles: Sequence[StepProfile], shards: Sequence[ShardSample], model: CostModel, exchange: ExchangeModel
    ) -> Observed:
        tables = profiles[-1].tables if profiles else tuple(dict.fromkeys(t for s in shards for t in s.tables))
        wholes = Parts(tables)
        split = [table for p in profiles if p.plan.split_tables for table in p.shards[0]]
        split += [table for s in shards for table in s.tables if table.shard.columns]
        split = [table for table, inside_R in zip(split, wholes.wholes(split), strict=True) if inside_R.any()]
        tables = tuple(dict.fromkeys([*tables, *split]))
        column = {table: i for i, table in enumerate(tables)}
        batch_size = profiles[-1].batch_size if profiles else shards[-1].batch_size
        kinds: dict[_Kind, int] = {}  # by value: a planner that was loaded has other objects
        rows: list[tuple[int, np.ndarray, tuple[float, float], float, int, int]] = []

        def kind_of(own: Sequence[TableConfig], stats: Sequence[TableStats]) -> int:
            return kinds.setdefault((tuple(own), tuple(stats)), len(kinds))

        usable = [s for s in shards if s.batch_size == batch_size and all(table in column for table in s.tables)]
        usable = [s for s in usable if min(s.fwd_compute_ms, s.bwd_compute_ms) > 0]
        least_shards = min(len(usable), MOST_ROWS // 4)
        left = MOST_ROWS // 2 - least_shards  # forward and backward of so many ranks
        for number, costliest in _remembered(profiles, column, batch_size, left):
            profile = profiles[number]
            number_of_kind = kind_of(*profile.shards)
            rank_T = np.array([profile.plan.rank_of.get(table.name, -1) for table in tables])
            for rank in costliest:
                pair = (profile.ranks[rank].fwd_compute_ms, profile.ranks[rank].bwd_compute_ms)
                rows.append((number_of_kind, rank_T == rank, pair, profile.noise, number, rank))
            left -= len(costliest)
        by_cost = sorted(range(len(usable)), key=lambda i: usable[i].fwd_compute_ms + usable[i].bwd_compute_ms)
        kept = by_cost[max(0, len(usable) - least_shards - left) :]
        for shard in (usable[i] for i in sorted(kept, reverse=True)):
            inside = np.zeros(len(tables), dtype=bool)
            inside[[column[table] for table in shard.tables]] = True
            pair = (shard.fwd_compute_ms, shard.bwd_compute_ms)
            rows.append((kind_of(shard.tables, shard.stats), inside, pair, shard.noise, -1, -1))
        summaries, at_KT, log_data = _of_kinds(list(kinds), column, wholes, model, batch_size)
        kinds_N, insides, pairs, noises, numbers, ranks = zip(*rows, strict=True) if rows else ((),) * 6
        kind_N, inside_NT = np.array(kinds_N, dtype=int), np.array(insides, dtype=bool).reshape(-1, len(tables))
        return Observed(
            profiles=profiles,
            tables=tables,
            parts=Parts(tables),
            log_data_KR2=_since_the_first(log_data, wholes.num_wholes),
            kind_N=kind_N,
            inside_NT=inside_NT,
            summary_EK=summaries[at_KT[kind_N][inside_NT]],
            measured_N2=np.array(pairs, dtype=np.float64).reshape(-1, 2),
            noise_N=np.array(noises, dtype=np.float64),
            profile_N=np.array(numbers, dtype=int),
            rank_N=np.array(ranks, dtype=int),
            model=model,
            exchange=ExchangeErrors.of(profiles, exchange),
        )

    def evidence(self, table_T2: np.ndarray | None = None) -> Evidence:
        """Returns rows of forward, backward, then signs, all in one era. table_T2: log factors of the tables,
        relative to which shares are taken."""
        log_T2 = np.zeros((len(self.tables), 2)) if table_T2 is None else table_T2
        set_E, table_E = np.nonzero(self.inside_NT)
        corrected_EK = self.summary_EK.copy()
        corrected_EK[:, COST] *= np.exp(log_T2)[table_E]
        sums = self._added_up(corrected_EK)
        share_N2T = np.zeros((len(sums), 2, len(self.tables)))
        share_N2T[set_E, :, table_E] = corrected_EK[:, COST] / (sums[:, COST] + self.model.launch_S)[set_E]
        predicted_N2 = self.model.device_ms(sums.astype(np.float32)).astype(np.float64)
        off_N2 = np.log(self.measured_N2 / predicted_N2) + np.einsum("nst,ts->ns", share_N2T, log_T2)
        count = len(self.kind_N)
        share_NT = np.concatenate([share_N2T[:, 0], share_N2T[:, 1]])
        source_N = np.array([_SOURCES.index(self.profiles[n].source) if n >= 0 else 0 for n in self.profile_N])
        share_NB = share_NT @ self.basis_TB
        light_N = lightness(predicted_N2.T.ravel(), np.repeat(self.costliest_2, count))
        rows = Rows(
            stage_N=np.repeat([0, 1], count),
            source_N=np.tile(source_N, 2),
            rank_N=np.tile(self.rank_N, 2),
            era_N=np.zeros(2 * count, dtype=int),
            profile_N=np.tile(self.profile_N, 2),
            light_N=light_N,
            share_NB=share_NB,
            change_NF=changes(share_NB, self.log_data_KR2[np.tile(self.kind_N, 2)][:, self.parts.whole_of_B]),
            many_N=np.tile(many(self._log_loads_NL), 2),
            load_NF=np.tile(self.load_range.features(self._log_loads_NL), (2, 1)),
            num_wholes=self.parts.num_wholes,
        )
        rows = rows.and_also(self._signs.rows(like=rows))
        return Evidence(rows, np.concatenate([off_N2.T.ravel(), self._signs.log_D]), self._noise_NN)

    @cached_property
    def basis_TB(self) -> np.ndarray:
        """Returns `Parts.basis` of the tables."""
        return self.parts.basis(self.tables)

    @cached_property
    def _signs(self) -> Signs:
        return Signs.of(self.profiles)

    @cached_property
    def _noise_NN(self) -> np.ndarray:
        """Returns the noise's covariance. Half of a profile's noise belongs to its moment and is the same for all of
        its ranks and stages."""
        signs = self._signs
        profile_N = np.concatenate([np.tile(self.profile_N, 2), signs.profile_D])
        noise_N = np.concatenate([np.tile(self.noise_N, 2), signs.noise_D]) / IQR_OF_NORMAL
        together = (profile_N[:, None] == profile_N) & (profile_N >= 0)
        noise_NN = np.outer(noise_N, noise_N) * np.where(np.eye(len(noise_N), dtype=bool), 1.0, 0.5 * together)
        noise_NN += NOISE**2 * np.diag(np.arange(len(noise_N)) >= 2 * len(self.noise_N))
        return noise_NN


def _remembered(
    profiles: Sequence[StepProfile], known: Container[TableConfig], batch_size: int, most: int
) -> Iterator[tuple[int, list[int]]]:
    """Returns profiles by number, newest first, each with the ranks that are conditioned on: `most` in all.

    The newest keeps all ranks, the others their costliest, so that each is represented: many profiles of one plan say
    less about tables and ranks than one of each of several plans.
    """
    alike = [
        number
        for number, profile in enumerate(profiles)
        if profile.batch_size == batch_size and all(table in known for table in profile.shards[0])
    ]
    for left, number in zip(range(len(alike), 0, -1), reversed(alike), strict=True):
        pairs = {r: (cost.fwd_compute_ms, cost.bwd_compute_ms) for r, cost in enumerate(profiles[number].ranks)}
        owners = [rank for rank in sorted(set(profiles[number].plan.rank_of.values())) if min(pairs[rank]) > 0]
        costliest = sorted(owners, key=lambda rank: -sum(pairs[rank]))[: most if number == alike[-1] else most // left]
        most -= len(costliest)
        yield number, sorted(costliest)


def _of_kinds(
    kinds: Sequence[_Kind],
    column: Mapping[TableConfig, int],
    wholes: Parts,
    model: CostModel,
    batch_size: int,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Returns summaries [., K] of all lists' tables, one list after another; the index of each table of a list in
    them [kinds, T], the last (zeros) if it is not in that list; and [R, 2] logarithms of lookups and reuse of each
    list, nan if absent. One pass of the network serves all: a start has a hundred lists of one table."""
    at_KT = np.full((len(kinds), len(column)), -1)
    if not kinds:
        return np.zeros((1, NUM_SUMMARY)), at_KT, []
    every = model.summaries(
        [table for own, _ in kinds for table in own], [stat for _, stats in kinds for stat in stats], batch_size
    )
    every_data = [(s.mean_pooling, s.mean_reuse) for _, stats in kinds for s in stats]
    log_data_every = np.log(np.maximum(np.array(every_data).reshape(-1, 2), LEAST))
    whole_T = wholes.wholes(list(column)).argmax(axis=1)
    columns_of: dict[int, list[int]] = {}  # a list's tables, by its identity: most kinds have one
    log_data, start = [], 0
    for at_T, (own, _) in zip(at_KT, kinds, strict=True):
        if id(own) not in columns_of:
            columns_of[id(own)] = [column[table] for table in own]
        columns, end = columns_of[id(own)], start + len(own)
        at_T[columns] = range(start, end)
        data = np.full((wholes.num_wholes, 2), np.nan)
        data[whole_T[columns]] = log_data_every[start:end]
        log_data.append(data)
        start = end
    return np.concatenate([every, np.zeros_like(every[:1])]), at_KT, log_data


def _since_the_first(log_data: Sequence[np.ndarray], num_tables: int) -> np.ndarray:
    """Returns [K, R, 2] of kinds, oldest last: the distance from the oldest's value of the same table, 0 if none has
    it, at most `FAR`."""
    all_KR2 = np.stack(log_data) if log_data else np.zeros((1, num_tables, 2))
    known = ~np.isnan(all_KR2[::-1, :, 0])
    first = all_KR2[::-1][known.argmax(axis=0), np.arange(num_tables)]
    away_KR2 = np.nan_to_num(all_KR2 - first)
    return away_KR2 / np.sqrt(1 + (away_KR2 / FAR) ** 2)
