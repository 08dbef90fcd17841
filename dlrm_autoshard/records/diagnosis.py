"""Diagnoses an interval: which rank holds the others up, in which stage, why, and because of which tables.

straggler = find_straggler(profile)
straggler.rank, straggler.stage, straggler.cause     # 1, "fwd_compute", "load"
straggler.tables                                     # (("ad_id", 0.61), ("user", 0.22))
straggler.sentence                                   # for people
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import NormalDist
from typing import Any, Literal

from dlrm_autoshard.costs import COMPUTE_STAGES, PLANNED_STAGES, STAGES, StageTime, imbalance
from dlrm_autoshard.formats.words import count
from dlrm_autoshard.records.decisions import interval_in_words
from dlrm_autoshard.records.facts import IntervalFacts, TableUse
from dlrm_autoshard.tables import Shard, lookup_work

# Pure arithmetic on a profile. A rank's *excess* in a stage is its time minus the ranks' mean: what it costs the
# others, since they wait for it at the next collective.

Cause = Literal["load", "starved of CPU", "slow data"]

NOTABLE_EXCESS = 0.03
"""Part of the step: ranks closer together than this have no straggler worth naming."""
NINETY = 1.64
"""Standard deviations on either side that hold 90% of normal errors."""
NEARLY_ALL = 0.8
"""Part of a rank's time in its slowest stage: a table that takes more limits every plan."""
STARVED_BELOW = 0.9
"""CPU time / wall time under which a rank did not have its core to itself."""


@dataclass(frozen=True)
class Straggler:
    """The rank that others surely wait for most.

    excess_ms: what the step would save if this rank took the mean time in the stages in which it is surely slowest;
    low_ms, high_ms: its 90% interval. stage: where most of that arises. tables: its largest tables there with their
    share of the rank's time in that stage, estimated from lookups and dims (no table is timed alone); empty where
    tables are not the reason.
    """

    rank: int
    cause: Cause
    stage: str
    excess_ms: float
    low_ms: float
    high_ms: float
    stage_ms: float
    stage_mean_ms: float
    cpu_share: float | None
    tables: tuple[tuple[str, float], ...]

    @property
    def reason(self) -> str:
        """Why this rank is slow and what that costs, in few words."""
        cost = f"{self.excess_ms:.3g} ms a step ({self.low_ms:.3g} to {self.high_ms:.3g})"
        if self.cause == "starved of CPU":
            return f"had its core for {self.cpu_share or 0:.0%} of the time: {cost}"
        return f"waits for its data: {cost}" if self.cause == "slow data" else f"too much {self.stage}: {cost}"

    @property
    def sentence(self) -> str:
        who = (
            f"rank {self.rank} holds the others up by {self.excess_ms:.3g} ms a step ({self.low_ms:.3g} to "
            f"{self.high_ms:.3g}), most of it in {self.stage} ({self.stage_ms:.3g} ms; the ranks' mean is "
            f"{self.stage_mean_ms:.3g})"
        )
        if self.cause == "starved of CPU":
            return (
                f"{who}: it had its core for {self.cpu_share or 0:.0%} of the time, so something else runs there; "
                "its own work is not what is too much."
            )
        if self.cause == "slow data":
            return f"{who}: it waits for its next batch. Raise data.reader_threads or check that host's disk."
        if not self.tables:
            return f"{who}: not because of its tables."
        named = ", ".join(f"'{name}' ({share:.0%})" for name, share in self.tables)
        return f"{who}: too much work, by lookups and dims mostly {named}{alone_limits(self.tables)}."

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tables": [[name, share] for name, share in self.tables], "sentence": self.sentence}


MOST_NAMED = 3
"""Tables of a rank that has too much work."""


def find_straggler(profile: IntervalFacts) -> Straggler | None:
    """None where there is one rank, ranks are as good as even, or too few steps were sampled to be sure who is slow.

    A stage counts where its slowest rank is further above the mean than sampled steps scatter by themselves: with one
    error in twenty over all stages and ranks together (Bonferroni).
    """
    ranks = profile.world_size
    if not profile.samples or ranks == 1:
        return None
    sure = NormalDist().inv_cdf(1 - 0.05 / (ranks * len(STAGES)))
    held_up, variance, excess = [0.0] * ranks, [0.0] * ranks, dict[str, list[float]]()
    for stage, times in profile.stage_ms.items():
        excess[stage] = [time - sum(times) / ranks for time in times]
        slowest = max(range(ranks), key=lambda rank: times[rank])
        error = error_of_excess(profile, stage, slowest)
        if excess[stage][slowest] > sure * error:
            held_up[slowest] += excess[stage][slowest]
            variance[slowest] += error**2
    rank = max(range(ranks), key=lambda r: held_up[r])
    if held_up[rank] < NOTABLE_EXCESS * profile.step_ms:
        return None
    stage = max(STAGES, key=lambda name: excess[name][rank])
    times = profile.stage_ms[stage]
    cause: Cause = "load"
    if stage == "data_wait":
        cause = "slow data"
    elif _is_starved(profile, rank):
        cause = "starved of CPU"
    tables = shares_of_stage(profile.tables, rank, stage)[:MOST_NAMED] if cause == "load" else ()
    margin = NINETY * math.sqrt(variance[rank])
    return Straggler(
        rank, cause, stage, held_up[rank], held_up[rank] - margin, held_up[rank] + margin,
        times[rank], sum(times) / ranks, profile.cpu_share[rank], tuple(tables),
    )  # fmt: skip


def error_of_excess(profile: IntervalFacts, stage: str, rank: int) -> float:
    """Standard error of how far a rank lies above the ranks' mean, in ms; infinite where nobody knows."""
    errors = profile.error_ms.get(stage)
    if errors is None:
        return math.inf
    others = sum(error**2 for error in errors) - errors[rank] ** 2
    return math.sqrt((errors[rank] * (1 - 1 / len(errors))) ** 2 + others / len(errors) ** 2)


def who_is_slow(profile: IntervalFacts) -> str | None:
    """A sentence on who holds the others up, and why; the terminal, the page and `explain` all say this one. None where
    there is nobody to wait for, or nothing was sampled."""
    if profile.world_size == 1 or profile.samples == 0:
        return None
    straggler = find_straggler(profile)
    if straggler is not None:
        return straggler.sentence[0].upper() + straggler.sentence[1:]
    apart = sum(max(times) - sum(times) / len(times) for times in profile.stage_ms.values())
    if apart < NOTABLE_EXCESS * profile.step_ms:
        return "No rank holds the others up: their differences are below 3% of the step."
    return (
        f"Nobody can be said to hold the others up: in {count(profile.samples, 'sampled step')} the ranks differ by no "
        "more than such steps do by themselves."
    )


def alone_limits(tables: Sequence[tuple[str, float]]) -> str:
    """The end of a sentence on a rank's tables in its slowest stage, largest first, with their shares of it: whether
    one of them is nearly all of it, so that no plan could be better."""
    if not tables or tables[0][1] <= NEARLY_ALL:
        return ""
    if Shard.parse(tables[0][0]).columns is None:
        return ": whole tables cannot be spread further, so this table alone limits the plan"
    return ": this part alone limits the plan, and only narrower parts would spread it further"


@dataclass(frozen=True)
class Balance:
    """Saving by perfect balance of the stages that placement decides: a part of a step, with its 90% interval."""

    gain: float
    low: float
    high: float

    def sentence(self, when: str, samples: int) -> str:
        steps = count(samples, "sampled step")
        if not math.isfinite(self.low):
            return f"In {when} {steps} cannot tell what perfect balance would have saved."
        if self.low <= 0:
            most = f"at most {max(0.0, self.high):.1%} of a step"
            return f"In {when} perfect balance would have saved nothing that {steps} can tell from noise ({most})."
        return f"In {when} perfect balance would have saved {interval_in_words(*astuple(self))} of a step."


def balance_of(profile: IntervalFacts, gain: float | None = None) -> Balance:
    """gain: where more is known than the profile says: the ranks' speeds, by which decisions are made."""
    gain = profile.balance_gain if gain is None else gain
    slowest = {stage: times.index(max(times)) for stage, times in profile.stage_ms.items()}
    variance = sum(error_of_excess(profile, stage, slowest[stage]) ** 2 for stage in PLANNED_STAGES)
    margin = NINETY * math.sqrt(variance) / max(profile.mean_step_ms, 1e-9)
    return Balance(gain, gain - margin, gain + margin)


def _is_starved(profile: IntervalFacts, rank: int) -> bool:
    """It did not have its core to itself, and by CPU time its work is not what sets it apart from the others.

    A rank can be both starved and overloaded: the larger of the two reasons is given. CPU times are compared at the
    mean share, so that where all ranks are starved alike a rank is set apart by its load.
    """
    share = profile.cpu_share[rank]
    if share is None or share >= STARVED_BELOW:
        return False
    shares = [1.0 if own is None else own for own in profile.cpu_share]
    wall = [sum(profile.stage_ms[stage][r] for stage in COMPUTE_STAGES) for r in range(profile.world_size)]
    cpu = [time * own for time, own in zip(wall, shares, strict=True)]
    wall_excess, cpu_excess = (times[rank] - sum(times) / len(times) for times in (wall, cpu))
    return wall_excess <= 0 or cpu_excess < wall_excess / 2 * sum(shares) / len(shares)


def table_work(table: TableUse, stage: str) -> float:
    """How much of a stage's work a table makes, in units that compare tables within that stage; 0 where none."""
    if stage in ("fwd_compute", "bwd_compute"):
        return lookup_work(table.embedding_dim, table.mean_pooling)
    if stage in ("fwd_comms", "bwd_comms"):
        return float(table.embedding_dim * table.features)  # a pooled vector a sample and feature
    if stage == "input_dist":
        return table.mean_pooling  # ids per sample
    return 0.0


def shares_of_stage(tables: Sequence[TableUse], rank: int, stage: str) -> list[tuple[str, float]]:
    """The rank's tables by their estimated share of its time in `stage`, largest first."""
    work = {table.name: table_work(table, stage) for table in tables if table.rank == rank}
    total = sum(work.values())
    shares = [(name, part / total) for name, part in work.items() if part > 0]
    return sorted(shares, key=lambda item: -item[1])


def table_costs_ms(profile: IntervalFacts) -> dict[str, float]:
    """Estimated ms per step of each table: its owner's measured planned stages, divided by lookups and dims."""
    costs = {table.name: 0.0 for table in profile.tables}
    for rank in range(profile.world_size):
        for stage in PLANNED_STAGES:
            for name, share in shares_of_stage(profile.tables, rank, stage):
                costs[name] += share * profile.stage_ms[stage][rank]
    return costs


NOTABLE_DRIFT = 0.05
"""Part of the lookups: statistics of a few sampled batches differ by one or two hundredths by themselves."""


def drift(earlier: IntervalFacts, later: IntervalFacts) -> float:
    """Part of the values looked up that went to other tables than before: half the sum of the shares' changes."""
    shares = []
    for profile in (earlier, later):
        work: dict[str, float] = {}
        for table in profile.tables:  # or a part of one: where they are is no drift
            name = Shard.parse(table.name).table
            work[name] = work.get(name, 0.0) + table_work(table, "fwd_compute")
        total = sum(work.values()) or 1.0
        shares.append({name: part / total for name, part in work.items()})
    names = list(shares[0] | shares[1])
    before, after = ([share.get(name, 0.0) for name in names] for share in shares)
    return moved_part(before, after)


def moved_part(before: Sequence[float], after: Sequence[float]) -> float:
    """Part of the values looked up that is elsewhere, or that there was not before. Both: by table."""
    total = sum(before) + sum(after)
    return sum(abs(a - b) for a, b in zip(before, after, strict=True)) / total if total else 0.0


def stage_summary(profile: IntervalFacts) -> dict[str, dict[str, float]]:
    """Returns for each stage the slowest rank, its time, the mean, and imbalance (max / mean)."""
    return {
        stage: {
            "slowest_rank": times.index(max(times)),
            "max_ms": max(times),
            "mean_ms": sum(times) / len(times),
            "imbalance": imbalance(times),
        }
        for stage, times in profile.stage_ms.items()
    }


def waited_for(profile: IntervalFacts) -> dict[str, dict[str, float]]:
    """Returns for each collective the rank that waited least, for which the others waited, and the longest and mean
    wait."""
    return {
        name: {"rank": waits.index(min(waits)), "max_ms": max(waits), "mean_ms": sum(waits) / len(waits)}
        for name, waits in profile.wait_ms.items()
    }


def relative_spread(times: Sequence[StageTime | None]) -> float:
    """Interquartile range / median of a sum of stages, were they independent."""
    known = [time for time in times if time is not None]
    total = sum(time.median_ms for time in known)
    return math.sqrt(sum(time.iqr_ms**2 for time in known)) / total if total > 0 else 0.0
