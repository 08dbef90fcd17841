"""The simulated race: its jobs change as they are called, decisions repeat on any machine, rules can be left out."""

from __future__ import annotations

import numpy as np
import pytest

from dlrm_autoshard.benchmarks.race_simulated import EPOCHS, SCENARIOS, ScenarioName, SimulatedJob, simulate, summarise
from dlrm_autoshard.benchmarks.recorded_cluster import Disturbed, RecordedCluster
from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_simulated_job_changes_what_its_name_says(name: ScenarioName) -> None:
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
