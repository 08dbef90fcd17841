"""Measured over predicted: one posterior of what predictions are off by, with its uncertainty, wherever that is asked.

    corrections.fit(cost_model, exchange_model, shards)      # conditions on all that `observe` remembers
    corrections.table_factors_T2(tables), corrections.rank_factors_W2(world_size, None)

log(measured / predicted) = scale + rank + sum of (share x table) + these tables together + noise; README.md derives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlrm_autoshard.costs import EXCHANGE, PLANNED_STAGES, StepProfile
from dlrm_autoshard.planner.cost_model import COST, CostModel
from dlrm_autoshard.planner.exchange_model import ExchangeModel
from dlrm_autoshard.planner.gaussian import Posterior, condition
from dlrm_autoshard.planner.replay import ShardSample, comms_of
from dlrm_autoshard.tables import TableConfig, TableStats

# Axes: N observations (a rank's stage in a profile, or a start-up shard's), T tables, W ranks.


@dataclass(frozen=True)
class Spreads:
    """Prior standard deviations of log factors. Those with a GRID take the likeliest value, the prior's being likelier
    than its neighbours; the others hardly matter once anything was measured."""

    table: float = 0.1  # a table's own, in every plan: held-out single tables of the shipped costs
    together: float = 0.03  # of one set of tables, beside its tables': held-out sets of the shipped costs
    noise: float = 0.01  # of an interval's figures, beside what the profile itself reports
    scale: float = 0.5  # all tables of a stage: another machine, a GPU instead of a CPU
    rank: float = 0.02  # ranks of one machine
    slow_rank: float = 0.7  # a rank whose core is shared by one or two other processes
    exchange: float = 0.1  # one rank's exchanges, beside the others'


GRID: Mapping[str, tuple[float, ...]] = {
    "table": (0.05, 0.1, 0.2, 0.4),
    "together": (0.01, 0.03, 0.06, 0.12),
    "noise": (0.003, 0.01, 0.03, 0.06),
}
CHANGE = 0.05
"""Chance that ranks, or data, are no longer as they were an interval ago."""
REMEMBERED, MOST_ROWS = 16, 600
"""Profiles conditioned on, and stages of theirs and of start-up shards: the system stays small."""
IQR_OF_NORMAL = 1.35
"""A profile's noise is an interquartile range: so many standard deviations."""


@dataclass(frozen=True)
class Rows:
    """What a stage's logarithm consists of. source: where its scale comes from. rank: -1 where it is nobody's. Eras are
    numbers of stretches of time in which ranks, and data, stayed as they were."""

    stage_N: np.ndarray
    source_N: np.ndarray
    rank_N: np.ndarray
    rank_era_N: np.ndarray
    data_era_N: np.ndarray
    share_NT: np.ndarray

    def covariance(self, other: Rows, spreads: Spreads, slow: frozenset[int]) -> np.ndarray:
        """[N, M] prior covariance."""
        same_stage = self.stage_N[:, None] == other.stage_N
        same_data = self.data_era_N[:, None] == other.data_era_N
        # What probes and training are off by has much in common.
        found = spreads.scale**2 * np.where(self.source_N[:, None] == other.source_N, 1.0, 0.9)
        # Half of what is wrong about a table outlasts a change of its data.
        overlap = self.share_NT @ other.share_NT.T
        found = found + spreads.table**2 * overlap * np.where(same_data, 1.0, 0.5)
        # Sets of tables that have most in common are fused alike.
        lengths = np.sqrt((self.share_NT**2).sum(axis=1))[:, None] * np.sqrt((other.share_NT**2).sum(axis=1))
        alike = overlap / np.maximum(lengths, 1e-12)
        found = (found + spreads.together**2 * alike**8 * same_data) * same_stage
        key_N, key_M = self.rank_keys, other.rank_keys
        variance_N = np.where(np.isin(key_N, list(slow)), spreads.slow_rank, spreads.rank) ** 2
        covariance: np.ndarray = found + np.where((key_N[:, None] == key_M) & (key_M >= 0), variance_N[:, None], 0.0)
        return covariance

    @property
    def rank_keys(self) -> np.ndarray:
        """One number a rank and era; -1 of nobody's."""
        keys: np.ndarray = np.where(self.rank_N < 0, -1, self.rank_era_N * 1_000_000 + self.rank_N)
        return keys

    def chosen(self, indices: np.ndarray) -> Rows:
        return Rows(**{name: values[indices] for name, values in vars(self).items()})


class Corrections:
    def __init__(self) -> None:
        self.profiles: list[StepProfile] = []
        self.eras: list[tuple[int, int]] = []  # of ranks and data, one a profile that was conditioned on
        self.spreads = Spreads()
        self._clear()

    def observe(self, profile: StepProfile) -> None:
        """Remembers a profile, to be conditioned on by the next `fit`."""
        self.profiles.append(profile)
        dropped = max(0, len(self.profiles) - REMEMBERED)
        del self.profiles[:dropped], self.eras[:dropped]

    def fit(self, model: CostModel, exchange: ExchangeModel, shards: Sequence[ShardSample] = ()) -> None:
        """Conditions on what is remembered. For each new profile the likeliest is taken: that all is as it was, that
        ranks have changed, or data, or both."""
        self._clear()
        while len(self.eras) < len(self.profiles):
            seen = self.profiles[: len(self.eras) + 1]
            self.eras.append(self._likeliest_era(_Observed.of(seen, shards, model, exchange)))
        if self.profiles or shards:
            self._condition(_Observed.of(self.profiles, shards, model, exchange))

    # -- what it says ------------------------------------------------------------------------------------------------

    def table_factors_T2(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """[T, 2] that each table's forward and backward take of what is predicted."""
        return np.exp(np.array([self._tables.get(table, (0.0, 0.0)) for table in tables]))

    def rank_factors_W2(self, world_size: int, expected_speed: Sequence[float] | None) -> np.ndarray:
        """[W, 2] that each rank's computation takes; `expected_speed` counts for ranks that were never observed."""
        expected = [0.0] * world_size if expected_speed is None else [-float(np.log(s)) for s in expected_speed]
        own_W = np.array([self._ranks.get(rank, expected[rank]) for rank in range(world_size)])
        factors: np.ndarray = np.exp(own_W[:, None] + self._scale_2)
        return factors

    def rank_factors_then(self) -> list[np.ndarray]:
        """[W, 2] of each remembered profile: what its ranks' computation took of what tables and sets explain."""
        then = []
        for profile, (era, _) in zip(self.profiles, self.eras, strict=True):
            own_W = [self._ranks_then.get((era, rank), 0.0) for rank in range(profile.plan.world_size)]
            then.append(np.exp(np.array(own_W)[:, None] + self._scale_2))
        return then

    def exchange_factors_W2(self, world_size: int) -> np.ndarray:
        """[W, 2] that each rank's exchanges take."""
        return np.exp(np.array([self._exchange.get(rank, (0.0, 0.0)) for rank in range(world_size)]))

    def together_factors_W2(self, share_2WT: np.ndarray, tables: Sequence[TableConfig]) -> np.ndarray:
        """[W, 2] that sets of tables take beside what their tables do, given each table's share of the set's cost."""
        _, world_size, _ = share_2WT.shape
        if self._posterior is None:
            return np.ones((world_size, 2))
        rows = self._rows_now(share_2WT.reshape(2 * world_size, -1), np.repeat([0, 1], world_size), -1, tables)
        with_sets = rows.covariance(self._rows, self.spreads, self._posterior.large)
        without = rows.covariance(self._rows, replace(self.spreads, together=0.0), self._posterior.large)
        return np.exp(self._posterior.mean(with_sets - without)).reshape(2, world_size).T

    def covariance(
        self, share_MT: np.ndarray, stage_M: np.ndarray, rank_M: np.ndarray, tables: Sequence[TableConfig]
    ) -> np.ndarray:
        """[M, M] of the logarithms of what sets of tables take on ranks. stage_M: 0 forward, 1 backward."""
        rows = self._rows_now(share_MT, stage_M, rank_M, tables)
        if self._posterior is None:
            return rows.covariance(rows, self.spreads, frozenset())
        slow = self._posterior.large
        cross = rows.covariance(self._rows, self.spreads, slow)
        return self._posterior.covariance(rows.covariance(rows, self.spreads, slow), cross)

    def _rows_now(
        self, share_MT: np.ndarray, stage_M: np.ndarray, rank_M: np.ndarray | int, tables: Sequence[TableConfig]
    ) -> Rows:
        """As they would be measured next."""
        source = 0
        if self._observed is not None:
            column = {table: i for i, table in enumerate(tables)}
            of_task = share_MT
            share_MT = np.zeros((len(stage_M), len(self._observed.tables)))
            for i, table in enumerate(self._observed.tables):
                if table in column:
                    share_MT[:, i] = of_task[:, column[table]]
            source = self._observed.newest_source
        return _rows_of(stage_M, share_MT, source=source, rank=rank_M, eras=self._now)

    # -- conditioning ------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._tables: dict[TableConfig, tuple[float, float]] = {}
        self._ranks: dict[int, float] = {}
        self._ranks_then: dict[tuple[int, int], float] = {}  # by era
        self._exchange: dict[int, tuple[float, float]] = {}
        self._scale_2 = np.zeros(2)
        self._posterior: Posterior | None = None
        self._observed: _Observed | None = None

    @property
    def _now(self) -> tuple[int, int]:
        return self.eras[-1] if self.eras else (0, 0)

    def _likeliest_era(self, observed: _Observed) -> tuple[int, int]:
        if not self.eras:
            return 0, 0
        ranks, data = self.eras[-1]
        hypotheses = {(ranks, data): 0.0, (ranks + 1, data): 1.0}
        before, newest = observed.profiles[-2:]
        if before.stats != newest.stats:
            hypotheses |= {(ranks, data + 1): 1.0, (ranks + 1, data + 1): 2.0}
        evidence = {}
        for era, changes in hypotheses.items():
            rows, values, noise = observed.rows([*self.eras, era], None)
            posterior = self._posterior_of(rows, values, noise, self.spreads)
            evidence[era] = posterior.log_evidence + changes * np.log(CHANGE)
            evidence[era] += observed.exchange_posterior([*self.eras, era], self.spreads).log_evidence
        return max(evidence, key=lambda era: evidence[era])

    def _posterior_of(self, rows: Rows, values: np.ndarray, noise: np.ndarray, spreads: Spreads) -> Posterior:
        covariance = rows.covariance(rows, spreads, frozenset()) + noise + spreads.noise**2 * np.eye(len(values))
        keys = rows.rank_keys
        causes = {int(key): np.flatnonzero(keys == key) for key in np.unique(keys[keys >= 0])}
        return condition(covariance, values, causes, spreads.slow_rank**2)

    def _condition(self, observed: _Observed) -> None:
        table_T2: np.ndarray | None = None
        self.spreads = Spreads()
        for _ in range(3):  # how tables add up bends with their costs, so their shares are taken again
            rows, values, noise = observed.rows(self.eras, table_T2)
            if table_T2 is None and len(values) <= MOST_ROWS:
                self.spreads = self._likeliest_spreads(rows, values, noise)
            posterior = self._posterior_of(rows, values, noise, self.spreads)
            table_T2 = self._tables_T2(observed, rows, posterior)
        assert table_T2 is not None
        self._observed, self._rows, self._posterior = observed, rows, posterior
        self._tables = {table: (float(f), float(b)) for table, (f, b) in zip(observed.tables, table_T2, strict=True)}
        none = np.zeros((2, len(observed.tables)))
        scale = _rows_of(np.arange(2), none, source=observed.newest_source, rank=-1, eras=self._now)
        self._scale_2 = posterior.mean(scale.covariance(rows, self.spreads, posterior.large))
        for key in np.unique(rows.rank_keys[rows.rank_N >= 0]):  # of several eras the last one counts
            one = _rows_of(np.array([9]), none[:1], source=-1, rank=key % 1_000_000, eras=(key // 1_000_000, 0))
            own = posterior.mean(one.covariance(rows, self.spreads, posterior.large))
            self._ranks[int(key % 1_000_000)] = float(own[0])
            self._ranks_then[int(key // 1_000_000), int(key % 1_000_000)] = float(own[0])
        if observed.profiles:
            self._exchange = observed.exchange_factors(self.eras, self.spreads)

    def _tables_T2(self, observed: _Observed, rows: Rows, posterior: Posterior) -> np.ndarray:
        """[T, 2] posterior means of the tables' log factors, now."""
        same = np.where(rows.data_era_N == self._now[1], 1.0, 0.5)
        weighted = posterior.weights_N * same * self.spreads.table**2
        columns = [(weighted * (rows.stage_N == stage)) @ rows.share_NT for stage in (0, 1)]
        return np.stack(columns, axis=1)

    def _likeliest_spreads(self, rows: Rows, values: np.ndarray, noise: np.ndarray) -> Spreads:
        """One after the other; a value that is twice or half the prior's must be likelier by e^0.5 to be taken."""
        best = Spreads()

        def fitness(spreads: Spreads) -> float:
            away = sum(np.log2(getattr(spreads, name) / getattr(Spreads(), name)) ** 2 for name in GRID)
            return self._posterior_of(rows, values, noise, spreads).log_evidence - 0.5 * float(away)

        for name, values_of in GRID.items():
            trials = [replace(best, **{name: value}) for value in values_of]
            best = max(trials, key=fitness)
        return best

    # -- state -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {"eras": [list(era) for era in self.eras]}

    def load_json(self, record: Mapping[str, Any], profiles: Sequence[StepProfile]) -> None:
        """profiles: all that were kept, the newest last."""
        self.eras = [(int(ranks), int(data)) for ranks, data in record["eras"]]
        self.profiles = list(profiles)[len(profiles) - len(self.eras) :]


@dataclass(frozen=True)
class _Observed:
    """Measurements beside their predictions, uncorrected. cost_NT2: of each table, where it is in the set."""

    profiles: Sequence[StepProfile]
    tables: tuple[TableConfig, ...]
    summary_NTK: list[np.ndarray]  # of each different list of tables; `kind_N` says which
    kind_N: np.ndarray
    inside_NT: np.ndarray
    measured_N2: np.ndarray
    noise_N: np.ndarray
    profile_N: np.ndarray  # -1 of a start-up shard
    rank_N: np.ndarray
    model: CostModel
    exchange_off: list[np.ndarray]  # of each profile: [W, 2] log measured / predicted

    @property
    def newest_source(self) -> int:
        return _SOURCES.index(self.profiles[-1].source) if self.profiles else 0

    @staticmethod
    def of(
        profiles: Sequence[StepProfile], shards: Sequence[ShardSample], model: CostModel, exchange: ExchangeModel
    ) -> _Observed:
        tables = profiles[-1].tables if profiles else tuple(dict.fromkeys(t for s in shards for t in s.tables))
        column = {table: i for i, table in enumerate(tables)}
        batch_size = profiles[-1].batch_size if profiles else shards[-1].batch_size
        kinds: dict[tuple[int, ...], int] = {}
        summaries: list[np.ndarray] = []
        rows: list[tuple[int, np.ndarray, tuple[float, float], float, int, int]] = []

        def kind_of(own: Sequence[TableConfig], stats: Sequence[TableStats]) -> int:
            key = (*map(id, own), *map(id, stats))
            if key not in kinds:
                own_TK = model.summaries(own, stats, batch_size)
                summary = np.zeros((len(tables), own_TK.shape[1]))
                summary[[column[table] for table in own]] = own_TK
                kinds[key] = len(summaries)
                summaries.append(summary)
            return kinds[key]

        left = MOST_ROWS
        for number in range(len(profiles) - 1, -1, -1):
            profile = profiles[number]
            known = all(table in column for table in profile.tables)
            if not known or profile.batch_size != batch_size or (left <= 0 and number < len(profiles) - 1):
                continue
            number_of_kind = kind_of(profile.tables, profile.stats)
            rank_T = np.array([profile.plan.rank_of.get(table.name, -1) for table in tables])
            for rank, cost in enumerate(profile.ranks):
                pair = (cost.fwd_compute_ms, cost.bwd_compute_ms)
                if min(pair) > 0:
                    rows.append((number_of_kind, rank_T == rank, pair, profile.noise, number, rank))
                    left -= 2
        for shard in shards:
            known = all(table in column for table in shard.tables) and shard.batch_size == batch_size
            pair = (shard.fwd_compute_ms, shard.bwd_compute_ms)
            if left > 0 and known and min(pair) > 0:
                inside = np.zeros(len(tables), dtype=bool)
                inside[[column[table] for table in shard.tables]] = True
                number_of_kind = kind_of(shard.tables, shard.stats)
                rows.append((number_of_kind, inside, pair, shard.noise, -1, -1))
                left -= 2
        kinds_N, insides, pairs, noises, numbers, ranks = zip(*rows, strict=True) if rows else ((),) * 6
        return _Observed(
            profiles,
            tuple(tables),
            summaries,
            np.array(kinds_N, dtype=int),
            np.array(insides, dtype=bool).reshape(-1, len(tables)),
            np.array(pairs, dtype=np.float64).reshape(-1, 2),
            np.array(noises, dtype=np.float64),
            np.array(numbers, dtype=int),
            np.array(ranks, dtype=int),
            model,
            [_exchange_off(profile, exchange) for profile in profiles],
        )

    def rows(self, eras: Sequence[tuple[int, int]], table_T2: np.ndarray | None) -> tuple[Rows, np.ndarray, np.ndarray]:
        """(rows, their log measured / predicted, covariance of their noise); forward, then backward.
        table_T2: log factors of the tables, about which shares are taken."""
        log_T2 = np.zeros((len(self.tables), 2)) if table_T2 is None else table_T2
        sums = np.zeros((len(self.kind_N), self.summary_NTK[0].shape[1])) if self.summary_NTK else np.zeros((0, 1))
        share_N2T = np.zeros((len(self.kind_N), 2, len(self.tables)))
        for kind, summary_TK in enumerate(self.summary_NTK):
            own = np.flatnonzero(self.kind_N == kind)
            corrected = summary_TK.copy()
            corrected[:, COST] *= np.exp(log_T2)
            sums[own] = self.inside_NT[own] @ corrected
            for stage in (0, 1):
                share_N2T[own, stage] = self.inside_NT[own] * corrected[:, COST.start + stage]
        if len(sums):
            share_N2T /= (sums[:, COST] + self.model.launch_S)[:, :, None]
        predicted_N2 = self.model.device_ms(sums.astype(np.float32)).astype(np.float64)
        off_N2 = np.log(self.measured_N2 / predicted_N2) + np.einsum("nst,ts->ns", share_N2T, log_T2)
        count = len(self.kind_N)
        era_N = np.array([eras[number] if number >= 0 else (0, 0) for number in self.profile_N]).reshape(-1, 2)
        source_N = np.array([_SOURCES.index(self.profiles[n].source) if n >= 0 else 0 for n in self.profile_N])
        rows = Rows(
            np.repeat([0, 1], count),
            np.tile(source_N, 2),
            np.tile(self.rank_N, 2),
            np.tile(era_N[:, 0], 2),
            np.tile(era_N[:, 1], 2),
            np.concatenate([share_N2T[:, 0], share_N2T[:, 1]]),
        )
        # Half of a profile's noise is its own moment's, the same for all of its ranks and stages.
        noise_N, profile_N = np.tile(self.noise_N / IQR_OF_NORMAL, 2), np.tile(self.profile_N, 2)
        together = (profile_N[:, None] == profile_N) & (profile_N >= 0)
        noise_NN = np.outer(noise_N, noise_N) * np.where(np.eye(2 * count, dtype=bool), 1.0, 0.5 * together)
        return rows, off_N2.T.ravel(), noise_NN

    def _exchange_rows(self, eras: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(values, noise, [N, 4] stage, rank, era, profile's plan)."""
        values, noise, keys = [], [], []
        plans = [profile.plan.fingerprint for profile in self.profiles]
        for number, off_W2 in enumerate(self.exchange_off):
            for rank, stage in zip(*np.nonzero(np.isfinite(off_W2)), strict=True):
                values.append(off_W2[rank, stage])
                noise.append(self.profiles[number].noise / IQR_OF_NORMAL)
                keys.append((stage, rank, eras[number][0], plans.index(plans[number])))
        return np.array(values), np.array(noise), np.array(keys, dtype=int).reshape(-1, 4)

    def exchange_posterior(self, eras: Sequence[tuple[int, int]], spreads: Spreads) -> Posterior:
        values, noise, keys = self._exchange_rows(eras)
        covariance = _exchange_covariance(keys, keys, spreads)
        return condition(covariance + np.diag(noise**2 + spreads.noise**2), values)

    def exchange_factors(self, eras: Sequence[tuple[int, int]], spreads: Spreads) -> dict[int, tuple[float, float]]:
        """Log factors of each rank's exchanges, now."""
        world_size = self.profiles[-1].plan.world_size
        wanted = np.array([(stage, rank, eras[-1][0], -1) for rank in range(world_size) for stage in (0, 1)])
        _, _, keys = self._exchange_rows(eras)
        mean = self.exchange_posterior(eras, spreads).mean(_exchange_covariance(wanted, keys, spreads))
        return {rank: (float(f), float(b)) for rank, (f, b) in enumerate(mean.reshape(-1, 2))}


_SOURCES = ("probe", "measured", "simulated")


def _exchange_covariance(one: np.ndarray, other: np.ndarray, spreads: Spreads) -> np.ndarray:
    """A stage's own, of all ranks and of each, as long as they stay as they are; each plan's; and what always is."""
    same = one[:, None, :] == other
    stage, rank, era, plan = (same[..., i] for i in range(4))
    ranks = spreads.exchange**2 * (rank & era) + spreads.scale**2 * era
    covariance: np.ndarray = stage * (ranks + spreads.together**2 * plan + spreads.exchange**2)
    return covariance


def _exchange_off(profile: StepProfile, exchange: ExchangeModel) -> np.ndarray:
    sample = comms_of(profile)
    predicted_2 = exchange.ms(np.array(sample.dims, dtype=np.float64), profile.batch_size, profile.hosts)
    measured_W4 = np.array([[rank.stage(stage) for stage in PLANNED_STAGES] for rank in profile.ranks])
    with np.errstate(divide="ignore", invalid="ignore"):
        off: np.ndarray = np.log(measured_W4[:, EXCHANGE] / predicted_2)
    return off


def _rows_of(
    stage_N: np.ndarray,
    share_NT: np.ndarray,
    *,
    source: int,
    rank: int | np.ndarray,
    eras: tuple[int, int],
) -> Rows:
    count = len(stage_N)
    return Rows(
        stage_N,
        np.full(count, source),
        np.broadcast_to(rank, count),
        np.full(count, eras[0]),
        np.full(count, eras[1]),
        share_NT,
    )
