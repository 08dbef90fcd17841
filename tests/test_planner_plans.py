"""Plans: legal whatever is asked, an explanation where nothing is, and as good as the costs allow."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_autoshard import (
    Constraints,
    PlanError,
    Planner,
    ShardingPlan,
    SimulatedCluster,
    TableConfig,
    TableStats,
    Topology,
)
from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.plan import bytes_per_rank
from dlrm_autoshard.planner.candidates import LEARNED
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.dreamshard.settings import DreamShardSettings
from dlrm_autoshard.planner.feasible import feasible
from dlrm_autoshard.planner.planner import ALGORITHMS
from dlrm_autoshard.planner.search import local_search
from dlrm_autoshard.planner.search.greedy import HEURISTICS, KEYS, balance, heuristic
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search.local_search import improve, search
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.probe.shipped_costs import start_warm
from tests.planning_problems import (
    BATCH,
    all_placements,
    exact_optimum,
    measurer,
    random_samples,
    some_tables,
    some_task,
)

QUICK = DreamShardSettings(iterations=2, placements=2, cost_updates=30, policy_updates=2, episodes=4, samples=4)


@pytest.fixture(scope="module")
def fitted() -> Planner:
    planner = Planner("auto", seed=0)
    planner.costs.learn(random_samples(SimulatedCluster(seed=0), profiles=100), updates=600)
    return planner


def like(fitted: Planner, algorithm: str) -> Planner:
    planner = Planner(algorithm, seed=0, settings=QUICK)
    planner.load_state_dict(fitted.state_dict())
    return planner


def costs_of(planner: Planner, task) -> TaskCosts:  # type: ignore[no-untyped-def]
    return planner.costs.costs_of(task)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take minutes
)
@given(data=st.data())
def test_no_algorithm_overflows_under_random_memory_pressure(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 14))
    world_size = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    memory = data.draw(st.lists(st.integers(0, 150), min_size=world_size, max_size=world_size))
    tables, _ = some_tables(count, seed=1)
    table_bytes = {table.name: size for table, size in zip(tables, sizes, strict=True)}
    pinned = data.draw(
        st.dictionaries(st.sampled_from(sorted(table_bytes)), st.integers(0, world_size - 1), max_size=2)
    )
    names = data.draw(st.permutations(sorted(table_bytes)))
    constraints = Constraints(pinned=pinned, together=(tuple(names[:2]),), apart=(tuple(names[2:4]),))
    task = some_task(count, world_size, 1, memory, constraints, table_bytes)
    try:
        feasible(task)
    except PlanError as error:
        assert len(str(error)) > 30
        return
    generator = np.random.default_rng(0)
    for name in HEURISTICS:
        task.check(task.plan_from(heuristic(task, name, generator)))
    task.check(task.plan_from(search(task, costs_of(Planner("search"), task), kicks=2)))
    for algorithm in ("auto", *LEARNED):
        planner = Planner(algorithm, settings=QUICK)
        for candidate in planner.plan(task).candidates:
            task.check(candidate.plan)


def test_a_swap_is_found_among_many_that_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are tried; and those that promise most are of a pinned table."""
    monkeypatch.setattr(local_search, "MOST_SWAPS", 1)
    tables = [TableConfig(name, 100_000, 32) for name in ("pinned", "free", "other")]
    stats = [TableStats(pooling, batch_size=BATCH) for pooling in (100.0, 70.0, 40.0)]
    sizes = dict.fromkeys(("pinned", "free", "other"), 1)
    task = PlacementTask.build(
        tables, stats, Topology(2, (2, 1)), batch_size=BATCH, constraints=Constraints(pinned={"pinned": 0}),
        table_bytes=sizes,
    )  # fmt: skip
    start = task.ranks_from(ShardingPlan({"pinned": 0, "free": 0, "other": 1}, 2))
    found = task.plan_from(improve(task, costs_of(Planner(), task), start))
    assert found.rank_of == {"pinned": 0, "free": 1, "other": 0}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_placement_is_found_exactly_where_one_exists(data: st.DataObject) -> None:
    count, world_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    memory = data.draw(st.lists(st.integers(0, 40), min_size=world_size, max_size=world_size))
    tables, _ = some_tables(count, seed=2)
    names = [table.name for table in tables]
    apart = tuple(names[: data.draw(st.integers(0, min(count, world_size)))])
    pinned = {names[-1]: data.draw(st.integers(0, world_size - 1))} if data.draw(st.booleans()) else {}
    constraints = Constraints(pinned=pinned, apart=(apart,) if len(apart) > 1 else ())
    task = some_task(count, world_size, 2, memory, constraints, dict(zip(names, sizes, strict=True)))
    exists = False
    for ranks in all_placements(count, world_size):
        used = np.bincount(ranks, weights=sizes, minlength=world_size)
        kept_apart = len(apart) < 2 or len(set(ranks[: len(apart)].tolist())) == len(apart)
        if (used <= memory).all() and kept_apart and (not pinned or ranks[-1] == pinned[names[-1]]):
            exists = True
            break
    if exists:
        task.check(task.plan_from(feasible(task)))
    else:
        with pytest.raises(PlanError):
            feasible(task)


def test_a_table_too_large_for_any_rank_is_named_with_what_is_missing() -> None:
    task = some_task(3, 2, memory=[2**30, 3 * 2**30], table_bytes={"t_0": 5 * 2**30, "t_1": 1, "t_2": 1})
    with pytest.raises(PlanError, match=r"'t_0' needs 5 GiB; .* 3 GiB, on rank 1 \(2 GiB short\).*memory_gib"):
        feasible(task)


def test_too_little_memory_in_all_says_how_much() -> None:
    task = some_task(4, 2, memory=[100, 100], table_bytes=dict.fromkeys(("t_0", "t_1", "t_2", "t_3"), 60))
    with pytest.raises(PlanError, match=r"need 240 bytes but 2 ranks have 200 bytes in all \(40 bytes short"):
        feasible(task)


def test_enough_in_all_but_no_way_to_pack_it_is_proved() -> None:
    task = some_task(3, 2, memory=[100, 100], table_bytes=dict.fromkeys(("t_0", "t_1", "t_2"), 60))
    with pytest.raises(PlanError, match=r"No placement fits: .*rank \d .*20 bytes short"):
        feasible(task)


def test_constraints_that_contradict_each_other_are_refused() -> None:
    for constraints, words in (
        (Constraints(pinned={"t_9": 0}), "does not have"),
        (Constraints(pinned={"t_0": 5}), "there are 2 ranks"),
        (Constraints(pinned={"t_0": 0, "t_1": 1}, together=(("t_0", "t_1"),)), "pinned elsewhere"),
        (Constraints(together=(("t_0", "t_1"),), apart=(("t_0", "t_1"),)), "must also stay together"),
        (Constraints(apart=(("t_0", "t_1", "t_2"),)), "only 2 ranks"),
    ):
        with pytest.raises(PlanError, match=words):
            feasible(some_task(3, 2, constraints=constraints))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_keeps_pins_groups_and_exclusions_and_repeats_itself(algorithm: str, fitted: Planner) -> None:
    tables, stats = some_tables(10, seed=3)
    constraints = Constraints({"t_0": 2}, together=(("t_1", "t_2", "t_3"),), apart=(("t_4", "t_5"),))
    topology = Topology(4, excluded=frozenset({1}))
    task = PlacementTask.build(tables, stats, topology, batch_size=BATCH, constraints=constraints)
    plans = [like(fitted, algorithm).plan(task).plan for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].rank_of["t_0"] == 2 and not plans[0].shards_on(1)
    assert len({plans[0].rank_of[t] for t in ("t_1", "t_2", "t_3")}) == 1
    assert plans[0].rank_of["t_4"] != plans[0].rank_of["t_5"]


def test_groups_that_overlap_are_one_and_a_group_of_nothing_asks_nothing() -> None:
    together = (("t_4", "t_2"), (), ("t_0", "t_1"), ("t_1", "t_4"))
    units = some_task(6, 2, constraints=Constraints(together=together, apart=((),))).units
    assert units.members == ((0, 1, 2, 4), (3,), (5,))
    assert units.unit_of_T.tolist() == [0, 0, 0, 1, 0, 2]


def test_a_slow_rank_gets_less_work(fitted: Planner) -> None:
    tables, stats = some_tables(30, seed=4)
    task = PlacementTask.build(tables, stats, Topology(2, speed=(1.0, 0.5)), batch_size=BATCH)
    for algorithm in ("auto", "lookup_greedy", "search"):
        plan = like(fitted, algorithm).plan(task).plan
        pooled = [
            sum(
                t.embedding_dim * s.mean_pooling
                for t, s in zip(tables, stats, strict=True)
                if plan.rank_of[t.name] == r
            )
            for r in (0, 1)
        ]
        assert pooled[1] < 0.75 * pooled[0]


@pytest.mark.parametrize("seed", range(5))
def test_tables_that_fill_all_memory_are_placed(seed: int) -> None:
    """30 tables of odd sizes on 4 ranks whose memory they fill to the last byte: one placement, or hardly more."""
    draw = np.random.default_rng(seed)
    table_bytes = {f"table_{i}": int(size) for i, size in enumerate(draw.lognormal(20, 1.5, size=30))}
    tables, stats = some_tables(30, seed)
    tables = [replace(table, name=name) for table, name in zip(tables, table_bytes, strict=True)]
    rank_T = draw.integers(4, size=30)
    at_T = list(zip(table_bytes.values(), rank_T.tolist(), strict=True))
    memory = tuple(sum(size for size, at in at_T if at == rank) for rank in range(4))
    task = PlacementTask.build(tables, stats, Topology(4, memory), batch_size=BATCH, table_bytes=table_bytes)
    task.check(task.plan_from(feasible(task)))


@pytest.mark.parametrize(("tables", "devices", "seed"), [(12, 2, 0), (12, 3, 1), (12, 4, 2), (9, 4, 3), (5, 4, 4)])
def test_small_instances_are_within_one_per_cent_of_the_exact_optimum(
    fitted: Planner, tables: int, devices: int, seed: int
) -> None:
    task = some_task(tables, devices, seed)
    result = like(fitted, "auto").plan(task)
    optimum = exact_optimum(costs_of(fitted, task), devices)
    assert optimum * 0.9999 <= result.predicted_ms <= optimum * 1.01


@pytest.mark.parametrize(("hosts", "seed"), [((0, 0, 1, 1), 5), ((0, 1, 1, 1), 6), ((0, 1, 1, 2), 7)])
def test_so_are_small_instances_on_several_hosts(hosts: tuple[int, ...], seed: int) -> None:
    """The link between hosts is slow: what is best depends on what the slowest host sends."""
    task = some_task(8, 4, seed)
    task = replace(task, topology=replace(task.topology, hosts=hosts))
    costs = Planner("search", seed=0).costs.costs_of(task)
    every_PU = all_placements(len(task.units), 4)
    inside_PWU = (every_PU[:, None, :] == np.arange(4)[:, None]).astype(np.float32)
    sums_PWK = inside_PWU @ costs.summary_UK
    optimum = float(costs.total_ms(costs.stages(sums_PWK), sums_PWK).min())
    found = costs.step_ms(search(task, costs))
    assert optimum * 0.9999 <= found <= optimum * 1.01


def test_auto_is_never_worse_than_any_heuristic_under_its_evidence(fitted: Planner) -> None:
    for seed in range(4):
        task = some_task(20, 4, 10 + seed)
        result = like(fitted, "auto").plan(task)
        assert {candidate.name for candidate in result.candidates} >= {*HEURISTICS, "search"}
        assert all(result.predicted_ms <= candidate.predicted_ms * 1.0001 for candidate in result.candidates)


def test_auto_takes_the_best_that_was_measured_and_shows_the_evidence(fitted: Planner) -> None:
    task = some_task(20, 4, 20)
    cluster = SimulatedCluster(seed=5)  # another machine than the costs were learned on
    asked: list[ShardingPlan] = []

    def measure(plans):  # type: ignore[no-untyped-def]
        asked.extend(plans)
        return measurer(cluster)(task, plans)

    result = like(fitted, "auto").plan(task, measure=measure, measure_plans=3)
    measured = [candidate for candidate in result.candidates if candidate.measured_ms is not None]
    assert 2 <= len({plan.fingerprint for plan in asked}) == len(asked) <= 3
    assert any(candidate.name in KEYS for candidate in measured)
    assert result.chosen.measured_ms == min(candidate.measured_ms for candidate in measured)  # type: ignore[type-var]
    assert result.chosen.measured_source == "simulated"
    assert result.chosen.measured_ms == pytest.approx(
        step_cost_ms(cluster.profile(task.tables, task.stats, result.plan, BATCH).ranks)
    )


def test_improving_never_makes_worse_and_keeps_memory(fitted: Planner) -> None:
    for seed in range(5):
        task = some_task(16, 3, seed)
        most = max(task.table_bytes.values())
        tight = [max(int(sum(task.table_bytes.values()) / 3 * 1.15), most)] * 3
        task = some_task(16, 3, seed, memory=tight)
        costs = costs_of(fitted, task)
        start = heuristic(task, "random", np.random.default_rng(seed))
        better = improve(task, costs, start, kicks=3)
        assert costs.step_ms(better) <= costs.step_ms(start) * (1 + 1e-6)
        assert max(bytes_per_rank(task.plan_from(better), task.table_bytes)) <= tight[0]


def test_search_does_not_care_in_which_order_tables_are_given(fitted: Planner) -> None:
    tables, stats = some_tables(15, seed=6)
    order = np.random.default_rng(1).permutation(15)
    topology = Topology(3)
    one = like(fitted, "search").plan(PlacementTask.build(tables, stats, topology, batch_size=BATCH))
    other = like(fitted, "search").plan(
        PlacementTask.build([tables[i] for i in order], [stats[i] for i in order], topology, batch_size=BATCH)
    )
    assert one.predicted_ms == pytest.approx(other.predicted_ms, rel=0.01)


def test_dead_ends_of_the_greedy_are_evened_out_not_overflowed() -> None:
    table_bytes = {f"t_{i}": size for i, size in enumerate([50, 50, 34, 33, 33])}
    task = some_task(5, 2, memory=[100, 100], table_bytes=table_bytes)
    rank_U = balance(task, np.array([1.0, 2.0, 9.0, 8.0, 7.0]))  # by key, the three small tables go first
    task.check(task.plan_from(rank_U))


def test_greedy_on_cost_beats_greedy_by_size(fitted: Planner) -> None:
    task = some_task(40, 4, 7)
    costs = costs_of(fitted, task)
    by_size = heuristic(task, "size_greedy", np.random.default_rng(0))
    assert costs.step_ms(greedy_on_cost(task, costs)) < costs.step_ms(by_size)


def test_the_budget_is_kept() -> None:
    task = some_task(100, 8, seed=8)
    started = time.perf_counter()
    result = Planner("auto").plan(task, budget_seconds=0.2)
    assert time.perf_counter() - started < 1.5  # heuristics and one pass of each algorithm always run
    assert result.predicted_ms <= min(result.best(name).predicted_ms for name in KEYS)


def test_the_result_is_json_and_the_plan_comes_back_from_it(fitted: Planner) -> None:
    result = like(fitted, "auto").plan(some_task(6, 2, seed=9))
    record = json.loads(json.dumps(result.to_json()))
    assert ShardingPlan.from_json(record["plan"]) == result.plan
    assert record["chosen"]["predicted_ms"] == pytest.approx(record["predicted_ms"], rel=1e-5)
    assert "fitted" in record["costs_from"]


def test_the_planners_state_survives_json(fitted: Planner) -> None:
    again = Planner("auto")
    again.load_state_dict(json.loads(json.dumps(fitted.state_dict())))
    task = some_task(12, 3, 11)
    plans = [p.plan(task) for p in (fitted, again)]
    assert plans[0].plan == plans[1].plan
    assert plans[0].predicted_ms == pytest.approx(plans[1].predicted_ms, rel=1e-6)


def test_unknown_algorithms_and_empty_models_are_refused() -> None:
    with pytest.raises(PlanError, match="no algorithm 'magic'"):
        Planner("magic")
    with pytest.raises(PlanError, match="no tables"):
        PlacementTask.build([], [], Topology(2), batch_size=1)
    twice = [TableConfig("t", 10, 4)] * 2
    with pytest.raises(PlanError, match="same name"):
        PlacementTask.build(twice, some_tables(2)[1], Topology(2), batch_size=1)


def test_planning_needs_neither_torch_distributed_nor_fbgemm() -> None:
    """In a fresh process: the package's own modules never import them (torch itself may load torch.distributed)."""
    script = (
        "import sys, dlrm_autoshard\n"
        "assert 'torch' not in sys.modules\n"
        "from dlrm_autoshard import PlacementTask, Planner, TableConfig, TableStats, Topology\n"
        "tables = [TableConfig(f't{i}', 100 * (i + 1), 16) for i in range(4)]\n"
        "Planner().plan(PlacementTask.build(tables, [TableStats(1.0)] * 4, Topology(2), batch_size=64))\n"
        "assert not [m for m in sys.modules if m.startswith(('fbgemm_gpu', 'dlrm_autoshard.distributed'))]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_1000_tables_on_128_ranks_are_placed_nearly_as_well_as_whole_tables_can_be() -> None:
    """No placement beats the slowest table's own time in each stage of computation, and even exchanges."""
    pool, planner = synthetic_pool(1000, seed=0, batch_size=65_536), Planner("search")
    task = pool.task(Topology(128))
    start_warm(planner, {})
    costs = planner.costs.costs_of(task)
    alone_U4 = costs.stage_ms(costs.summary_UK, np.full(len(task.units), costs.fastest))
    found_W4 = costs.stage_ms(costs.sums(task.ranks_from(planner.plan(task).plan)), np.arange(128))
    least_4 = np.maximum(alone_U4.max(axis=0), found_W4.mean(axis=0))
    assert found_W4.max(axis=0).sum() <= 1.0025 * least_4.sum()
