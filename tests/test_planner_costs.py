"""The cost model: learns a known function, treats a device as a set, costs nothing where there is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard import Planner, RankCost, ShardingPlan, SimulatedCluster, Topology
from dlrm_autoshard.benchmarks.recorded_cluster import RecordedCluster
from dlrm_autoshard.costs import PLANNED_STAGES, StepProfile, prediction_error, step_cost_ms
from dlrm_autoshard.formats.json_file import FormatError, checked, read_json
from dlrm_autoshard.planner.costs import replay
from dlrm_autoshard.planner.costs.cost_model import CostModel
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel, exchange_work
from dlrm_autoshard.planner.costs.fit_costs import HUBER, gradients
from dlrm_autoshard.planner.costs.least_squares import fit_nonnegative, solve_nonnegative
from dlrm_autoshard.planner.costs.replay import CommsSample, ReplayBuffer, ShardSample
from dlrm_autoshard.planner.costs.shard_set import ShardSet
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.saved_state import PlannerRecord
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.shipped_costs import SHIPPED, most_alike, start_warm
from dlrm_autoshard.tables import TableConfig, TableStats
from tests.gradients import assert_gradients_of, in_double_precision
from tests.planning_problems import BATCH, random_samples, some_tables, some_task


def task_of(tables: list[TableConfig], stats: list[TableStats], world_size: int) -> PlacementTask:
    return PlacementTask.build(tables, stats, Topology(world_size), batch_size=BATCH)


@pytest.fixture(scope="module")
def fitted() -> Planner:
    planner = Planner("search", seed=0)
    planner.costs.learn(random_samples(SimulatedCluster(seed=0), profiles=80), updates=600)
    return planner


def shards(samples: list[Any]) -> list[ShardSample]:
    return [sample for sample in samples if isinstance(sample, ShardSample)]


def test_the_cost_model_learns_a_known_function_of_unseen_tables(fitted: Planner) -> None:
    unseen = shards(random_samples(SimulatedCluster(seed=0), profiles=30, seed=1))
    forward, backward = fitted.costs.cost_model.errors(ShardSet(unseen))
    assert forward < 0.05 and backward < 0.05


def test_learning_reports_the_error_before_and_after() -> None:
    planner = Planner("search", seed=0)
    report = planner.costs.learn(random_samples(SimulatedCluster(seed=0), profiles=20), updates=100)
    assert report.samples > 40 and report.updates == 100
    assert max(report.error_after) < min(report.error_before)
    assert "fitted" in planner.costs.costs_from


def test_a_devices_cost_does_not_depend_on_the_order_of_its_tables(fitted: Planner) -> None:
    tables, stats = some_tables(9, seed=3)
    order = np.random.default_rng(0).permutation(9)
    one = ShardSample(tuple(tables), tuple(stats), BATCH, 1, 1)
    other = ShardSample(tuple(tables[i] for i in order), tuple(stats[i] for i in order), BATCH, 1, 1)
    one_ms, other_ms = fitted.costs.cost_model.shard_ms([one, other])
    np.testing.assert_allclose(one_ms, other_ms, rtol=1e-4)


@pytest.mark.parametrize("machine", ["amd_epyc", "intel_xeon"])
def test_a_table_that_costs_hardly_anything_changes_hardly_anything(machine: str) -> None:
    """By the shipped costs. Else searches find the small tables that make a costly one look cheaper."""
    planner = Planner(seed=0)
    start_warm(planner, read_json(SHIPPED / f"{machine}.json", dict[str, Any], "shipped costs")["fingerprint"])
    pool = synthetic_pool(200, seed=1003, batch_size=8192)
    costs = planner.costs.costs_of(pool.task(Topology(1), 8192))
    alone_TK = costs.summary_TK
    alone_T = costs.device_ms(alone_TK).sum(axis=1)
    costliest = int(alone_T.argmax())
    together_T = costs.device_ms(alone_TK[costliest] + alone_TK).sum(axis=1)
    small = alone_T < 0.02 * alone_T[costliest]
    changed = together_T[small] / alone_T[costliest] - 1
    assert small.sum() > 20 and changed.min() > -0.005 and changed.max() < 0.04
    small = alone_T < 0.2 * alone_T[costliest]
    assert (together_T[small] / alone_T[costliest] - 1).min() > -0.01


def test_exchanging_two_devices_exchanges_their_costs(fitted: Planner) -> None:
    tables, stats = some_tables(8, seed=4)
    plan = ShardingPlan({table.name: i % 3 for i, table in enumerate(tables)}, 3)
    swapped = ShardingPlan({name: [1, 0, 2][rank] for name, rank in plan.rank_of.items()}, 3)
    costs, other = (fitted.predict(task_of(tables, stats, 3), p) for p in (plan, swapped))
    for ours, theirs in zip(costs, (other[1], other[0], other[2]), strict=True):
        assert ours.to_json() == pytest.approx(theirs.to_json(), rel=1e-4)


def test_an_empty_device_computes_nothing_but_joins_the_exchange(fitted: Planner) -> None:
    tables, stats = some_tables(4, seed=5)
    empty = fitted.predict(task_of(tables, stats, 2), ShardingPlan({t.name: 0 for t in tables}, 2))[1]
    assert empty.fwd_compute_ms == empty.bwd_compute_ms == 0.0
    assert empty.fwd_comms_ms > 0 and empty.bwd_comms_ms > 0


def test_one_rank_exchanges_nothing() -> None:
    tables, stats = some_tables(4)
    [cost] = Planner("search").predict(task_of(tables, stats, 1), ShardingPlan({t.name: 0 for t in tables}, 1))
    assert cost.fwd_comms_ms == cost.bwd_comms_ms == 0.0 and cost.fwd_compute_ms > 0


def test_more_work_costs_more_before_anything_was_measured() -> None:
    tables, stats = some_tables(20, seed=6)
    model = CostModel()
    few, many = (ShardSample(tuple(tables[:n]), tuple(stats[:n]), BATCH, 1, 1) for n in (10, 20))
    larger_batch = ShardSample(tuple(tables[:10]), tuple(stats[:10]), 4 * BATCH, 1, 1)
    few_ms, many_ms, batch_ms = model.shard_ms([few, many, larger_batch])
    assert (many_ms > few_ms).all() and (batch_ms > 2 * few_ms).all()


def test_the_fit_follows_the_gradient_of_its_loss() -> None:
    model, generator = CostModel(seed=1), np.random.default_rng(0)
    for net in model.nets.values():
        net.parameters[-2] += generator.standard_normal(net.parameters[-2].shape).astype(np.float32) * 0.05
    in_double_precision(*model.nets.values())
    samples = ShardSet(shards(random_samples(SimulatedCluster(seed=0), profiles=8)))
    for name in ("features_RF", "work_RP"):
        setattr(samples, name, getattr(samples, name).astype(np.float64))
    chosen = np.arange(0, len(samples.target_NS), 2)

    def loss() -> float:
        error_NS = np.abs(gradients(model, samples, chosen))
        return float(np.where(error_NS < HUBER, error_NS**2 / (2 * HUBER), error_NS - HUBER / 2).mean())

    assert loss() == pytest.approx(
        float(np.abs(np.log(model.predict(samples)[chosen]) - samples.log_target_NS[chosen]).mean()), abs=HUBER
    )
    gradients(model, samples, chosen)
    assert_gradients_of(loss, list(model.nets.values()))


def test_step_prediction_is_the_sum_over_stages_of_the_slowest_rank(fitted: Planner) -> None:
    task = some_task(10, 3, seed=8)
    costs = fitted.costs.costs_of(task)
    rank_U = np.arange(10) % 3
    predicted = fitted.predict(task, task.plan_from(rank_U))
    by_hand = sum(max(rank.stage(stage) for rank in predicted) for stage in PLANNED_STAGES)
    assert costs.step_ms(rank_U) == pytest.approx(by_hand, rel=1e-5) == pytest.approx(step_cost_ms(predicted), rel=1e-5)


def exchanges(prices: np.ndarray, count: int, seed: int) -> list[CommsSample]:
    """Synchronous ones: every rank reports the slowest one's time. Dims as plans have them, nearly balanced."""
    generator, samples = np.random.default_rng(seed), []
    for _ in range(count):
        dims = generator.integers(200, 400, size=4)
        ms = float(exchange_work(dims.astype(float), 4096) @ prices)
        noisy = tuple(float(v) for v in ms * np.exp(0.01 * generator.standard_normal(4)))
        samples.append(CommsSample(tuple(int(d) for d in dims), 4096, noisy, noisy))
    return samples


@pytest.mark.parametrize("profiles", [4, 16, 64])
def test_the_slopes_of_exchanges_do_not_flatten_as_profiles_accumulate(profiles: int) -> None:
    """What the rank with most dims sends, and what the one with fewest receives."""
    prices = np.array([0.3, 0.1, 0.6, 0.1, 0.4])
    model = ExchangeModel()
    model.fit(exchanges(prices, profiles, seed=profiles), [1.0] * profiles)
    most, fewest = ([300.0, 300.0, 300.0, d] for d in (600.0, 0.0))
    for dims in (np.array(most), np.array(fewest)):
        even = np.full(4, dims.mean())
        truth = float((exchange_work(dims, 4096) - exchange_work(even, 4096)) @ prices)
        assert (model.ms(dims, 4096) - model.ms(even, 4096))[0] == pytest.approx(truth, rel=0.3)


def test_nor_while_one_plan_is_measured_again_and_again() -> None:
    """Longer than profiles are kept for. What plans differed by was measured before, and stays known."""
    pool, ranks = synthetic_pool(40, seed=1, batch_size=BATCH), 4
    cluster, names = RecordedCluster(pool.tables, seed=1), [table.name for table in pool.tables]
    draw, planner = np.random.default_rng(0), Planner(seed=0)

    def observe(plan: ShardingPlan) -> None:
        planner.costs.observe(cluster.profile(pool.stats, plan, BATCH))

    def exchange_ms(dims: np.ndarray) -> float:
        return float(planner.costs.exchange.ms(dims, BATCH)[0])

    for _ in range(12):
        observe(ShardingPlan(dict(zip(names, draw.integers(ranks, size=40).tolist(), strict=True)), ranks))
    even, uneven = np.full(ranks, 300.0), np.array([600.0, 200.0, 200.0, 200.0])
    before = exchange_ms(uneven) - exchange_ms(even)
    live = ShardingPlan({name: int(i % 8 == 0) + 2 * int(i % 3 == 0) for i, name in enumerate(names)}, ranks)
    for _ in range(70):
        observe(live)
    assert exchange_ms(uneven) - exchange_ms(even) == pytest.approx(before, rel=0.15)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_what_searches_see_of_exchanges_adds_up_to_the_model(seed: int, world_size: int) -> None:
    generator = np.random.default_rng(seed)
    task = some_task(12, world_size, seed=3)
    hosts = tuple(sorted(generator.integers(3, size=world_size).tolist()))
    task = replace(task, topology=replace(task.topology, hosts=hosts))
    planner = Planner("search")
    planner.costs.exchange.prices_SP = generator.uniform(0, 1, (2, 5))
    costs = planner.costs.costs_of(task)
    rank_U = generator.integers(world_size, size=12)
    sums = costs.sums(rank_U)
    searched = costs.total_ms(costs.stage_ms(sums, np.arange(world_size)), sums)
    assert searched == pytest.approx(costs.step_ms(rank_U), rel=1e-5)


class Network:
    """Exchanges between hosts, written apart from the model: ranks send, and each host's link carries both directions
    at once; the slowest host's link is what all wait for. slowness: ms per MB, of each host."""

    def __init__(self, hosts: tuple[int, ...], slowness: tuple[float, ...]) -> None:
        self.hosts, self.slowness = hosts, slowness

    def ms(self, dims: Sequence[int]) -> float:
        ranks = len(dims)
        mb = 4096 / ranks * 4e-6
        links = []
        for host, slowness in enumerate(self.slowness):
            own = sum(dim for dim, at in zip(dims, self.hosts, strict=True) if at == host)
            inside = self.hosts.count(host)
            links.append(slowness * mb * max(own * (ranks - inside), (sum(dims) - own) * inside))
        return 0.5 + 0.05 * mb * max(dims) * (ranks - 1) + 0.02 * mb * (sum(dims) - min(dims)) + max(links)

    def plans(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """Dims of the ranks, balanced and not."""
        draw, ranks = np.random.default_rng(seed), len(self.hosts)
        spread = draw.choice([2.0, 8.0, 30.0], size=count)
        return [tuple((320 * ranks * draw.dirichlet(np.full(ranks, by))).astype(int).tolist()) for by in spread]

    def measured(self, count: int, seed: int) -> list[CommsSample]:
        ranks = len(self.hosts)
        every = [(dims, (self.ms(dims),) * ranks) for dims in self.plans(count, seed)]
        return [CommsSample(dims, 4096, took, took, hosts=self.hosts) for dims, took in every]


@pytest.mark.parametrize(
    "hosts, slowness, within",
    [
        ((0, 0, 1, 1), (1.0, 1.0), 0.05),
        ((0, 0, 1, 1, 2, 2, 3, 3), (1.0,) * 4, 0.05),
        ((0, 0, 0, 0, 1, 1, 1, 1), (1.0, 1.0), 0.05),
        ((0, 0, 0, 1), (1.0, 1.0), 0.05),
        ((0, 0, 0, 0, 1, 1, 2), (1.0,) * 3, 0.05),
        ((0, 0, 1, 1), (0.4, 2.0), 0.05),
        ((0, 0, 1, 1, 2, 2, 3, 3), (0.4, 0.9, 1.5, 2.0), 0.05),
        ((0, 0, 0, 0, 1, 1, 2), (0.4, 1.2, 2.0), 0.1),
    ],
)
def test_between_hosts_plans_are_ordered_by_the_slowest_hosts_link(
    hosts: tuple[int, ...], slowness: tuple[float, ...], within: float
) -> None:
    """A price on what leaves all hosts together is nearly a constant, and had reversed the order of such plans."""
    network, model = Network(hosts, slowness), ExchangeModel()
    model.fit(network.measured(60, seed=0), [1.0] * 60)
    unseen = network.plans(200, seed=1)
    truth = np.array([network.ms(dims) for dims in unseen])
    predicted = np.array([model.ms(np.array(dims, dtype=float), 4096, hosts)[0] for dims in unseen])
    assert np.abs(predicted / truth - 1).max() < within
    clearly_slower = truth[:, None] > (1 + within) * truth
    assert (predicted[:, None] > predicted)[clearly_slower].all()


def test_after_one_plan_alone_a_slow_exchange_between_hosts_is_put_down_to_the_links() -> None:
    """Ten times slower than expected: then dims on one host cost, and dims on one of its ranks hardly do."""
    model, hosts = ExchangeModel(), (0, 0, 1, 1)
    measured = CommsSample((300,) * 4, 1024, (60.0,) * 4, (60.0,) * 4, hosts=hosts)
    model.fit([measured], [1.0])
    plans = ([300.0] * 4, [400.0, 400.0, 200.0, 200.0], [400.0, 200.0, 400.0, 200.0])
    even, on_one_host, on_one_rank = (model.ms(np.array(dims), 1024, hosts).max() for dims in plans)
    assert even == pytest.approx(60, rel=0.1)
    assert on_one_host == pytest.approx(80, rel=0.1) and on_one_rank < 1.1 * even


def test_a_network_between_hosts_that_is_faster_than_the_prior_still_has_prices_of_dims() -> None:
    """Pulled to shipped prices of a loopback, dims and the link became free: any exchange looked as long."""
    model, hosts = Planner().costs.exchange, (0, 0, 1, 1)
    model.load_prices(most_alike({})["comms"])

    def even_and_piled() -> list[np.ndarray]:
        return [model.ms(np.array(dims), 8192, hosts) for dims in ([300.0] * 4, [900.0, 100.0, 100.0, 100.0])]

    even, piled = even_and_piled()
    costlier = piled / even - 1
    measured = CommsSample((300,) * 4, 8192, (0.15,) * 4, (0.15,) * 4, hosts=hosts)
    model.fit([measured] * 5, [1.0] * 5)
    even, piled = even_and_piled()
    assert even == pytest.approx(0.15, rel=0.2)
    assert piled / even - 1 == pytest.approx(costlier, rel=0.3)


def test_least_squares_without_samples_keeps_the_prior_and_never_goes_negative() -> None:
    prior = np.array([1.0, 2.0])
    unseen = np.array([[1.0, 0.0]] * 50)  # the second column never occurs
    fitted = fit_nonnegative(unseen, np.full(50, 3.0), np.ones(50), prior)
    assert fitted[0] == pytest.approx(3.0, rel=0.01) and fitted[1] == 2.0
    falling = fit_nonnegative(np.array([[1.0, 5.0], [5.0, 1.0]]), np.array([1.0, 9.0]), np.ones(2), prior)
    assert (falling >= 0).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 8))
def test_least_squares_is_at_its_optimum(seed: int, samples: int, columns: int) -> None:
    """No price gains by a change: none at all where it is positive, none upwards where it is 0."""
    generator = np.random.default_rng(seed)
    matrix = generator.standard_normal((samples, columns)) * 10.0 ** generator.uniform(-3, 3, columns)
    gram = matrix.T @ matrix + np.diag(0.01 + (matrix**2).mean(axis=0))
    wanted = matrix.T @ generator.standard_normal(samples)
    solution = solve_nonnegative(gram, wanted)
    slope = (wanted - gram @ solution) / np.sqrt(np.diag(gram))
    assert (solution >= 0).all() and (slope <= 1e-6).all()
    np.testing.assert_allclose(slope[solution > 0], 0, atol=1e-6)


def observed(planner: Planner, cluster: SimulatedCluster, ranks_of: dict[str, int], tables, stats) -> StepProfile:  # type: ignore[no-untyped-def]
    profile = cluster.profile(tables, stats, ShardingPlan(ranks_of, 2), BATCH)
    planner.costs.observe(profile)
    return profile


def test_each_profile_lowers_the_error_on_the_next(fitted: Planner) -> None:
    planner = Planner("auto", seed=0)
    costs = {**fitted.costs.to_json(), "replay": ReplayBuffer().to_json()}
    planner.costs.load_json(costs)
    cluster = SimulatedCluster(seed=9, noise=0.01)  # another machine than the one that was learned
    tables, stats = some_tables(24, seed=9)
    errors = []
    generator = np.random.default_rng(0)
    for _ in range(4):
        profile = cluster.profile(
            tables, stats, ShardingPlan({t.name: int(generator.integers(2)) for t in tables}, 2), BATCH
        )
        predicted = planner.costs.predict(task_of(tables, stats, 2), profile.plan)
        errors.append(max(prediction_error(predicted, profile.ranks, (stage,)) or 0.0 for stage in PLANNED_STAGES))
        planner.costs.observe(profile)
    assert errors[-1] < errors[0] and errors[-1] < 0.05


def test_a_slow_rank_is_learned_given_less_and_forgiven_when_it_recovers(fitted: Planner) -> None:
    planner = Planner("auto", seed=0)
    planner.load_state_dict(fitted.state_dict())
    tables, stats = some_tables(16, seed=10)
    even = {t.name: i % 2 for i, t in enumerate(tables)}
    for _ in range(2):
        observed(planner, SimulatedCluster(seed=0, slowdown={1: 2.0}), even, tables, stats)
    slow, fast = planner.rank_slowness(2)[[1, 0]]
    assert 1.7 < slow / fast < 2.3
    plan, _ = planner.propose(task_of(tables, stats, 2), ShardingPlan(even, 2))[0]
    by_rank = SimulatedCluster(seed=0).profile(tables, stats, plan, BATCH).ranks
    assert by_rank[1].bwd_compute_ms < 0.75 * by_rank[0].bwd_compute_ms
    for _ in range(4):
        observed(planner, SimulatedCluster(seed=0), even, tables, stats)
    assert np.divide(*planner.rank_slowness(2)[[1, 0]]) < 1.25


def test_the_state_of_a_planner_that_observed_is_what_the_strict_reader_expects(fitted: Planner) -> None:
    planner = Planner("auto", seed=0)
    planner.load_state_dict(fitted.state_dict())
    tables, stats = some_tables(16, seed=10)
    for slowdown in ({}, {1: 2.0}):
        cluster = SimulatedCluster(seed=0, slowdown=slowdown)
        observed(planner, cluster, {t.name: i % 2 for i, t in enumerate(tables)}, tables, stats)
    state = planner.state_dict()
    assert checked(PlannerRecord, state) == state
    damaged: list[tuple[str, dict[str, Any]]] = [
        ("policy", {key: value for key, value in state.items() if key != "policy"}),
        ("speed", {**state, "speed": [1.0, 2.0]}),
        ("costs.corrections.eras", {**state, "costs": {**state["costs"], "corrections": {"eras": [[0]]}}}),
        ("costs.replay", {**state, "costs": {**state["costs"], "replay": None}}),
    ]
    for key, record in damaged:
        with pytest.raises(FormatError, match=f"'{key}"):
            planner.load_state_dict(record)
    assert planner.state_dict() == state  # as it was


def test_a_few_per_cent_between_ranks_are_not_taken_for_a_slow_rank(fitted: Planner) -> None:
    planner = Planner("auto", seed=0)
    planner.load_state_dict(fitted.state_dict())
    tables, stats = some_tables(16, seed=10)
    even = {t.name: i % 3 for i, t in enumerate(tables)}
    cluster = SimulatedCluster(seed=0, slowdown={1: 1.03, 2: 0.98})
    planner.costs.observe(cluster.profile(tables, stats, ShardingPlan(even, 3), BATCH))
    slowness = planner.rank_slowness(3)
    assert slowness.max() / slowness.min() < 1.03


def test_the_replay_buffer_is_bounded_and_counts_recent_profiles_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_SAMPLES", 3)
    monkeypatch.setattr(replay, "MOST_PROFILES", 2)
    buffer = ReplayBuffer()
    tables, stats = some_tables(2)
    for i in range(5):
        buffer.add([ShardSample(tuple(tables), tuple(stats), BATCH, float(i), 1.0)])
        plan = ShardingPlan({t.name: 0 for t in tables}, 1)
        buffer.add_profile(
            StepProfile(plan, tuple(tables), tuple(stats), BATCH, (RankCost(float(i)),), source="simulated")
        )
    assert [shard.fwd_compute_ms for shard in buffer.shards] == [2.0, 3.0, 4.0]
    assert [profile.ranks[0].fwd_compute_ms for profile, _ in buffer.weighted_profiles()] == [3.0, 4.0]
    weights = [weight for _, weight in buffer.weighted_profiles()]
    assert weights[0] == pytest.approx(0.8 * weights[1]) and sum(weights) == pytest.approx(1.0)
    again = ReplayBuffer.from_json(buffer.to_json())
    assert again.shards == buffer.shards and again.profiles == buffer.profiles


def test_a_shard_of_an_older_version_which_names_its_rank_is_read() -> None:
    tables, stats = some_tables(2)
    sample = ShardSample(tuple(tables), tuple(stats), BATCH, 1.0, 2.0)
    for older in ({"rank": None}, {"rank": 3}, {"moment": 0}):
        assert ShardSample.from_json(sample.to_json() | older) == sample


def test_a_prediction_is_refused_as_an_observation(fitted: Planner) -> None:
    tables, stats = some_tables(2)
    plan = ShardingPlan({t.name: 0 for t in tables}, 1)
    predicted = StepProfile(plan, tuple(tables), tuple(stats), BATCH, (RankCost(1.0),), source="predicted")
    with pytest.raises(ValueError, match="not an observation"):
        Planner("search").costs.observe(predicted)
