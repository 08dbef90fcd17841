"""A planner's costs when a job starts: shipped ones, what earlier jobs measured here, and a short probe of its own.

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
from dlrm_autoshard.tables import TableConfig, lookup_work

MOST_SETS, MOST_ALONE, MOST_PARTS = 64, 128, 16
PASSES = 5  # over the tables alone, at different moments
MOST_ROUNDS, STEADY_SETS = 10, 0.06
"""Times that a set is measured, at most, and noise of their mean that is small enough: where moments differ by more,
tables and sets are measured again, as long as there is time."""
MEASURING_SHARE = 0.15
"""Part of the budget that measuring tables alone may take, and as much again for fitting; the rest is for planning."""
JOB_SHARE, LEAST_SECONDS = 0.03, 4.0
"""Part of the training time (as shipped costs expect it, over the steps for which the plan serves) that a start may
take, and seconds that it may take in any case. About a third of a budget is used, if anything is measured."""
UNSEEN_MOMENTS = 0.05
"""Noise of moments where no shard was measured at two of them: twice what it was, 0.005 to 0.03, on two quiet cores."""
RANKS_ALIKE = 0.01
"""In shards that two ranks measured, what is known beforehand: that ranks are alike. Hardly more than nothing."""
MOST_FITTED, MOST_EXCHANGES = 400, 32  # samples of other tables, and exchanges, in the log that are learned from
STATS_DIFFER = 0.1  # tables whose pooling and reuse are this close to the log's are the same tables


LOG = logging.getLogger("dlrm_autoshard")

ShardTimer = Callable[[Sequence[Sequence[str]]], Sequence[ShardTime]]
"""The type of `RankProbe.measure_shards`: times of sets of tables, or parts of tables, by name."""


def cost_log(
    cache_dir: str | Path | None, task: PlacementTask, fingerprint: Mapping[str, Any], *, exchange: str
) -> CostLog | None:
    """Returns the log of the task's measured tables, where it is to be kept; exchange: how vectors travel, in words."""
    ranks = {"world_size": task.world_size, "optimizer": task.splits.optimizer, "exchange": exchange}
    return None if cache_dir is None else CostLog(Path(cache_dir), {**fingerprint, **ranks})


def keep_profiles(log: CostLog | None, planner: Planner, task: PlacementTask) -> None:
    """Keeps placements that this start has measured: what each rank's tables would have taken on the fastest rank, and
    the exchanges."""
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
    """Readies the planner's costs within about 30% of the budget; the seconds that are left of it to plan with. steps:
    for which the first plan is to serve, where that is known: with few the budget is smaller, and nothing is measured
    that would not pay in them.

    A job whose tables were each measured on this hardware before, with its optimizer, starts from the log. Else a few
    dozen shards of its own tables are measured on the running ranks: tables alone, parts of those that may be split,
    and sets as large as a rank will own. How far the moments at which a table was measured differ is the noise of all
    that was measured only once; where it is large, all are measured more often.

    Once each of the tables was measured by itself, `auto` costs them by prices and corrections alone: what other tables
    taught the networks helps nobody then (planner/DERIVATIONS.md).
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
    # An earlier start's time may have ended before each table had its turn.
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
        # Known tables need only be recalled: fewer updates, so that a second start takes less than a second.
        updates = (150 if measured else 60) if networks else 0
        planner.costs.learn(learned, updates=updates, budget_seconds=MEASURING_SHARE * budget_seconds)
    if log is not None:
        _say_left_out(log)
    return max(0.0, budget_seconds - (time.perf_counter() - begun))


def _say_left_out(log: CostLog) -> None:
    """Once."""
    if log.left_out:
        more = f" (and {len(log.left_out) - 1} more)" if len(log.left_out) > 1 else ""
        LOG.warning("cost log: %s%s", log.left_out[0], more)
        log.left_out.clear()


def measuring_pays(planner: Planner, task: PlacementTask, budget_seconds: float, steps: int | None) -> bool:
    """Whether having measured all tables would save more, on average, than measuring them takes."""
    if steps is None:
        return True
    worth_ms = worth_measuring(planner, task, budget_seconds=MEASURING_SHARE * budget_seconds)
    return steps * worth_ms / 1000 > MEASURING_SHARE * budget_seconds


def expected_seconds(planner: Planner, task: PlacementTask, steps: int) -> float:
    """Seconds of training under round robin, as far as placement decides it."""
    plan = round_robin(task.names, task.topology)
    return steps * step_cost_ms(planner.predict(task, plan)) / 1000


def calibration_shards(task: PlacementTask, seed: int) -> tuple[list[list[str]], list[list[str]]]:
    """Two kinds of shards: each table alone, and parts of the costliest that may be split, by their lookups' work; and
    sets of as many tables as a rank will own, which is what plans are made of.

    What width costs here is asked of parts, for a network that is fitted to a few widths says anything of others.
    """
    generator = np.random.default_rng(seed)
    share = max(1, round(len(task.tables) / task.world_size))

    def work(shard: TableConfig) -> float:
        return lookup_work(shard.embedding_dim, task.shard(shard.name)[1].mean_pooling)

    def heaviest(shards: Iterable[TableConfig]) -> list[TableConfig]:
        return sorted(shards, key=work, reverse=True)

    even_share = sum(map(work, task.tables)) / task.world_size
    cut = task.cut
    pieces = (piece for piece in heaviest(cut.tables) if piece.name not in task.table_bytes)
    of_use = (part for table in heaviest(cut.tables) for part in _parts_of_use(cut, table, work, even_share))
    parts = list(islice(chain(pieces, of_use), min(2 * task.world_size, MOST_PARTS)))  # to split takes its time
    sets: dict[tuple[int, ...], None] = {}
    for _ in range(MOST_SETS):
        size = int(np.clip(round(share * generator.uniform(0.5, 1.5)), 1, len(task.tables)))
        sets.setdefault(tuple(sorted(generator.choice(len(task.tables), size, replace=False).tolist())))
    alone = heaviest([*heaviest(task.tables)[:MOST_ALONE], *parts])
    return [[one.name] for one in alone], [[task.names[i] for i in one] for one in sets if len(one) > 1]


def _parts_of_use(
    task: PlacementTask, table: TableConfig, work: Callable[[TableConfig], float], even_share: float
) -> Iterator[TableConfig]:
    """Its half, and of what is still costlier than a rank's even share the half again, as far as it may be split."""
    split: PlacementTask | None = task
    part = table
    while split is not None and (part is table or work(part) > even_share):
        halves, split = split.halves(part.name), split.split(part.name)
        if halves is not None:
            part = halves[0]
            yield part


def _measured(
    alone: Sequence[Sequence[str]],
    sets: Sequence[Sequence[str]],
    measure_shards: ShardTimer,
    world_size: int,
    seconds: float,
) -> dict[tuple[str, ...], list[ShardTime]]:
    """Returns what each shard took, as if all were measured on the fastest rank, in so many seconds. Tables alone are
    measured in several passes, each by another rank than before, sets of them in one, and both once more in each
    further round, of which there are as many as the noise of moments asks for."""
    deadline = time.perf_counter() + seconds
    found: dict[tuple[str, ...], list[tuple[int, ShardTime]]] = {}

    def measure(passes: range) -> dict[tuple[str, ...], list[ShardTime]]:
        tables = [shard for number in passes for shard in _turned(alone, number, world_size)]
        more = _turned(sets, passes.start, world_size)
        _deal(found, tables, more, len(alone), measure_shards, world_size, deadline - time.perf_counter())
        return _as_if_on_one_rank(found)

    times = measure(range(PASSES))
    rounds = min(MOST_ROUNDS, round((_noise_of_moments(times.values()) / STEADY_SETS) ** 2))
    for number in range(PASSES, PASSES + rounds - 1):
        if not late(deadline):
            times = measure(range(number, number + 1))
    return times


def _turned(shards: Sequence[Sequence[str]], number: int, world_size: int) -> list[Sequence[str]]:
    """Shards in the order of a pass, in which each has the next rank."""
    begin = number * ((len(shards) - 1) % world_size) % max(1, len(shards))
    return [*shards[begin:], *shards[:begin]]


def _deal(
    found: dict[tuple[str, ...], list[tuple[int, ShardTime]]],
    passes: Sequence[Sequence[str]],
    sets: Sequence[Sequence[str]],
    first: int,
    measure_shards: ShardTimer,
    world_size: int,
    seconds: float,
) -> None:
    """Adds to what was found of each shard, with the rank that measured it. A shard a rank at a time, all of one kind,
    for ranks that measure at once wait for the slowest. Half of the time goes to each kind: a set takes as long as all
    its tables, and tells less of each, so each table has its first turn before, if need be in twice the time: one that
    was not measured is what a start knows least of. passes: over tables alone, `first` of them in each."""
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


def _as_if_on_one_rank(
    passes: Mapping[tuple[str, ...], Sequence[tuple[int, ShardTime]]],
) -> dict[tuple[str, ...], list[ShardTime]]:
    """Converts times to those of the fastest rank. A slow rank's tables would look costly, and those that it shared
    with others unsure; shards that several have measured tell how much longer each takes."""
    ranks = 1 + max((rank for seen in passes.values() for rank, _ in seen), default=0)
    information_WW, told_W = RANKS_ALIKE * np.eye(ranks), np.zeros(ranks)
    for seen in passes.values():
        by_N = np.array([rank for rank, _ in seen])
        own_NW = np.eye(ranks)[by_N]
        log_N = np.log([max(time.fwd_compute_ms + time.bwd_compute_ms, 1e-9) for _, time in seen])
        information_WW += own_NW.T @ (own_NW - own_NW.mean(axis=0))
        told_W += own_NW.T @ (log_N - log_N.mean())
    slower_W = np.linalg.solve(information_WW, told_W)
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
    """Interquartile range over median of the same shard at different moments, the median of all shards': where a
    neighbour on the machine makes all steps of a moment slow, their own spread says nothing of it."""
    again = [spread_of_times(seen) for seen in passes if len(seen) > 1]
    return float(np.median(again)) if again else UNSEEN_MOMENTS


def sample_of(task: PlacementTask, shard: Sequence[str], time: ShardTime) -> ShardSample:
    """Returns the measured sample of some of the task's tables, or parts of them."""
    tables, stats = zip(*(task.shard(name) for name in shard), strict=True)
    return ShardSample(tables, stats, task.batch_size, time.fwd_compute_ms, time.bwd_compute_ms, time.noise)


def is_about(sample: ShardSample, task: PlacementTask) -> bool:
    """Whether the sample is of the task's tables, or parts of them, with about the same statistics."""
    if sample.batch_size != task.batch_size:
        return False
    for table, seen in zip(sample.tables, sample.stats, strict=True):
        if not task.has(table):
            return False
        _, stat = task.shard(table.name)
        if not (
            np.isclose(stat.mean_pooling, seen.mean_pooling, rtol=STATS_DIFFER)
            and np.isclose(stat.mean_reuse, seen.mean_reuse, rtol=STATS_DIFFER)
        ):
            return False
    return True
