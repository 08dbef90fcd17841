"""Costs at a start: shipped ones, the cost log of earlier jobs, and what is measured of a job's own tables."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.benchmarks.cost_oracle import CostOracle
from dlrm_autoshard.benchmarks.recorded_cluster import RecordedCluster
from dlrm_autoshard.costs import COMPUTE, RankCost, StepProfile, step_cost_ms
from dlrm_autoshard.data.sources.criteo.sample import MULTI_HOT_SIZES
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.costs.replay import CommsSample, ShardSample, comms_of
from dlrm_autoshard.planner.dreamshard.pool import TablePool, synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.probe import calibration
from dlrm_autoshard.probe.calibration import (
    LEAST_SECONDS,
    MEASURING_SHARE,
    MOST_ROUNDS,
    PASSES,
    UNSEEN_MOMENTS,
    calibration_shards,
    expected_seconds,
    keep_profiles,
    start_costs,
)
from dlrm_autoshard.probe.cost_log import CostLog
from dlrm_autoshard.probe.shard_probe import ShardTime
from dlrm_autoshard.probe.shipped_costs import SHIPPED, most_alike, read_samples, start_warm, write_samples
from dlrm_autoshard.probe.simulator import SimulatedCluster
from dlrm_autoshard.tables import Shard, TableConfig, TableOptimizer, TableStats

MACHINE = {"device": "cpu", "processor": "a test", "fbgemm": "1.8.0"}


def _named(pool: TablePool, names: Sequence[str]) -> TablePool:
    return pool.chosen(i for i, table in enumerate(pool.tables) if table.name in names)


def _samples(count: int, num_tables: int = 6) -> list[ShardSample]:
    pool, cluster = synthetic_pool(num_tables, seed=1, batch_size=256), SimulatedCluster(0)
    samples = []
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256)
    for shard in itertools.islice(itertools.chain(*calibration_shards(task, seed=0)), count):
        part = _named(pool, shard)
        plan = ShardingPlan({table.name: 0 for table in part.tables}, 1)
        [cost] = cluster.profile(part.tables, part.stats, plan, 256).ranks
        samples.append(ShardSample(part.tables, part.stats, 256, cost.fwd_compute_ms, cost.bwd_compute_ms, 0.01))
    return samples


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("num_tables", [16, 17, 21, 26])
def test_each_table_alone_is_measured_by_several_ranks(num_tables: int, world_size: int) -> None:
    """What is measured by a slow one alone looks costly."""
    pool = synthetic_pool(num_tables, seed=1, batch_size=256)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(world_size), batch_size=256)
    ranks_of: dict[str, set[int]] = {name: set() for name in task.names}

    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        for rank, shard in enumerate(shards):
            if len(shard) == 1:
                ranks_of[shard[0]].add(rank)
        return [ShardTime(1.0, 2.0, 0.01, 3) for _ in shards]

    start_costs(Planner(), task, fingerprint=MACHINE, measure_shards=measure)
    assert min(map(len, ranks_of.values())) >= 2


def test_only_those_parts_are_made_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of 400 tables some halves, for 8 that are kept: it grew with the square of the tables."""
    pool, made = synthetic_pool(400, seed=1, batch_size=256), list[str]()
    task = PlacementTask.build(
        pool.tables, pool.stats, Topology(4), batch_size=256, splits=Splits(max_parts=4, min_dim=4)
    )
    split = PlacementTask.split

    def heard(self: PlacementTask, name: Shard) -> PlacementTask | None:
        made.append(name)
        return split(self, name)

    monkeypatch.setattr(PlacementTask, "split", heard)
    alone, _ = calibration_shards(task, seed=0)
    assert sum(1 for [name] in alone if "[" in name) == 8 and len(made) <= 9


def test_the_cost_log_gives_back_what_was_appended_and_skips_what_a_killed_job_left(tmp_path: Path) -> None:
    samples: list[ShardSample | CommsSample] = [
        *_samples(4),
        CommsSample((64, 32), 256, (0.1, 0.2), (0.3, 0.4), 0.1, (0, 0)),
    ]
    CostLog(tmp_path, MACHINE).append(samples[:3])
    with CostLog(tmp_path, MACHINE).path.open("a") as file:
        file.write('{"kind": "shard", "tab')  # killed in mid-line
    CostLog(tmp_path, MACHINE).append(samples[3:])
    assert CostLog(tmp_path, MACHINE).read() == samples


def test_a_job_knows_what_plans_took_that_an_earlier_one_measured(tmp_path: Path) -> None:
    """What each rank's tables took together, and the exchanges, where they are between the same hosts."""
    pool = synthetic_pool(20, seed=3, batch_size=4096)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2, hosts=(0, 0)), batch_size=4096)
    oracle, asked = CostOracle(pool.tables, pool.stats, 4096, devices=2, seed=1), list[StepProfile]()

    def measure(plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        asked.extend(profiles := [oracle.profile(plan) for plan in plans])
        return profiles

    def start(of: PlacementTask) -> Planner:
        planner, log = Planner("auto"), CostLog(tmp_path, MACHINE)
        start_costs(planner, of, fingerprint=MACHINE, measure_shards=oracle.measure_shards, log=log)
        return planner

    def error(planner: Planner) -> float:
        return max(abs(step_cost_ms(planner.predict(task, p.plan)) / oracle.plan_ms(p.plan) - 1) for p in asked)

    first = start(task)
    first.plan(task, measure=measure)
    keep_profiles(CostLog(tmp_path, MACHINE), first, task)
    second = start(task)
    assert error(second) < 0.1 and error(start(replace(task, topology=Topology(2, hosts=(0, 1))))) > 0.5
    assert second.costs.replay.comms == [comms_of(replace(profile, hosts=(0, 0))) for profile in asked]


def test_a_rank_that_was_slow_makes_no_later_jobs_tables_costly(tmp_path: Path) -> None:
    """A neighbour has half of its core while placements are measured."""
    pool, log = synthetic_pool(20, seed=3, batch_size=4096), CostLog(tmp_path, MACHINE)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=4096)
    cluster, planner = RecordedCluster(pool.tables, seed=0), Planner()
    start_costs(
        planner, task, fingerprint=MACHINE, measure_shards=lambda s: cluster.measure_shards(pool.stats, 4096, s)
    )
    cluster.slowdown = {1: 2.0}
    profiles: list[StepProfile] = []

    def measure(plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        profiles.extend(found := [cluster.profile(pool.stats, plan, 4096) for plan in plans])
        return found

    planner.plan(task, measure=measure)
    keep_profiles(log, planner, task)
    kept = [sample for sample in log.read() if isinstance(sample, ShardSample)]
    cluster.slowdown = {}
    exact = [cost for p in profiles for cost in cluster.stages_ms(pool.stats, p.plan, 4096)[:, COMPUTE] if cost.any()]
    assert len(kept) == len(exact)
    for sample, cost in zip(kept, exact, strict=True):
        assert sample.fwd_compute_ms + sample.bwd_compute_ms == pytest.approx(cost.sum(), rel=0.12)


def test_many_plans_of_many_ranks_in_the_log_make_no_start_forget_its_tables(tmp_path: Path) -> None:
    pool = synthetic_pool(40, seed=3, batch_size=4096)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(16), batch_size=4096)
    oracle, log = CostOracle(pool.tables, pool.stats, 4096, devices=16, seed=1), CostLog(tmp_path, MACHINE)
    start_costs(Planner(), task, fingerprint=MACHINE, measure_shards=oracle.measure_shards, log=log)
    generator = np.random.default_rng(0)
    plans = [task.plan_from(generator.integers(16, size=40)) for _ in range(20)]
    measured = Planner()
    for plan in plans:
        measured.costs.observe(oracle.profile(plan))
    keep_profiles(log, measured, task)
    again = Planner()
    start_costs(again, task, fingerprint=MACHINE, measure_shards=oracle.measure_shards, log=CostLog(tmp_path, MACHINE))
    assert {s.tables[0].name for s in again.costs.replay.shards if len(s.tables) == 1} >= set(task.names)


def test_what_is_known_of_as_many_tables_and_parts_as_a_start_measures_is_all_learned_from(tmp_path: Path) -> None:
    """With parts beside them the costliest tables, which come first in the log, were left out."""
    pool = synthetic_pool(130, seed=3, batch_size=4096)
    splits = Splits(max_parts=4, min_dim=4)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(8), batch_size=4096, splits=splits)
    oracle = CostOracle(pool.tables, pool.stats, 4096, devices=8, seed=1)
    for _ in range(2):
        planner, log = Planner(), CostLog(tmp_path, MACHINE)
        start_costs(planner, task, fingerprint=MACHINE, measure_shards=oracle.measure_shards, log=log)
    wanted = {name for [name] in calibration_shards(task, seed=0)[0]}
    assert len(wanted) > 128
    assert {s.tables[0].name for s in planner.costs.replay.shards if len(s.tables) == 1} == wanted


def test_each_table_is_measured_once_even_where_that_takes_longer_than_was_thought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the time for fitting, which is short: one of six starts had measured 40 of 50 tables."""
    pool, asked = synthetic_pool(30, seed=1, batch_size=256), set[str]()
    task, now = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256), 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        nonlocal now
        now += 0.02
        asked.update(name for shard in shards for name in shard if len(shard) == 1)
        return [ShardTime(1.0, 1.0, 0.01, 3)] * len(shards)

    for seconds, everything in ((0.2, True), (0.05, False)):  # it takes 0.3 s
        asked.clear()
        budget_seconds = seconds / MEASURING_SHARE
        start_costs(Planner(), task, fingerprint=MACHINE, measure_shards=measure, budget_seconds=budget_seconds)
        assert (asked == set(task.names)) is everything


def test_another_machine_has_another_cost_log(tmp_path: Path) -> None:
    CostLog(tmp_path, MACHINE).append(_samples(2))
    assert CostLog(tmp_path, {**MACHINE, "processor": "another"}).read() == []


def test_a_cost_log_that_cannot_be_kept_is_named_and_costs_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    pool = synthetic_pool(4, seed=1, batch_size=256)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256)

    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        return [ShardTime(1.0, 2.0, 0.01, 3) for _ in shards]

    planner = Planner("auto")
    start_costs(
        planner, task, fingerprint=MACHINE, measure_shards=measure, log=CostLog(tmp_path / "file" / "costs", MACHINE)
    )
    assert planner.costs.replay.shards
    assert "file/costs" in caplog.text and "cannot be read: Not a directory (and 1 more)" in caplog.text


def test_shipped_measurements_survive_their_file_format(tmp_path: Path) -> None:
    shards, comms = _samples(6), [CommsSample((64, 32), 256, (0.1, 0.2), (0.3, 0.4))]
    write_samples(tmp_path / "some.npz", shards, comms)
    *read, exchange = read_samples(tmp_path / "some.npz")
    assert exchange == comms[0] and len(read) == 6
    for before, after in zip(shards, read, strict=True):
        assert isinstance(after, ShardSample)
        assert after.tables == before.tables and after.batch_size == before.batch_size
        assert after.bwd_compute_ms == pytest.approx(before.bwd_compute_ms, rel=1e-5)


def test_the_shipped_costs_say_whose_they_are() -> None:
    planner = Planner("search")
    start_warm(planner, {"processor": "unheard of"})
    assert "other hardware" in planner.costs.costs_from and "proportions" in planner.costs.costs_from
    pool = synthetic_pool(10, seed=9, batch_size=2048)
    task, plan = (
        PlacementTask.build(pool.tables, pool.stats, Topology(1), batch_size=2048),
        ShardingPlan({t.name: 0 for t in pool.tables}, 1),
    )
    for path in SHIPPED.glob("*.json"):
        machine = json.loads(path.read_text())["fingerprint"]
        start_warm(planner, machine)
        assert "hardware like this one" in planner.costs.costs_from
        assert ("by a data sheet" in planner.costs.costs_from) == (machine["device"] == "cuda")
        [cost] = planner.predict(task, plan)
        low, high = (1, 200) if machine["device"] == "cpu" else (0.05, 1)
        assert low < cost.total_ms < high  # ms, of ten tables on one core, or on a GPU


def test_the_shipped_costs_know_what_another_optimizers_update_takes() -> None:
    """On CPU fbgemm's Adagrad takes up to seven times as long as row-wise Adagrad's, with which they were measured. A
    start that does not know takes a step for a third of what it is, and measures nothing, for it seems not to pay."""

    def cost(dim: int, device: str, optimizer: Any) -> RankCost:
        table, stats = TableConfig("wide", 500_000, dim), TableStats(100.0, batch_size=2048)
        planner = Planner("search")
        start_warm(planner, {"device": device}, optimizer)
        task = PlacementTask.build([table], [stats], Topology(1), batch_size=2048)
        return planner.predict(task, ShardingPlan({"wide": 0}, 1))[0]

    for dim, least, most in ((8, 1.3, 3.0), (128, 4.0, 9.0)):
        rowwise, sgd, adagrad = (cost(dim, "cpu", name) for name in ("rowwise_adagrad", "sgd", "adagrad"))
        for other in (sgd, adagrad):
            assert other.fwd_compute_ms == pytest.approx(rowwise.fwd_compute_ms, rel=0.03)
        assert rowwise.bwd_compute_ms < sgd.bwd_compute_ms < 1.6 * rowwise.bwd_compute_ms
        assert least < adagrad.bwd_compute_ms / rowwise.bwd_compute_ms < most
        assert cost(dim, "cuda", "adagrad") == cost(dim, "cuda", "rowwise_adagrad")


def test_of_the_shipped_costs_those_of_the_machine_most_alike_are_taken() -> None:
    machines = [json.loads(path.read_text())["fingerprint"] for path in SHIPPED.glob("*.json")]
    assert len({machine["processor"] for machine in machines}) == len(machines) >= 2
    for machine in machines:
        with_more_cores = {**machine, "cores": 64, "memory_gib": 512}
        assert most_alike(with_more_cores)["fingerprint"] == machine
        like_all_others = {key: value for other in machines for key, value in other.items()}
        of_its_kind = {**like_all_others, "device": machine["device"]}
        assert most_alike(of_its_kind)["fingerprint"]["device"] == machine["device"]


def test_a_second_job_measures_nothing_and_starts_within_a_second(tmp_path: Path) -> None:
    pool, cluster, asked = synthetic_pool(12, seed=1, batch_size=256), SimulatedCluster(0), []
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256)

    def measure(shards: Any) -> list[Any]:
        asked.extend(shards)
        times = []
        for shard in shards:
            part = _named(pool, shard)
            plan = ShardingPlan({table.name: 0 for table in part.tables}, 1)
            [cost] = cluster.profile(part.tables, part.stats, plan, 256).ranks
            times.append(ShardTime(cost.fwd_compute_ms, cost.bwd_compute_ms, 0.01, 1))
        return times

    def start(optimizer: TableOptimizer = "rowwise_adagrad") -> tuple[list[ShardSample], float]:
        begun, planner = time.perf_counter(), Planner("auto")
        start_costs(
            planner,
            replace(task, splits=Splits(optimizer=optimizer)),
            fingerprint=MACHINE,
            measure_shards=measure,
            log=CostLog(tmp_path, MACHINE | {"optimizer": optimizer}),
        )
        return planner.costs.replay.shards, time.perf_counter() - begun

    first, _ = start()
    wanted = list(itertools.chain(*calibration_shards(task, seed=0)))
    assert len(first) == len(wanted) and set(map(tuple, asked)) == set(map(tuple, wanted))
    asked.clear()
    second, seconds = start()
    assert sorted(map(repr, second)) == sorted(map(repr, first)) and not asked
    assert seconds < 3  # the target, 1 s, is a benchmark's affair on a quiet machine
    start("adagrad")
    assert set(map(tuple, asked)) == set(map(tuple, wanted)), "of which the update takes another time"


def test_calibration_looks_at_heavy_tables_alone_and_at_sets_like_a_ranks_share() -> None:
    pool = synthetic_pool(20, seed=1, batch_size=256)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(4), batch_size=256)
    alone, sets = calibration_shards(task, seed=0)
    heaviest = max(range(20), key=lambda i: pool.tables[i].embedding_dim * pool.stats[i].mean_pooling)
    assert alone[0] == [pool.tables[heaviest].name] and sorted(alone) == sorted([name] for name in task.names)
    assert len(sets) == len({tuple(shard) for shard in sets}) and all(len(shard) > 1 for shard in sets)
    assert any(4 <= len(shard) <= 6 for shard in sets)
    assert calibration_shards(task, seed=0) == (alone, sets)
    splitting = replace(task, splits=Splits(max_parts=4, min_dim=4))
    more = [name for [name] in calibration_shards(splitting, seed=0)[0] if name not in task.names]
    assert 0 < len(more) <= 8 and all(name.startswith(f"{name.table}[0:") for name in more)


def test_parts_are_measured_down_to_the_width_at_which_they_are_no_costlier_than_an_even_share() -> None:
    """MLPerf's DLRM-DCNv2: of 214 lookups one table has 100, another 27; a rank's even share of eight is 26.75. What
    is not measured is not predicted to pay: with halves alone measured, the first stayed in two parts."""
    tables = [TableConfig(f"cat_{i}", 1000, 128) for i in range(len(MULTI_HOT_SIZES))]
    stats = [TableStats(float(pooling), batch_size=1024) for pooling in MULTI_HOT_SIZES]
    task = PlacementTask.build(tables, stats, Topology(8), batch_size=1024, splits=Splits(max_parts=4, min_dim=16))
    alone, _ = calibration_shards(task, seed=0)
    parts = [name for [name] in alone if name not in task.names]
    assert parts[:3] == ["cat_20[0:64]", "cat_20[0:32]", "cat_21[0:64]"]
    assert all(name.endswith("[0:64]") for name in parts[2:])


def test_what_half_of_a_table_costs_is_measured_where_it_may_be_split() -> None:
    """The one wide table is costlier than others of its kind: a network fitted to these tables as they are may take
    that for the price of its lookups, which its parts all have."""
    tables = tuple(
        TableConfig(f"t{i}", 1_000_000 if i == 0 else 3000 * (i + 1), 128 if i == 0 else 32) for i in range(26)
    )
    stats = tuple(TableStats(120.0 if i == 0 else 1.0 + i % 9, batch_size=2048) for i in range(26))
    splits = Splits(max_parts=4, min_dim=16, optimizer="adagrad")
    task = PlacementTask.build(tables, stats, Topology(2), batch_size=2048, splits=splits)

    def ms(name: Shard) -> float:
        stat = stats[task.names.index(name.table)]
        costlier = 2.0 if stat.mean_pooling > 100 else 1.0
        return float(0.005 * costlier * stat.mean_pooling * task.shard(name)[0].embedding_dim ** 0.85)

    def measure(shards: Any) -> list[ShardTime]:
        return [ShardTime(sum(map(ms, shard)), 2 * sum(map(ms, shard)), 0.01, 3) for shard in shards]

    planner = Planner("auto")
    start_costs(planner, task, fingerprint=MACHINE, measure_shards=measure)
    split = task.split(Shard("t0"))
    assert split is not None
    alone = dict(zip(split.names, planner.costs.costs_of(split).alone_ms(), strict=True))
    for half in (Shard("t0[0:64]"), Shard("t0[64:128]")):
        assert alone[half] == pytest.approx(3 * ms(half), rel=0.1)


@pytest.mark.parametrize("slower", [1.0, 1.5, 2.0])
def test_a_slow_moment_is_noise_for_which_all_is_measured_again(slower: float) -> None:
    """The machine is slow for two of four times that a shard is measured, whenever that is; the rank says nothing of
    it. Each moment's own steps agree with one another."""
    pool = synthetic_pool(8, seed=1, batch_size=256)
    times: Counter[tuple[str, ...]] = Counter()

    def measure(shards: Any) -> list[ShardTime]:
        slow = (1.0, slower, slower, 1.0)[times[tuple(shards[0])] % 4]
        times.update(tuple(shard) for shard in shards)
        return [ShardTime(slow * len(shard), slow * len(shard), 0.01, 3) for shard in shards]

    planner = Planner("auto")
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256)
    start_costs(planner, task, fingerprint=MACHINE, measure_shards=measure, budget_seconds=600)
    noise = {len(sample.tables): sample.noise for sample in planner.costs.replay.shards}
    rounds = MOST_ROUNDS if slower > 1 else 1
    assert all(count == rounds + (PASSES - 1 if len(shard) == 1 else 0) for shard, count in times.items())
    alone = noise.pop(1)
    if slower > 1:  # how far moments differ, divided by the root of how many were seen
        assert min(noise.values()) > alone > 0.25 * (slower - 1) / (PASSES + MOST_ROUNDS) ** 0.5
    else:
        assert alone < 0.01 and max(noise.values()) <= 0.01


def test_networks_that_other_tables_taught_say_nothing_once_each_table_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one table was not, or a learned algorithm plans, they are trained on what was measured."""
    pool = synthetic_pool(8, seed=1, batch_size=256)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256)

    def networks_say(algorithm: str) -> bool:
        planner, now = Planner(algorithm), ShardTime(1.0, 1.0, 0.01, 3)
        start_costs(planner, task, fingerprint=MACHINE, measure_shards=lambda shards: [now] * len(shards))
        assert {sample.tables for sample in planner.costs.replay.shards if len(sample.tables) == 1}
        return any(net.parameters[-2].any() for net in planner.costs.cost_model.nets.values())

    assert not networks_say("auto") and networks_say("dreamshard")
    monkeypatch.setattr(calibration, "MOST_ALONE", 7)
    assert networks_say("auto")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_slow_rank_makes_no_table_costly_and_none_unsure(world_size: int) -> None:
    """A neighbour has half of the last one's core: which tables were dealt to it says nothing of them."""
    pool, draws = synthetic_pool(8, seed=1, batch_size=256), np.random.default_rng(0)

    def measure(shards: Any) -> list[ShardTime]:
        slow_W = [1.0] * (world_size - 1) + [2.0]
        ms = [slow * len(shard) * draws.normal(1, 0.01) for slow, shard in zip(slow_W, shards, strict=False)]
        return [ShardTime(one, one, 0.01, 3) for one in ms]

    planner = Planner("auto")
    task = PlacementTask.build(pool.tables, pool.stats, Topology(world_size), batch_size=256)
    start_costs(planner, task, fingerprint=MACHINE, measure_shards=measure)
    for sample in planner.costs.replay.shards:
        assert sample.fwd_compute_ms == pytest.approx(len(sample.tables), rel=0.05)
        assert sample.noise < 0.05


@pytest.mark.alone
def test_a_start_spends_half_of_its_time_on_tables_alone_and_the_next_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Sets take ten times as long as a table: a start that dealt them interleaved would know next to no table. Once
    each table was measured, the next one measures nothing."""
    pool, rounds = synthetic_pool(30, seed=1, batch_size=256), list[tuple[Any, float]]()

    def measure(shards: Any) -> list[ShardTime]:
        begun = time.perf_counter()
        time.sleep(0.01 * max(map(len, shards)))
        rounds.append((shards, time.perf_counter() - begun))  # on a busy machine a sleep lasts longer
        return [ShardTime(1.0, 1.0, 0.01, 3)] * len(shards)

    def start(seconds: float) -> set[tuple[str, ...]]:
        rounds.clear()
        task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256)
        start_costs(
            Planner("auto"), task, fingerprint=MACHINE, measure_shards=measure, log=CostLog(tmp_path, MACHINE),
            budget_seconds=seconds / MEASURING_SHARE,
        )  # fmt: skip
        return {tuple(shard) for dealt, _ in rounds for shard in dealt}

    every = {(table.name,) for table in pool.tables}
    cut = start(0.05)
    assert cut < every
    rest = start(0.6)
    assert all(len({len(shard) == 1 for shard in dealt}) == 1 for dealt, _ in rounds)  # one kind at a time
    alone, sets = (sum(took for dealt, took in rounds if (len(dealt[0]) == 1) == kind) for kind in (True, False))
    assert 0.5 < alone / sets < 2
    assert every - cut < rest and not cut & rest
    assert not start(0.6)


def test_a_shorter_jobs_start_measures_less_and_believes_it_less() -> None:
    """For ten steps nothing is measured, for it would not pay; for 120 seconds of them little; a million take the whole
    budget."""
    pool = synthetic_pool(30, seed=3, batch_size=256)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=256)

    def measure(shards: Any) -> list[ShardTime]:
        time.sleep(0.1)
        return [ShardTime(1.0, 1.0, 0.01, 3)] * len(shards)

    def start(steps: int | None) -> tuple[Planner, float]:
        planner, begun = Planner("auto"), time.perf_counter()
        seconds_left = start_costs(
            planner, task, fingerprint=MACHINE, measure_shards=measure, steps=steps, budget_seconds=3 * LEAST_SECONDS
        )
        return planner, time.perf_counter() - begun + seconds_left

    shortest, budget = start(10)
    assert budget == pytest.approx(LEAST_SECONDS, rel=0.01) and shortest.costs.replay.shards == []
    short, budget = start(round(120 / expected_seconds(shortest, task, steps=1)))
    assert budget == pytest.approx(LEAST_SECONDS, rel=0.01)
    few = short.costs.replay.shards
    assert 0 < len(few) < 30 and all(sample.noise >= UNSEEN_MOMENTS for sample in few)
    for steps in (1_000_000, None):
        long, budget = start(steps)
        assert budget == pytest.approx(3 * LEAST_SECONDS, rel=0.01)
        assert len(long.costs.replay.shards) > len(few)
