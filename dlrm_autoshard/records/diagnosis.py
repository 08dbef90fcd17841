"""Diagnoses an interval: which rank is the bottleneck, in which stage, why, and which tables cause it.

straggler = find_straggler(profile)
straggler.rank, straggler.stage, straggler.cause     # 1, "fwd_compute", "load"
straggler.tables                                     # (("ad_id", 0.61), ("user", 0.22))
straggler.sentence                                   # the same in words
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

# Pure arithmetic on a profile. A rank's *excess* in a stage is its time minus the mean over ranks. The other ranks wait
# that long for it at the next collective.

Cause = Literal["load", "starved of CPU", "slow data"]

NOTABLE_EXCESS = 0.03
"""Fraction of the step: smaller differences between ranks are not reported as a straggler."""
NINETY = 1.64
"""Half-width of a 90% normal interval, in standard deviations."""
NEARLY_ALL = 0.8
"""Fraction of a rank's time in its slowest stage above which a single table limits every plan."""
STARVED_BELOW = 0.9
"""CPU time / wall time below which a rank was sharing its core with other work."""


@dataclass(frozen=True)
class Straggler:
    """The rank that costs the other ranks the most waiting time, beyond measurement noise.

    excess_ms: what a step would save if this rank took the mean time in the stages where it is significantly the
    slowest; low_ms, high_ms: its 90% interval. stage: the stage with most of the excess. tables: the rank's costliest
    tables with their share of its time in that stage, estimated from lookups and dims (tables are not timed one by
    one); empty if tables are not the cause.
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
        """The cause and its cost in a few words."""
        cost = f"{self.excess_ms:.3g} ms a step ({self.low_ms:.3g} to {self.high_ms:.3g})"
        if self.cause == "starved of CPU":
            return f"got only {self.cpu_share or 0:.0%} of its CPU core: costs {cost}"
        return f"waits for data: {cost}" if self.cause == "slow data" else f"too much {self.stage}: costs {cost}"

    @property
    def sentence(self) -> str:
        cost = (
            f"rank {self.rank} makes the others wait {self.excess_ms:.3g} ms a step ({self.low_ms:.3g} to "
            f"{self.high_ms:.3g}), mostly in {self.stage} ({self.stage_ms:.3g} ms; the mean over ranks is "
            f"{self.stage_mean_ms:.3g})"
        )
        if self.cause == "starved of CPU":
            return (
                f"{cost}: it got only {self.cpu_share or 0:.0%} of its CPU core, because another process uses that "
                "core. Its tables are not the cause."
            )
        if self.cause == "slow data":
            return f"{cost}: it waits for its next batch. Raise data.reader_threads or check that host's disk."
        if not self.tables:
            return f"{cost}. Its tables are not the cause."
        named = ", ".join(f"'{name}' ({share:.0%})" for name, share in self.tables)
        return f"{cost}: too much work, estimated to be mostly {named}{alone_limits(self.tables)}."

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tables": [[name, share] for name, share in self.tables], "sentence": self.sentence}


MOST_NAMED = 3
"""Tables named for an overloaded rank."""


def find_straggler(profile: IntervalFacts) -> Straggler | None:
    """Returns the straggler; None with one rank, nearly even ranks, or too few sampled steps to tell.

    A stage counts if its slowest rank is significantly above the mean: 5% false positives over all stages and ranks
    together (Bonferroni).
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
    """Returns the standard error, in ms, of a rank's excess in a stage; infinite if unknown."""
    errors = profile.error_ms.get(stage)
    if errors is None:
        return math.inf
    others = sum(error**2 for error in errors) - errors[rank] ** 2
    return math.sqrt((errors[rank] * (1 - 1 / len(errors))) ** 2 + others / len(errors) ** 2)


def describe_straggler(profile: IntervalFacts) -> str | None:
    """Returns one sentence on the slowest rank and its cause, used by the terminal, the page and `explain`; None with
    one rank or no sampled steps."""
    if profile.world_size == 1 or profile.samples == 0:
        return None
    straggler = find_straggler(profile)
    if straggler is not None:
        return straggler.sentence[0].upper() + straggler.sentence[1:]
    apart = sum(max(times) - sum(times) / len(times) for times in profile.stage_ms.values())
    if apart < NOTABLE_EXCESS * profile.step_ms:
        return "No rank slows the others: ranks differ by less than 3% of the step."
    return (
        f"No rank is significantly slower: over {count(profile.samples, 'sampled step')} the differences between ranks "
        "are within noise."
    )


def alone_limits(tables: Sequence[tuple[str, float]]) -> str:
    """Returns the end of a sentence if the first table takes nearly all of its rank's slowest stage, else "".

    tables: name and share of the stage, largest first."""
    if not tables or tables[0][1] <= NEARLY_ALL:
        return ""
    if Shard(tables[0][0]).columns is None:
        return ". This table alone limits the plan unless it is split over ranks"
    return ". This shard alone limits the plan unless it is split further"


@dataclass(frozen=True)
class Balance:
    """Fraction of a step that perfect balance of the planned stages would save, with its 90% interval."""

    gain: float
    low: float
    high: float

    def sentence(self, when: str, samples: int) -> str:
        steps = count(samples, "sampled step")
        if not math.isfinite(self.low):
            return f"In {when} {steps} are too few to tell what perfect balance would have saved."
        if self.low <= 0:
            most = f"at most {max(0.0, self.high):.1%} of a step"
            return f"In {when} perfect balance would have saved nothing beyond the noise of {steps} ({most})."
        return f"In {when} perfect balance would have saved {interval_in_words(*astuple(self))} of a step."


def balance_of(profile: IntervalFacts, gain: float | None = None) -> Balance:
    """Returns the balance of an interval. gain: the estimate that the decision used, which accounts for ranks' speeds;
    by default the profile's own."""
    gain = profile.balance_gain if gain is None else gain
    slowest = {stage: times.index(max(times)) for stage, times in profile.stage_ms.items()}
    variance = sum(error_of_excess(profile, stage, slowest[stage]) ** 2 for stage in PLANNED_STAGES)
    margin = NINETY * math.sqrt(variance) / max(profile.mean_step_ms, 1e-9)
    return Balance(gain, gain - margin, gain + margin)


def _is_starved(profile: IntervalFacts, rank: int) -> bool:
    """Returns whether CPU contention, not load, explains most of a rank's excess.

    CPU times are compared at the mean CPU share: if all ranks are starved equally, load explains the difference.
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
    """Returns a table's relative work in a stage: comparable between tables within that stage only."""
    if stage in ("fwd_compute", "bwd_compute"):
        return lookup_work(table.embedding_dim, table.mean_pooling)
    if stage in ("fwd_comms", "bwd_comms"):
        return float(table.embedding_dim * table.features)  # one pooled vector per sample and feature
    if stage == "input_dist":
        return table.mean_pooling  # ids per sample
    return 0.0


def shares_of_stage(tables: Sequence[TableUse], rank: int, stage: str) -> list[tuple[str, float]]:
    """Returns the rank's tables with their estimated share of its time in `stage`, largest first."""
    work = {table.name: table_work(table, stage) for table in tables if table.rank == rank}
    total = sum(work.values())
    shares = [(name, part / total) for name, part in work.items() if part > 0]
    return sorted(shares, key=lambda item: -item[1])


def table_costs_ms(profile: IntervalFacts) -> dict[str, float]:
    """Returns each table's estimated ms per step: its owner's planned stages, divided in proportion to work."""
    costs = {table.name: 0.0 for table in profile.tables}
    for rank in range(profile.world_size):
        for stage in PLANNED_STAGES:
            for name, share in shares_of_stage(profile.tables, rank, stage):
                costs[name] += share * profile.stage_ms[stage][rank]
    return costs


NOTABLE_DRIFT = 0.05
"""Fraction of lookups; sampling noise alone is one or two percent."""


def drift(earlier: IntervalFacts, later: IntervalFacts) -> float:
    """Returns the fraction of lookups that shifted between tables: half the sum of absolute changes in share."""
    shares = []
    for profile in (earlier, later):
        work: dict[str, float] = {}
        for table in profile.tables:  # shards are summed by table: placement is not drift
            name = table.shard.table
            work[name] = work.get(name, 0.0) + table_work(table, "fwd_compute")
        total = sum(work.values()) or 1.0
        shares.append({name: part / total for name, part in work.items()})
    names = list(shares[0] | shares[1])
    before, after = ([share.get(name, 0.0) for name in names] for share in shares)
    return moved_part(before, after)


def moved_part(before: Sequence[float], after: Sequence[float]) -> float:
    """Returns the fraction of lookups that shifted between tables or are new. before, after: lookups by table."""
    total = sum(before) + sum(after)
    return sum(abs(a - b) for a, b in zip(before, after, strict=True)) / total if total else 0.0


def stage_summary(profile: IntervalFacts) -> dict[str, dict[str, float]]:
    """Returns slowest rank, its time, mean time and imbalance (max / mean) of each stage."""
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
    """Returns for each collective the last rank to arrive (it waited least), and the longest and mean wait."""
    return {
        name: {"rank": waits.index(min(waits)), "max_ms": max(waits), "mean_ms": sum(waits) / len(waits)}
        for name, waits in profile.wait_ms.items()
    }


def relative_spread(times: Sequence[StageTime | None]) -> float:
    """Returns interquartile range / median of a sum of stages, taking them as independent."""
    known = [time for time in times if time is not None]
    total = sum(time.median_ms for time in known)
    return math.sqrt(sum(time.iqr_ms**2 for time in known)) / total if total > 0 else 0.0
