"""The simulated race: its jobs change as they are called, decisions repeat on any machine, rules can be left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlrm_autoshard.benchmarks.race_simulated import EPOCHS, SimulatedJob, simulate, summarise
from dlrm_autoshard.benchmarks.race_worlds import WORLDS, Replayed, Scale, World, WorldName
from dlrm_autoshard.benchmarks.recorded_cluster import Disturbed, RecordedCluster
from dlrm_autoshard.config import TablesConfig, parse_config
from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.data.sources.custom import open_custom
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner

TINY = Scale(tables=5, gib=0.01, batch=32, epochs=4, steps=6, distinct=2)


@pytest.mark.parametrize("name", WORLDS)
def test_a_simulated_job_changes_what_its_name_says(name: WorldName) -> None:
    job = SimulatedJob(name, seed=0, world_size=8, num_tables=10)
    pooling = np.array([[s.mean_pooling for s in epoch] for epoch in job.stats_by_epoch])
    reuse = np.array([[s.mean_reuse for s in epoch] for epoch in job.stats_by_epoch])
    assert len(pooling) == EPOCHS and np.allclose(pooling[0], [s.mean_pooling for s in job.pool.stats])
    assert (not np.allclose(pooling, pooling[0])) == (name in ("abrupt", "gradual"))
    assert (not np.allclose(reuse, reuse[0])) == (name == "hot-ids")
    assert any(job.slowdown(epoch) for epoch in range(EPOCHS)) == (name == "straggler")


def test_a_tight_job_has_a_plan_and_not_every_one_fits() -> None:
    job = SimulatedJob("tight", 0, 8, 200)
    task = job.task(0)
    assert task.allows(Planner("size_greedy").plan(task).plan)
    assert not task.allows(ShardingPlan({table.name: i % 8 for i, table in enumerate(job.pool.tables)}, 8))


def test_noise_is_as_real_ranks_have_it() -> None:
    """Stages of one rank's step are correlated by 0.72, one in ten lies beyond three robust standard deviations."""
    disturbed = Disturbed(0, 1, real=True)
    logs = np.log([disturbed.step(np.ones((1, 4)))[0, COMPUTE] for _ in range(20_000)])
    inner = logs[np.abs(logs - np.median(logs, axis=0)).max(axis=1) < 0.09]
    assert np.corrcoef(inner.T)[0, 1] == pytest.approx(0.72, abs=0.06)
    low, middle, high = np.quantile(logs[:, 0], [0.25, 0.5, 0.75])
    assert (np.abs(logs[:, 0] - middle) > 3 * (high - low) / 1.35).mean() == pytest.approx(0.1, abs=0.03)


def test_a_seed_decides_alike_each_time_and_a_rule_that_is_left_out_is_seen() -> None:
    once = simulate("abrupt", 1, 4, 16, "real")
    assert simulate("abrupt", 1, 4, 16, "real") == pytest.approx(once)
    assert once["moves"] >= 1 and once["loop"] < once["static"] and once["oracle"] <= once["static"]
    assert simulate("abrupt", 1, 4, 16, "real", "watch") != pytest.approx(once)
    row = {"of": ["abrupt", 1, 4, 16, "real"], **once}
    assert summarise([row])["figures"]["real noise, abrupt: moves, false, refused, taken back"][0] == once["moves"]


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_changes_when_it_says_and_in_what_it_is_called_after(name: WorldName) -> None:
    world = World(name, seed=1)
    phases = [world.phase_of(epoch) for epoch in range(world.scale.epochs)]
    assert phases == sorted(phases) and phases[0] == 0 and phases[-1] == world.phases - 1
    pooled = [world.pooling(phase) for phase in phases]
    changed = any((one != other).any() for one, other in zip(pooled[1:], pooled, strict=False))
    assert changed == (name in ("abrupt", "gradual"))
    if name == "abrupt":
        assert sorted(pooled[0]) == sorted(pooled[-1])
    assert bool(world.busy_epochs) == (name == "straggler")
    assert (world.memory_gib is not None) == (name == "tight")
    assert World(name, seed=1).tables == world.tables != World(name, seed=2).tables


@pytest.mark.parametrize("name", ["gradual", "hot-ids"])
def test_its_data_are_the_phases_batches_over_and_over(name: WorldName, tmp_path: Path) -> None:
    world = World(name, seed=0, scale=TINY)
    world.draw_data(tmp_path)
    config = parse_config(world.config(tmp_path, {"enabled": False}))
    assert config.data.source == "custom"
    source = open_custom(config.data, TablesConfig())
    assert isinstance(source, Replayed)
    drawn = TINY.distinct * TINY.batch * 2
    first, again = source.read("train", 0, 32, 64), source.read("train", 0, 32 + drawn, 64 + drawn)
    assert first.values_N.equal(again.values_N) and first.lengths_TB.equal(again.lengths_TB)
    later = source.read("train", TINY.epochs - 1, 32, 64)
    assert not later.values_N.equal(first.values_N)
    if name == "hot-ids":
        assert later.lengths_TB.equal(first.lengths_TB)
    whole = source.read("train", 0, 0, drawn)
    table, start = 3, int(whole.lengths_TB[:3].sum() + whole.lengths_TB[3, :32].sum())
    begin, count = int(first.lengths_TB[:table].sum()), int(first.lengths_TB[table].sum())
    assert whole.values_N[start : start + count].equal(first.values_N[begin : begin + count])


def test_recorded_shards_cost_about_what_was_recorded_and_more_tables_cost_more() -> None:
    pool = synthetic_pool(20, seed=3, batch_size=2048)
    cluster = RecordedCluster(pool.tables, seed=0)
    few, all_of_them = (cluster.compute_ms(pool.stats, 2048, range(count)) for count in (5, 20))
    assert (few > 0).all() and (few < all_of_them).all()
    names = [table.name for table in pool.tables]
    together = ShardingPlan(dict.fromkeys(names, 0), 4)
    apart = ShardingPlan({name: i % 4 for i, name in enumerate(names)}, 4)
    assert cluster.step_ms(pool.stats, apart, 2048) < cluster.step_ms(pool.stats, together, 2048)
    before = cluster.step_ms(pool.stats, apart, 2048)
    cluster.slowdown = {2: 50.0}
    assert cluster.step_ms(pool.stats, apart, 2048) > before
