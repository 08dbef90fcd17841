"""Measured over predicted: one posterior of what predictions are off by, with its uncertainty, wherever that is asked.

    corrections.fit(cost_model, exchange_model, shards)      # conditions on all that `observe` remembers
    corrections.table_factors_T2(tables), corrections.rank_factors_W2(world_size, None)

log(measured / predicted) = scale + rank + sum of (share x table) + more terms + noise; README.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.formats.json_file import FormatError
from dlrm_autoshard.planner.corrections.conditioning import GRID, Evidence, likeliest_spreads
from dlrm_autoshard.planner.corrections.gaussian import Posterior
from dlrm_autoshard.planner.corrections.observed import Observed
from dlrm_autoshard.planner.corrections.parts import Parts
from dlrm_autoshard.planner.corrections.stages import Stages
from dlrm_autoshard.planner.corrections.terms import (
    Rows,
    Spreads,
    changes,
    lightness,
    rank_variances,
    sources_alike,
    variances,
)
from dlrm_autoshard.planner.costs.cost_model import CostModel
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.costs.loads import NUM_FEATURES, log_loads, many
from dlrm_autoshard.planner.costs.replay import ShardSample
from dlrm_autoshard.tables import TableConfig

CHANGE = 0.01
"""Chance that ranks are no longer as they were an interval ago."""
MEASURED_NOISE = 0.04
"""Standard deviation of what a moment's measurement is off by: `UNSEEN_MOMENTS` of the probe."""
REMEMBERED = 16
"""Profiles conditioned on."""


class Corrections:
    """The posterior of prediction errors, and the profiles that it is conditioned on. prior: how far terms vary
    beforehand; one whose spread is 0 is left out."""

    def __init__(self, prior: Spreads | None = None) -> None:
        self._prior = Spreads() if prior is None else prior
        self.profiles: list[StepProfile] = []
        self.eras: list[int] = []  # of ranks, one a profile that was conditioned on
        self.spreads, self._spreads_of = self._prior, -1  # and the start-up shards that they were estimated with
        self._clear()

    def observe(self, profile: StepProfile) -> None:
        """Stores a profile for the next `fit`."""
        self.profiles.append(profile)
        dropped = max(0, len(self.profiles) - REMEMBERED)
        del self.profiles[:dropped], self.eras[:dropped]

    def fit(self, model: CostModel, exchange: ExchangeModel, shards: Sequence[ShardSample] = ()) -> None:
        """Conditions on stored profiles. For each new one it takes the likelier of two cases: ranks are as they
        were, or they have changed."""
        self._clear()
        if not self.profiles and not shards:
            return
        observed, evidence = None, None
        while len(self.eras) < len(self.profiles):
            observed = Observed.of(self.profiles[: len(self.eras) + 1], shards, model, exchange)
            evidence = self._in_likeliest_era(observed)
        if observed is None or evidence is None:
            observed = Observed.of(self.profiles, shards, model, exchange)
            evidence = observed.evidence().in_eras(self.eras)
        self._condition(observed, evidence, len(shards))

    # -- what it says ------------------------------------------------------------------------------------------------

    def table_factors_T2(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """Returns [T, 2]: each table's forward and backward over the prediction."""
        if self._observed is None:
            return np.ones((len(tables), 2))
        own_B2, changed_B2 = self._logs
        parts = self._observed.parts
        factors: np.ndarray = np.exp(parts.basis(tables) @ (own_B2 + changed_B2))
        return factors

    def rank_factors_W2(self, world_size: int, expected_speed: Sequence[float] | None) -> np.ndarray:
        """Returns [W, 2]: each rank's computation over the prediction; `expected_speed` stands in for ranks that
        were never observed."""
        expected = [0.0] * world_size if expected_speed is None else [-float(np.log(s)) for s in expected_speed]
        own_W = np.array([self._ranks.get(rank, expected[rank]) for rank in range(world_size)])
        factors: np.ndarray = np.exp(own_W[:, None] + self._scale_2)
        return factors

    def exchange_factors_W2(self, world_size: int) -> np.ndarray:
        """Returns [W, 2]: each rank's exchanges over the prediction."""
        return np.exp(np.array([self._exchange.get(rank, (0.0, 0.0)) for rank in range(world_size)]))

    def fused_logs_T2(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """Returns [T, 2]: further log factors of each table's forward and backward when fused with many others."""
        if self._observed is None:
            return np.zeros((len(tables), 2))
        logs: np.ndarray = self._observed.parts.basis(tables) @ self._fused_B2
        return logs

    def set_factors(self, ms: np.ndarray, summaries: np.ndarray, fused_logs: np.ndarray) -> np.ndarray:
        """Returns [..., 2]: factors of sets of tables, by their summaries [..., K]. ms: their predicted ms;
        fused_logs: cost-weighted mean of their tables' `fused_logs_T2`."""
        if self._observed is None:
            return np.ones(2)
        loads = log_loads(summaries)
        logs = fused_logs + self._load_form(loads)
        logs *= many(loads)[..., None]
        logs += lightness(ms, self._observed.costliest_2) * self._light_2
        factors: np.ndarray = np.exp(logs)
        return factors

    def together_factors_W2(self, stages: Stages, tables: Sequence[TableConfig]) -> np.ndarray:
        """Returns [W, 2]: further factors of exactly these sets of tables. stages: all ranks' forward, then
        backward."""
        if self._posterior is None:
            return np.ones((len(stages.ms_M) // 2, 2))
        rows = self._rows_now(stages, tables)
        same_stage = rows.stage_N[:, None] == self._rows.stage_N
        cross = self.spreads.together**2 * rows.sets_alike(self._rows) * self.spreads.of_stages(same_stage)
        return np.exp(self._posterior.mean(cross)).reshape(2, -1).T

    def covariance(self, stages: Stages, tables: Sequence[TableConfig]) -> np.ndarray:
        """Returns [M, M]: posterior covariance of the stages' log factors."""
        rows = self._rows_now(stages, tables)
        if self._posterior is None:
            return rows.covariance(rows, self.spreads, frozenset())
        slow = self._posterior.large
        cross = rows.covariance(self._rows, self.spreads, slow)
        prior = rows.covariance(rows, self.spreads, slow) + self._of_unseen_tables(stages, tables)
        return self._posterior.covariance(prior, cross)

    def _of_unseen_tables(self, stages: Stages, tables: Sequence[TableConfig]) -> np.ndarray:
        """Returns [M, M] for tables of which nothing was observed, whole or in part, which have no direction yet."""
        assert self._observed is not None
        unseen = np.flatnonzero(~self._observed.parts.wholes(tables).any(axis=1)).tolist()
        parts = Parts(own := [tables[number] for number in unseen])
        share_MB = stages.share_MT[:, unseen] @ parts.basis(own)
        variance_B = variances(parts.num_directions, parts.num_wholes, self.spreads)
        alike_MM = self.spreads.of_stages(stages.stage_M[:, None] == stages.stage_M)
        found: np.ndarray = (share_MB * variance_B) @ share_MB.T * alike_MM
        return found

    def told(self, stages: Stages, measured: Stages, tables: Sequence[TableConfig], times: int = 1) -> np.ndarray:
        """Returns [M, M]: covariance of what will be expected of `stages` once others have been measured so many
        times. It depends on how well they are measured, not on the values: like one moment's figures, with
        `MEASURED_NOISE`."""
        count = len(stages.ms_M)
        covariance = self.covariance(stages.and_also(measured), tables)
        seen, cross = covariance[count:, count:], covariance[:count, count:]
        told: np.ndarray = cross @ np.linalg.solve(seen + MEASURED_NOISE**2 / times * np.eye(len(seen)), cross.T)
        return (told + told.T) / 2

    def _rows_now(self, stages: Stages, tables: Sequence[TableConfig]) -> Rows:
        """Returns the stages as rows, as if measured next."""
        count = len(stages.ms_M)
        source, share_MB, change_MF, wholes = 0, stages.share_MT, np.zeros((count, 0)), stages.share_MT.shape[1]
        light_M, load_MF = np.zeros(count), np.zeros((count, NUM_FEATURES))
        if self._observed is not None:
            source, parts = self._observed.newest_source, self._observed.parts.also(tables)
            wholes = parts.num_wholes
            share_MB = stages.share_MT @ parts.basis(tables)
            change_MF = changes(share_MB, self._observed.now_R2[parts.whole_of_B])
            alike_W2 = self.rank_factors_W2(int(stages.rank_M.max(initial=0)) + 1, None)  # as if all ranks were alike
            slower_M = np.where(stages.rank_M < 0, 1.0, alike_W2[stages.rank_M, stages.stage_M])
            light_M = lightness(stages.ms_M / slower_M, self._observed.costliest_2[stages.stage_M])
            load_MF = self._observed.load_range.features(stages.load_ML)
        return Rows(
            stage_N=stages.stage_M,
            source_N=np.full(count, source),
            rank_N=stages.rank_M,
            era_N=np.full(count, self._now),
            profile_N=np.full(count, -1),
            light_N=light_M,
            share_NB=share_MB,
            change_NF=change_MF,
            many_N=many(stages.load_ML),
            load_NF=load_MF,
            num_wholes=wholes,
        )

    # -- conditioning ------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._logs = np.zeros((0, 2)), np.zeros((0, 2))  # own_B2 and changed_B2 of `_log_factors`
        self._ranks: dict[int, float] = {}
        self._exchange: dict[int, tuple[float, float]] = {}
        self._fused_B2 = np.zeros((0, 2))
        self._load_form: Callable[[np.ndarray], np.ndarray] = lambda _: np.zeros(2)
        self._scale_2, self._light_2 = np.zeros(2), np.zeros(2)
        self._posterior: Posterior | None = None
        self._observed: Observed | None = None

    @property
    def ranks_changed(self) -> bool:
        """Returns whether ranks changed with the newest profile."""
        return len(self.eras) > 1 and self.eras[-1] != self.eras[-2]

    @property
    def _now(self) -> int:
        return self.eras[-1] if self.eras else 0

    def _in_likeliest_era(self, observed: Observed) -> Evidence:
        """Assigns the newest profile's era."""
        now, evidence = self._now, observed.evidence()
        priors = {now: 0.0, now + 1: float(np.log(CHANGE))} if self.eras else {now: 0.0}
        of_era = {era: evidence.in_eras([*self.eras, era]) for era in priors}

        def fit(era: int) -> float:
            exchange = observed.exchange.log_evidence([*self.eras, era], self.spreads)
            return priors[era] + of_era[era].posterior(self.spreads).log_evidence + exchange

        self.eras.append(max(priors, key=fit) if len(priors) > 1 else now)
        return of_era[self._now]

    def _condition(self, observed: Observed, evidence: Evidence, shards: int) -> None:
        """Computes the posterior. evidence: relative to no factors of tables.

        Spreads are estimated at the start: where shards are new, and with the probe's first, second, fourth profile. A
        job's own intervals, few plans in few moments, say little of them (autoshard/README.md)."""
        number = len(self.profiles)
        probed = number > 0 and self.profiles[-1].source != "measured" and number & (number - 1) == 0
        if shards != self._spreads_of or probed:
            self.spreads, self._spreads_of = likeliest_spreads(evidence, self._prior), shards
        posterior = evidence.posterior(self.spreads)
        for _ in range(2):  # how tables add up bends with their costs, so their shares are taken again
            own_B2, changed_B2 = self._log_factors(observed, evidence.rows, posterior)
            evidence = observed.evidence(observed.basis_TB @ (own_B2 + changed_B2)).in_eras(self.eras)
            posterior = evidence.posterior(self.spreads)
        rows = evidence.rows
        self._observed, self._rows, self._posterior = observed, rows, posterior
        self._logs = self._log_factors(observed, rows, posterior)
        key_N = rows.rank_keys
        newest_N, stage_2N = rows.source_N == observed.newest_source, rows.stage_N == np.arange(2)[:, None]
        self._scale_2 = posterior.mean(self.spreads.scale**2 * sources_alike(newest_N) * stage_2N)
        self._light_2 = posterior.mean(self.spreads.light**2 * rows.light_N * newest_N * stage_2N)
        many_N2 = (posterior.weights_N * rows.many_N * self.spreads.of_stages(stage_2N)).T
        self._load_form = observed.load_range.form(self.spreads.load**2 * rows.load_NF.T @ many_N2)
        self._fused_B2 = self.spreads.fused**2 * rows.share_NB.T @ many_N2
        self._fused_B2[rows.num_wholes :] = 0.0
        variance_N = rank_variances(key_N, self.spreads, posterior.large) * rows.of_rank
        for key in np.unique(key_N[key_N >= 0]):  # of several eras the last one counts
            self._ranks[int(key % 1_000_000)] = float(posterior.mean((variance_N * (key_N == key))[None])[0])
        if observed.profiles:
            self._exchange = observed.exchange.factors(self.eras, self.spreads)

    def _log_factors(self, observed: Observed, rows: Rows, posterior: Posterior) -> tuple[np.ndarray, np.ndarray]:
        """Returns posterior means of the tables' log factors, forward and backward: [B, 2] of their own, and [B, 2]
        after data changed."""
        own, changed = [], []
        for stage in (0, 1):
            weights_N = posterior.weights_N * self.spreads.of_stages(rows.stage_N == stage)
            now_B2 = observed.now_R2[observed.parts.whole_of_B]
            changed_B2 = (weights_N @ rows.change_NF).reshape(-1, 2) * now_B2
            own.append(rows.variance_B(self.spreads) * (weights_N @ rows.share_NB))
            changed.append(self.spreads.change**2 * changed_B2.sum(axis=1))
        return np.stack(own, axis=1), np.stack(changed, axis=1)

    # -- state -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        likeliest = {name: getattr(self.spreads, name) for name in GRID}
        return {"eras": list(self.eras), "spreads": {"likeliest": likeliest, "shards": self._spreads_of}}

    def load_json(self, record: Mapping[str, Any], profiles: Sequence[StepProfile]) -> None:
        """Loads the state. profiles: all that were kept, newest last."""
        if len(record["eras"]) > len(profiles):
            raise FormatError(f"'eras' are of {len(record['eras'])} profiles, and there are {len(profiles)}.")
        self.eras = list(record["eras"])
        if "spreads" in record:  # not in states of older versions
            likeliest = {n: v for n, v in record["spreads"]["likeliest"].items() if getattr(self._prior, n) > 0}
            self.spreads, self._spreads_of = replace(self._prior, **likeliest), record["spreads"]["shards"]
        self.profiles = list(profiles)[len(profiles) - len(self.eras) :]
