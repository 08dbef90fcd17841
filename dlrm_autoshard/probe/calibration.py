"""Prepares a planner's costs when a job starts: shipped costs, earlier jobs' measurements here, and a short probe.

log = cost_log("costs", task, fingerprint, exchange="fp32 by shared memory")
seconds_left = start_costs(planner, task, fingerprint=fingerprint, log=log, measure_shards=probe.measure_shards)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.plan import round_robin
from dlrm_autoshard.planner.candidates import LEARNED
from dlrm_autoshard.planner.costs.replay import CommsSample, ShardSample, comms_of, shards_of
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.local_search import late
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.cost_log import CostLog
from dlrm_autoshard.probe.shard_probe import ShardTime, median_time, spread_of_times
from dlrm_autoshard.probe.shipped_costs import start_warm
from dlrm_autoshard.probe.worth_measuring import worth_measuring
from dlrm_autoshard.tables import Shard, TableConfig, lookup_work

MOST_SETS, MOST_ALONE, MOST_PARTS = 64, 128, 16
PASSES = 5  # measurements of each single table, at different times
MOST_ROUNDS, STEADY_SETS = 10, 0.06
"""Most measurements of a set, and the noise of their mean that is low enough. If times vary more between measurements,
tables and sets are measured again as long as time is left."""
MEASURING_SHARE = 0.15
"""Fraction of the budget for measuring single tables, and again for fitting; the rest is for planning."""
JOB_SHARE, LEAST_SECONDS = 0.03, 4.0
"""Fraction of the training time (predicted by shipped costs, over the steps that the plan serves) that a start may
take, and seconds that it may take in any case. About a third of the budget is used if anything is measured."""
UNSEEN_MOMENTS = 0.05
"""Noise between measurements if no shard was measured twice: twice the 0.005 to 0.03 seen on two quiet cores."""
RANKS_ALIKE = 0.01
"""Weak prior that ranks are equally fast, as a number of shards measured on two ranks."""
MOST_FITTED, MOST_EXCHANGES = 400, 32  # most logged samples of other tables, and most exchanges, to learn from
STATS_DIFFER = 0.1  # tables are the same as the log's if pooling and reuse differ by less than this fraction


LOG = logging.getLogger("dlrm_autoshard")

ShardTimer = Callable[[Sequence[Sequence[Shard]]], Sequence[ShardTime]]
"""Type of `RankProbe.measure_shards`: sets of tables or column shards, by name -> their times."""


def cost_log(
    cache_dir: str | Path | None, task: PlacementTask, fingerprint: Mapping[str, Any], *, exchange: str
) -> CostLog | None:
    """Returns the log of this hardware, task and optimizer; None without a cache_dir. exchange: its transport, in
    words."""
    ranks = {"world_size": task.world_size, "optimizer": task.splits.optimizer, "exchange": exchange}
    return None if cache_dir is None else CostLog(Path(cache_dir), {**fingerprint, **ranks})


def keep_profiles(log: CostLog | None, planner: Planner, task: PlacementTask) -> None:
    """Logs the plans that this start measured: each rank's compute as if on the fastest rank, and the exchanges."""
    if log is None or not planner.costs.replay.profiles:
        return
    slower_W, samples = planner.rank_slowness(task.world_size), list[ShardSample | CommsSample]()
    for profile in planner.costs.replay.profiles:
        ranks = tuple(
            replace(cost, fwd_compute_ms=cost.fwd_compute_ms / times, bwd_compute_ms=cost.bwd_compute_ms / times)
            for cost, times in zip(profile.ranks, (slower_W / slower_W.min()).tolist(), strict=True)
        )
        placed = replace(profile, ranks=ranks, hosts=task.topology.hosts)
        samples += [*shards_of(placed), comms_of(placed)]
    log.append(samples)
    _say_left_out(log)


def start_costs(
    planner: Planner,
    task: PlacementTask,
    *,
    fingerprint: Mapping[str, Any],
    measure_shards: ShardTimer | None = None,
    log: CostLog | None = None,
    budget_seconds: float = 20.0,
    steps: int | None = None,
    seed: int = 0,
) -> float:
    """Prepares the planner's costs and returns the seconds left for planning. Takes about 30% of the budget.

    steps: that the first plan serves, if known. Few steps shrink the budget, and measurements that would not pay for
    themselves in them are skipped.
    that would not pay in them.

    If every table was measured on this hardware with this optimizer before, the log suffices. Otherwise a few dozen
    shards are measured on the running ranks: single tables, column shards of tables that may be split, and sets as
    large as a rank will own. How far repeated measurements of a table differ is taken as the noise of single ones; if
    it is large, everything is measured more often.

    Once every table was measured alone, `auto` predicts by prices and corrections only, without the cost networks,
    which then add nothing (planner/DERIVATIONS.md).
    """
    begun = time.perf_counter()
    start_warm(planner, fingerprint, task.splits.optimizer)
    if steps is not None:
        budget_seconds = min(budget_seconds, max(LEAST_SECONDS, JOB_SHARE * expected_seconds(planner, task, steps)))
    every = [] if log is None else log.read()
    logged = [sample for sample in every if isinstance(sample, ShardSample)]
    exchanges = [one for one in every if isinstance(one, CommsSample) and one.hosts == task.topology.hosts]
    known = [sample for sample in logged if is_about(sample, task)]
    measured: list[ShardSample] = []
    wanted = calibration_shards(task, seed)
    # An earlier start may have run out of time before it measured each table.
    have = {frozenset(table.name for table in sample.tables) for sample in known}
    unknown = any(frozenset(shard) not in have for shard in wanted[0])
    if measure_shards is not None and unknown and measuring_pays(planner, task, budget_seconds, steps):
        alone, sets = ([s for s in kind if frozenset(s) not in have] for kind in wanted)
        passes = _measured(alone, sets, measure_shards, task.world_size, MEASURING_SHARE * budget_seconds)
        moments = _noise_of_moments(passes.values())
        for shard, seen in passes.items():
            one = median_time(seen)
            measured.append(sample_of(task, shard, replace(one, noise=max(one.noise, moments) / len(seen) ** 0.5)))
        if log is not None:
            log.append(measured)
    taken = set(map(id, known))
    others = [sample for sample in logged if id(sample) not in taken] if measured else []
    alone_known, sets_known = ([s for s in known if (len(s.tables) == 1) == kind] for kind in (True, False))
    shards = [*others[-MOST_FITTED:], *sets_known[-MOST_SETS:], *alone_known[-(MOST_ALONE + MOST_PARTS) :], *measured]
    learned: list[ShardSample | CommsSample] = [*shards, *exchanges[-MOST_EXCHANGES:]]
    if learned:
        by_themselves = {sample.tables[0].name for sample in shards if len(sample.tables) == 1}
        networks = planner.algorithm in LEARNED or not by_themselves.issuperset(task.names)
        if not networks:
            planner.costs.cost_model.prices_alone()
        # Known tables need fewer updates, so that a second start takes less than a second.
        updates = (150 if measured else 60) if networks else 0
        planner.costs.learn(learned, updates=updates, budget_seconds=MEASURING_SHARE * budget_seconds)
    if log is not None:
        _say_left_out(log)
    return max(0.0, budget_seconds - (time.perf_counter() - begun))


def _say_left_out(log: CostLog) -> None:
    """Warns once about lines of the log that could not be used."""
    if log.left_out:
        more = f" (and {len(log.left_out) - 1} more)" if len(log.left_out) > 1 else ""
        LOG.warning("cost log: %s%s", log.left_out[0], more)
        log.left_out.clear()


def measuring_pays(planner: Planner, task: PlacementTask, budget_seconds: float, steps: int | None) -> bool:
    """Returns whether measuring all tables would save more time on average than it takes."""
    if steps is None:
        return True
    worth_ms = worth_measuring(planner, task, budget_seconds=MEASURING_SHARE * budget_seconds)
    return steps * worth_ms / 1000 > MEASURING_SHARE * budget_seconds


def expected_seconds(planner: Planner, task: PlacementTask, steps: int) -> float:
    """Returns the predicted seconds of the planned stages over `steps` steps under a round-robin plan."""
    plan = round_robin(task.names, task.topology)
    return steps * step_cost_ms(planner.predict(task, plan)) / 1000


def calibration_shards(task: PlacementTask, seed: int) -> tuple[list[list[Shard]], list[list[Shard]]]:
    """Returns two lists of shards to measure: single ones, costliest first, and sets of as many tables as a rank will
    own.

    Single ones are each table and column shards of the costliest that may be split. Shards are measured because the
    network was fitted to a few widths and is unreliable at others.
    """
    generator = np.random.default_rng(seed)
    share = max(1, round(len(task.tables) / task.world_size))

    def work(shard: TableConfig) -> float:
        return lookup_work(shard.embedding_dim, task.shard(shard.shard)[1].mean_pooling)

    def costliest(shards: Iterable[TableConfig]) -> list[TableConfig]:
        return sorted(shards, key=work, reverse=True)

    even_share = sum(map(work, task.tables)) / task.world_size
    cut = task.cut
    pieces = (piece for piece in costliest(cut.tables) if piece.name not in task.table_bytes)
    useful = (part for table in costliest(cut.tables) for part in _useful_parts(cut, table, work, even_share))
    parts = list(islice(chain(pieces, useful), min(2 * task.world_size, MOST_PARTS)))  # lazily: splitting takes time
    sets: dict[tuple[int, ...], None] = {}
    for _ in range(MOST_SETS):
        size = int(np.clip(round(share * generator.uniform(0.5, 1.5)), 1, len(task.tables)))
        sets.setdefault(tuple(sorted(generator.choice(len(task.tables), size, replace=False).tolist())))
    alone = costliest([*costliest(task.tables)[:MOST_ALONE], *parts])
    return [[one.shard] for one in alone], [[task.names[i] for i in one] for one in sets if len(one) > 1]


def _useful_parts(
    task: PlacementTask, table: TableConfig, work: Callable[[TableConfig], float], even_share: float
) -> Iterator[TableConfig]:
    """Yields half of the table, then halves of that half while it costs more than a rank's even share."""
    split: PlacementTask | None = task
    part = table
    while split is not None and (part is table or work(part) > even_share):
        halves, split = split.halves(part.shard), split.split(part.shard)
        if halves is not None:
            part = halves[0]
            yield part


def _measured(
    alone: Sequence[Sequence[Shard]],
    sets: Sequence[Sequence[Shard]],
    measure_shards: ShardTimer,
    world_size: int,
    seconds: float,
) -> dict[tuple[Shard, ...], list[ShardTime]]:
    """Returns each shard's times, converted to the fastest rank, within `seconds`.

    Single tables are measured PASSES times on different ranks, sets once; both again in further rounds, whose number
    depends on the noise."""
    deadline = time.perf_counter() + seconds
    found: dict[tuple[Shard, ...], list[tuple[int, ShardTime]]] = {}

    def measure(passes: range) -> dict[tuple[Shard, ...], list[ShardTime]]:
        tables = [shard for number in passes for shard in _rotated(alone, number, world_size)]
        more = _rotated(sets, passes.start, world_size)
        _deal(found, tables, more, len(alone), measure_shards, world_size, deadline - time.perf_counter())
        return _on_fastest_rank(found)

    times = measure(range(PASSES))
    rounds = min(MOST_ROUNDS, round((_noise_of_moments(times.values()) / STEADY_SETS) ** 2))
    for number in range(PASSES, PASSES + rounds - 1):
        if not late(deadline):
            times = measure(range(number, number + 1))
    return times


def _rotated(shards: Sequence[Sequence[Shard]], number: int, world_size: int) -> list[Sequence[Shard]]:
    """Returns the shards in the order of a pass: each pass gives every shard another rank."""
    begin = number * ((len(shards) - 1) % world_size) % max(1, len(shards))
    return [*shards[begin:], *shards[:begin]]


def _deal(
    found: dict[tuple[Shard, ...], list[tuple[int, ShardTime]]],
    passes: Sequence[Sequence[Shard]],
    sets: Sequence[Sequence[Shard]],
    first: int,
    measure_shards: ShardTimer,
    world_size: int,
    seconds: float,
) -> None:
    """Measures shards and appends (rank, time) to `found`.

    One shard per rank at a time, all of one kind, because ranks that measure together wait for the slowest. Single
    tables and sets share the time equally: a set takes as long as its tables together and says less about each. Every
    table's first measurement comes before any set, if need be in twice the time, because an unmeasured table is the
    largest unknown. passes: single tables, `first` of them per pass."""
    deadline = time.perf_counter() + seconds
    queues, spent = (deque(passes), deque(sets)), [0.0, 0.0]
    while any(queues):
        first_turns = len(queues[0]) > len(passes) - first
        if late(deadline + seconds if first_turns else deadline):
            break
        kinds = [0] if first_turns else [number for number, queue in enumerate(queues) if queue]
        kind = min(kinds, key=spent.__getitem__)
        dealt = [queues[kind].popleft() for _ in range(min(world_size, len(queues[kind])))]
        begun = time.perf_counter()
        for rank, (shard, seen) in enumerate(zip(dealt, measure_shards(dealt), strict=True)):
            found.setdefault(tuple(shard), []).append((rank, seen))
        spent[kind] += time.perf_counter() - begun


def _on_fastest_rank(
    passes: Mapping[tuple[Shard, ...], Sequence[tuple[int, ShardTime]]],
) -> dict[tuple[Shard, ...], list[ShardTime]]:
    """Converts times to those of the fastest rank; shards measured on several ranks tell how much slower each rank is.

    Otherwise a slow rank's tables would look costly, and shards measured on several ranks noisy."""
    ranks = 1 + max((rank for seen in passes.values() for rank, _ in seen), default=0)
    information_WW, seen_W = RANKS_ALIKE * np.eye(ranks), np.zeros(ranks)
    for seen in passes.values():
        by_N = np.array([rank for rank, _ in seen])
        own_NW = np.eye(ranks)[by_N]
        log_N = np.log([max(time.fwd_compute_ms + time.bwd_compute_ms, 1e-9) for _, time in seen])
        information_WW += own_NW.T @ (own_NW - own_NW.mean(axis=0))
        seen_W += own_NW.T @ (log_N - log_N.mean())
    slower_W = np.linalg.solve(information_WW, seen_W)
    times_W = np.exp(slower_W - slower_W.min())
    return {
        shard: [
            replace(
                time,
                fwd_compute_ms=float(time.fwd_compute_ms / times_W[rank]),
                bwd_compute_ms=float(time.bwd_compute_ms / times_W[rank]),
            )
            for rank, time in seen
        ]
        for shard, seen in passes.items()
    }


def _noise_of_moments(passes: Iterable[Sequence[ShardTime]]) -> float:
    """Returns the median over shards of interquartile range / median of their repeated measurements.

    A busy machine can slow all steps of one measurement, so the steps' own spread does not show this."""
    again = [spread_of_times(seen) for seen in passes if len(seen) > 1]
    return float(np.median(again)) if again else UNSEEN_MOMENTS


def sample_of(task: PlacementTask, shard: Sequence[Shard], time: ShardTime) -> ShardSample:
    """Makes the sample of a measured set of the task's tables or column shards."""
    tables, stats = zip(*(task.shard(name) for name in shard), strict=True)
    return ShardSample(tables, stats, task.batch_size, time.fwd_compute_ms, time.bwd_compute_ms, time.noise)


def is_about(sample: ShardSample, task: PlacementTask) -> bool:
    """Returns whether a sample is of the task's tables or their shards, with about the same statistics."""
    if sample.batch_size != task.batch_size:
        return False
    for table, seen in zip(sample.tables, sample.stats, strict=True):
        if not task.has(table):
            return False
        _, stat = task.shard(table.shard)
        if not (
            np.isclose(stat.mean_pooling, seen.mean_pooling, rtol=STATS_DIFFER)
            and np.isclose(stat.mean_reuse, seen.mean_reuse, rtol=STATS_DIFFER)
        ):
            return False
    return True
