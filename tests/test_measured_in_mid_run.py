"""Tables whose data have changed, measured alone in mid-run: where a move depends on what is not known of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dlrm_autoshard.costs import RankCost, StepProfile
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.moves.proposals import once_measured
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import sample_of
from dlrm_autoshard.probe.mid_run import Unmeasured, learn_changed, unmeasured
from dlrm_autoshard.probe.shard_probe import ShardTime
from dlrm_autoshard.tables import TableConfig, TableStats

TABLES = [TableConfig(f"t{i}", 100_000, 64) for i in range(6)]
START = [TableStats(20.0, batch_size=1024) for _ in TABLES]
PLAN = ShardingPlan({table.name: i // 3 for i, table in enumerate(TABLES)}, 2)


def task_of(stats: Sequence[TableStats]) -> PlacementTask:
    return PlacementTask.build(TABLES, list(stats), Topology(2), batch_size=1024)


class Ranks:
    """Take `ms` for a table alone, `slow` times that in the moment in which they are asked."""

    def __init__(self, ms: dict[str, float], slow: float = 1.0) -> None:
        self.ms, self.slow, self.asked = ms, slow, list[str]()

    def __call__(self, shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        self.asked += [name for [name] in shards]
        return [ShardTime(self.slow * self.ms[name], 2 * self.slow * self.ms[name], 0.01, 3) for [name] in shards]


class Slowly:
    """Ranks that take 20 ms to answer."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        time.sleep(0.02)
        return self.ranks(shards)


def started() -> Planner:
    """Every table was measured with the data of the start: 2 ms forward, 4 ms backward."""
    planner, task = Planner("auto"), task_of(START)
    planner.costs.observe_shards([sample_of(task, [t.name], ShardTime(2.0, 4.0, 0.01, 3)) for t in TABLES])
    return planner


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_how_changed_tables_compare_is_learned_and_not_how_slow_the_moment_was(slow: float) -> None:
    """Lookups of two tables of one rank have become three times as many: one takes four times as long as it did, the
    other twice; what their rank takes does not tell that."""
    stats = [replace(stat, mean_pooling=60.0) if i < 2 else stat for i, stat in enumerate(START)]
    planner, task = started(), task_of(stats)
    costs = RankCost(14.0, 1.0, 1.0, 28.0), RankCost(6.0, 1.0, 1.0, 12.0)
    planner.costs.observe(StepProfile(PLAN, task.tables, task.stats, task.batch_size, costs, "measured", 0.01))
    before = planner.costs.costs_of(task).alone_ms()
    assert before[0] == pytest.approx(before[1])
    ranks = Ranks({"t0": 8.0, "t1": 4.0}, slow)
    unknown = unmeasured(planner, task, PLAN)
    assert learn_changed(planner, task, PLAN, ranks, unknown) == ["t0", "t1"] == ranks.asked == unknown.names
    after = planner.costs.costs_of(task).alone_ms()
    assert after[0] / after[1] == pytest.approx(2.0, rel=0.15)
    assert after[:2].sum() == pytest.approx(before[:2].sum(), rel=0.1)
    assert after[2:] == pytest.approx(before[2:], rel=0.1)


@pytest.mark.parametrize("slow", [1.5, 2.0])
def test_what_a_slow_rank_measures_is_not_dearer_for_that(slow: float) -> None:
    """Tables are dealt to ranks; each is measured by one of them."""
    stats = [replace(stat, mean_pooling=60.0) for stat in START]
    planner, task = started(), task_of(stats)
    costs = RankCost(18.0, 1.0, 1.0, 36.0), RankCost(18.0 * slow, 1.0, 1.0, 36.0 * slow)
    profile = StepProfile(PLAN, task.tables, task.stats, task.batch_size, costs, "measured", 0.01)
    for _ in range(4):
        planner.costs.observe(profile)

    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        return [ShardTime(6.0 * (slow if rank else 1), 12.0 * (slow if rank else 1), 0.01, 3) for rank in (0, 1)]

    learn_changed(planner, task, PLAN, measure, unmeasured(planner, task, PLAN))
    ms = planner.costs.costs_of(task).alone_ms()
    assert ms.max() / ms.min() < 1.1


def test_each_is_asked_once_the_dearest_first_and_within_twice_the_time() -> None:
    stats = [replace(stat, mean_pooling=20.0 * (i + 2)) for i, stat in enumerate(START)]
    planner, task = started(), task_of(stats)
    ranks = Ranks({table.name: 4.0 for table in TABLES})
    unknown = unmeasured(planner, task, PLAN)
    assert unknown.names == [f"t{5 - i}" for i in range(6)]
    few = learn_changed(planner, task, PLAN, Slowly(ranks), replace(unknown, seconds=0.01))
    assert few == ["t5", "t4"]  # one round, and the time was over
    rest = unmeasured(planner, task, PLAN)
    assert sorted(rest.names) == ["t0", "t1", "t2", "t3"] and rest.seconds < unknown.seconds
    assert learn_changed(planner, task, PLAN, ranks, rest) == rest.names
    assert unmeasured(planner, task, PLAN).names == []  # known by now
    assert unmeasured(started(), task_of(START), PLAN).names == []  # and what did not change


def test_a_single_table_is_not_asked_for_there_is_nothing_to_compare_it_with() -> None:
    """Else it would be measured after each interval, and nothing be learned of it."""
    stats = [replace(stat, mean_pooling=60.0) if i == 0 else stat for i, stat in enumerate(START)]
    planner, task = started(), task_of(stats)
    assert unmeasured(planner, task, PLAN) == Unmeasured([], 0.0)


def test_where_a_rank_is_slow_all_wait_for_it() -> None:
    """Ranks measure at once: that takes as long as the slowest."""
    stats = [replace(stat, mean_pooling=60.0) for stat in START]
    task, seconds = task_of(stats), []
    for slow in (1.0, 3.0):
        planner = started()
        costs = RankCost(6.0, 1.0, 1.0, 12.0), RankCost(6.0 * slow, 1.0, 1.0, 12.0 * slow)
        planner.costs.observe(StepProfile(PLAN, task.tables, task.stats, task.batch_size, costs, "measured", 0.01))
        seconds.append(unmeasured(planner, task, PLAN).seconds)
    assert 2.0 < seconds[1] / seconds[0] < 4.0


def test_how_much_surer_measuring_makes_gains_is_known_before() -> None:
    """Gains' variance before is what measuring tells and what it leaves open, whatever is measured."""
    stats = [replace(stat, mean_pooling=60.0) if i < 4 else stat for i, stat in enumerate(START)]
    planner, task = started(), task_of(stats)
    costs = RankCost(14.0, 1.0, 1.0, 28.0), RankCost(9.0, 1.0, 1.0, 18.0)
    planner.costs.observe(StepProfile(PLAN, task.tables, task.stats, task.batch_size, costs, "measured", 0.01))
    other = ShardingPlan({**PLAN.rank_of, "t0": 1, "t5": 0}, 2)
    unknown = unmeasured(planner, task, PLAN)
    [before], told = planner.gains(task, PLAN, [other]), planner.gains_once_measured(task, PLAN, [other], unknown.names)
    assert planner.gains_once_measured(task, PLAN, [other], []).std() == pytest.approx(0.0)
    ranks = Ranks({table.name: 4.0 for table in TABLES})
    learn_changed(planner, task, PLAN, ranks, unknown)
    [after] = planner.gains(task, PLAN, [other])
    assert told.mean() == pytest.approx(before.mean, abs=0.02) and 0.5 * before.std < told.std() < before.std
    assert after.std**2 == pytest.approx(before.std**2 - told.std() ** 2, rel=0.7) and after.std < 0.75 * before.std


def test_where_a_rank_has_no_memory_for_it_predictions_have_to_do() -> None:
    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        raise UserError("rank 1 could not measure its shard: no memory")

    stats = [replace(stat, mean_pooling=60.0) for stat in START]
    assert learn_changed(started(), task_of(stats), PLAN, measure, Unmeasured(["t0", "t1"], 9.0)) == []


def test_draws_of_what_measuring_may_show_leave_what_steps_have_told() -> None:
    """Which of a rank's changed tables is dear is open; what they take in all was measured."""
    stats = [replace(stat, mean_pooling=60.0) for stat in START]
    planner, task = started(), task_of(stats)
    costs = RankCost(18.0, 1.0, 1.0, 36.0), RankCost(18.0, 1.0, 1.0, 36.0)
    planner.costs.observe(StepProfile(PLAN, task.tables, task.stats, task.batch_size, costs, "measured", 0.01))
    unknown = unmeasured(planner, task, PLAN)
    drawn = planner.costs.drawn(task, unknown.names, 32)
    live_U = task.ranks_from(PLAN)
    tables = np.array([one.alone_ms() for one in drawn])
    steps = np.array([one.step_ms(live_U) for one in drawn])
    assert tables.std(axis=0).mean() / tables.mean() > 3 * steps.std() / steps.mean() > 0.0
    assert steps.mean() == pytest.approx(planner.costs.costs_of(task).step_ms(live_U), rel=0.05)
    found = once_measured(planner.costs, task, PLAN, unknown.names, ms_per_byte=0.0, deadline=None)
    assert all(gain >= -1e-9 for _, gain in found) and max(gain for _, gain in found) > 0.0
    learn_changed(planner, task, PLAN, Ranks({table.name: 6.0 for table in TABLES}), unknown)
    known = planner.costs.drawn(task, unknown.names, 32)
    assert np.std([one.alone_ms() for one in known], axis=0).mean() < 0.6 * tables.std(axis=0).mean()
