"""The micro-benchmark: ids follow the statistics, shards have plausible costs, ranks agree, failures reach all."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrm_autoshard.costs import PLANNED_STAGES, RankCost, StepProfile
from dlrm_autoshard.distributed.device import Timer
from dlrm_autoshard.distributed.ranks.runtime import Runtime, keep_freed_memory, runtime_of
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.dreamshard.pool import TablePool, synthetic_pool, zipf_stats
from dlrm_autoshard.probe import shard_probe
from dlrm_autoshard.probe.drawn_ids import draw_ids, scattered
from dlrm_autoshard.probe.isolated_probe import IsolatedProbe
from dlrm_autoshard.probe.rank_probe import ProbeError, RankProbe, median_profile
from dlrm_autoshard.probe.shard_probe import ShardProbe, ShardTime, in_fewer_rows
from dlrm_autoshard.probe.step_timer import Step, StepTimer
from dlrm_autoshard.tables import Shard, TableConfig, TableStats, measure_table_stats
from tests.busy_core import busy
from tests.ranks import run_ranks

BATCH = 512


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 200_000),
    pooling=st.floats(0.01, 40),
    skew=st.floats(0.5, 1.5),
    head=st.floats(0, 100),
    batch_size=st.sampled_from([64, 500, 2048]),
)
@example(rows=1563, pooling=5.25, skew=1.5, head=0.0, batch_size=500)
def test_drawn_ids_have_the_statistics_that_were_asked_for(
    rows: int, pooling: float, skew: float, head: float, batch_size: int
) -> None:
    table, wanted = TableConfig("t", rows, 8), zipf_stats(rows, pooling, skew, head, batch_size)
    lengths_B, ids_N = draw_ids(table, wanted, batch_size, draw=0)
    assert len(ids_N) == lengths_B.sum() == round(pooling * batch_size)
    assert ids_N.min(initial=0) >= 0 and ids_N.max(initial=0) < rows
    if len(ids_N) >= 200:
        [drawn] = measure_table_stats(lengths_B[None], ids_N)
        assert drawn.mean_reuse == pytest.approx(wanted.mean_reuse, rel=0.05)
        off = np.abs(np.array(drawn.reuse_histogram) - wanted.reuse_histogram).sum()
        assert off < 0.1 + 20 * drawn.mean_reuse / len(ids_N)


def test_ids_of_real_data_are_drawn_with_their_histogram() -> None:
    generator = np.random.default_rng(0)
    ids = (10_000 ** generator.random(20_000)).astype(np.int64) - 1
    lengths = np.full(2_000, 10)
    [wanted] = measure_table_stats(lengths[None], ids)
    [drawn] = measure_table_stats(*_stacked(draw_ids(TableConfig("t", 10_000, 8), wanted, 2_000, draw=0)))
    assert drawn.reuse_histogram == pytest.approx(wanted.reuse_histogram, abs=0.02)


def test_draws_repeat_exactly_and_successive_ones_share_their_hot_rows_only() -> None:
    table, stats = TableConfig("t", 1_000_000, 8), zipf_stats(1_000_000, 20, 1.1, 1.0, 1024)
    first, again = draw_ids(table, stats, 1024, 0)[1], draw_ids(table, stats, 1024, 0)[1]
    assert np.array_equal(first, again)
    ids, counts = np.unique(first, return_counts=True)
    other = draw_ids(table, stats, 1024, 1)[1]
    assert np.isin(ids[counts > 1], other).all()
    assert np.isin(ids[counts == 1], other).mean() < 0.2


@settings(deadline=None, max_examples=60)
@given(num_rows=st.integers(1, 5000))
def test_ranks_of_heat_are_scattered_over_rows_one_to_one(num_rows: int) -> None:
    assert sorted(scattered(np.arange(num_rows), num_rows)) == list(range(num_rows))


@pytest.mark.parametrize("num_rows", [2**20, 10**6, 50_000_000])
def test_hot_rows_lie_at_random_not_evenly(num_rows: int) -> None:
    """Gaps between neighbours of random rows are exponential: their standard deviation is their mean."""
    gaps = np.diff(np.sort(scattered(np.arange(20_000), num_rows)))
    assert 0.93 < gaps.std() / gaps.mean() < 1.07


def test_a_part_looks_up_the_rows_of_its_table_in_as_many_rows_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, int]]()

    def ids(table: TableConfig, stats: TableStats, batch_size: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append((table.name, draw))
        return draw_ids(table, stats, batch_size, draw)

    monkeypatch.setattr(shard_probe, "draw_ids", ids)
    probe = ShardProbe(buffer_gib=0.01, repeats=1, seconds_per_shard=0.0)  # of the table's 0.24 GiB
    whole, stats = TableConfig("t", 1_000_000, 64), zipf_stats(1_000_000, 5.0, 1.1, 1.0, BATCH)
    part = whole.part(0, 32)
    assert all(np.array_equal(draw_ids(whole, stats, BATCH, 1)[i], draw_ids(part, stats, BATCH, 1)[i]) for i in (0, 1))
    probe.measure([whole], [stats], BATCH)
    drawn = list(asked)
    probe.measure([part], [stats], BATCH, [whole])
    assert asked == drawn  # the very same, as they were put into the table's rows
    probe.measure([part], [stats], BATCH)
    assert len(asked) == 2 * len(drawn)  # alone, it has twice as many rows there


def test_an_empty_shard_takes_no_time_and_more_tables_take_more() -> None:
    pool, probe = _pool(12), ShardProbe(buffer_gib=0.05)
    assert probe.measure([], [], BATCH) == ShardTime()
    small = probe.measure(pool.tables[:2], pool.stats[:2], BATCH)
    large = probe.measure(pool.tables, pool.stats, BATCH)
    assert 0 < small.fwd_compute_ms < large.fwd_compute_ms
    assert 0 < small.bwd_compute_ms < large.bwd_compute_ms


def test_a_gpu_is_held_back_until_a_round_of_steps_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 a shard whose lookup and update took 0.1 ms was measured as the 1.2 ms of their launches. And it still
    was where fbgemm read a value back in a lookup's first step, which waited for the holding to end."""
    seen: list[str] = []

    class Lookup(torch.nn.Bilinear):
        steps = 0

        def forward(self, *batch: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            if self.steps == 1:
                seen.append("read back")
            return super().forward(*batch)

    class Launched(Timer):
        def mark(self) -> Any:
            seen.append("launched")
            return super().mark()

        def finish(self, mark: Any) -> None:
            seen.append("waited for")

    def held(cycles: int) -> None:
        assert cycles > 0
        seen.append("held")

    monkeypatch.setattr(torch.cuda, "_sleep", held)
    timer = StepTimer(torch.device("cpu"), warmup=1, repeats=2, seconds=0.0)
    timer._timer, timer._steps_a_round, timer._cuda = Launched(), 3, True
    steps = timer._steps(Lookup(2, 2, 2), [(torch.ones(1, 2), torch.ones(1, 2))], torch.ones(1, 2))
    assert len(list(itertools.islice(steps, 4))) == 4
    round_of_three = ["held"] + 9 * ["launched"] + 3 * ["waited for"]
    assert seen == ["read back", *round_of_three, *round_of_three[:-2]]


class Waiting(StepTimer):
    """Of steps that compute for 1 and 2 ms and wait for their core 9 ms, in every third of them."""

    def _steps(self, *_: Any) -> Iterator[Step]:
        for number in itertools.count():
            yield Step(0.001, 0.002 + 0.009 * (number % 3 == 2), 0.001, 0.002)


def test_waiting_for_a_core_that_others_want_is_part_of_every_step_not_of_those_that_it_fell_to() -> None:
    """A median of steps, of which few wait, says that a rank with half a core is as fast as the others."""
    forward, backward = Waiting(torch.device("cpu"), warmup=0, repeats=3, seconds=0.0).ms(None, [], torch.ones(1))
    assert forward == pytest.approx(3 * [2.0]) and backward == pytest.approx(3 * [4.0])
    alone = Waiting(torch.device("cpu"), warmup=0, repeats=2, seconds=0.0, undisturbed=True)
    assert alone.ms(None, [], torch.ones(1)) == ([1.0, 1.0], [2.0, 2.0])


def test_a_threads_clock_that_ticks_coarsely_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 3 ms would take none by one of 10 ms, as sandboxes have."""
    monkeypatch.setattr(time, "thread_time", lambda: time.perf_counter() // 0.01 * 0.01)
    forward, backward = Waiting(torch.device("cpu"), warmup=0, repeats=3, seconds=0.0).ms(None, [], torch.ones(1))
    assert forward == [1.0, 1.0, 1.0] and backward == [2.0, 2.0, 11.0]


def test_beside_a_process_that_never_rests_even_short_steps_wait_half_of_the_time() -> None:
    """By their medians they would not: a step of 0.5 ms fits into the time that a rank has its core for."""
    core = max(os.sched_getaffinity(0))
    with busy(core):
        [factor] = run_ranks(_wait_factor, 1, cores=[core])
    assert 1.5 < factor < 8, factor  # longer where other tests want that core as well


def _wait_factor(rank: int, world_size: int) -> float:
    timer = StepTimer(torch.device("cpu"), warmup=1, repeats=3, seconds=0.02)
    weights = torch.ones(400, 400, requires_grad=True)
    for _ in range(40):
        timer.ms(weights.mm, [(torch.ones(400, 40),)], torch.ones(400, 40))  # type: ignore[list-item]
    return timer.wait_factor


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_every_optimizer_and_dtype_is_measured(optimizer: Any, dtype: Any) -> None:
    tables = [TableConfig(f"t{i}", 1_000, 8, dtype=dtype, pooling="mean") for i in range(3)]
    time = ShardProbe(optimizer, buffer_gib=0.01, repeats=1).measure(tables, [TableStats(3.0)] * 3, 64)
    assert time.fwd_compute_ms > 0 and time.bwd_compute_ms > 0


def test_tables_beyond_the_buffer_are_measured_with_the_rows_that_fit() -> None:
    huge = TableConfig("huge", 2**33, 128)
    time = ShardProbe(buffer_gib=0.01, repeats=1).measure([huge], [TableStats(2.0)], 64)
    assert time.bwd_compute_ms > 0


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=60), min_size=1, max_size=4))
def test_rows_of_a_table_that_does_not_fit_repeat_as_its_ids_do(draws: list[list[int]]) -> None:
    placed = [ids.tolist() for ids in in_fewer_rows([torch.tensor(ids, dtype=torch.int32) for ids in draws], 240)]
    assert [len(ids) for ids in placed] == [len(ids) for ids in draws]
    pairs = {pair for ids, rows in zip(draws, placed, strict=True) for pair in zip(ids, rows, strict=True)}
    assert len({i for i, _ in pairs}) == len({row for _, row in pairs}) == len(pairs)  # one to one, over all draws
    assert all(0 <= row < 240 for _, row in pairs)


def test_isolated_mode_measures_a_shard_once_and_charges_empty_ranks_only_for_exchanges() -> None:
    pool = _pool(6)
    isolated = IsolatedProbe(pool.tables, pool.stats, BATCH, ShardProbe(buffer_gib=0.05, repeats=3), ExchangeModel())
    names = [table.name for table in pool.tables]
    plan = ShardingPlan({name: i % 2 for i, name in enumerate(names)}, world_size=3)
    mirrored = ShardingPlan({name: 1 - i % 2 for i, name in enumerate(names)}, world_size=3)
    first, second = isolated.measure([plan, mirrored])
    assert len(isolated.shard_times) == 3  # two shards and the empty one, whatever rank they are on
    assert first.ranks[0] == second.ranks[1] and first.source == "probe"
    assert first.ranks[2].fwd_compute_ms == first.ranks[2].bwd_compute_ms == 0
    assert first.ranks[2].fwd_comms_ms == first.ranks[0].fwd_comms_ms > 0  # all wait for the slowest one's exchange


def test_ranks_measure_plans_together_and_other_ranks_are_free_afterwards() -> None:
    results = run_ranks(_measure_on_ranks, 3, timeout=60)
    profiles, times = results[0]
    assert results[1:] == [None, None]
    for profile in profiles:
        assert all(rank.stage(stage) >= 0 for rank in profile.ranks for stage in PLANNED_STAGES)
        assert profile.ranks[0].fwd_comms_ms > 0 and profile.source == "probe"
    assert profiles[0].ranks[2].fwd_compute_ms == 0 and profiles[0].ranks[1].fwd_compute_ms > 0
    assert len(times) == 4 and all(time.fwd_compute_ms > 0 and time.bwd_compute_ms > 0 for time in times)


def test_a_rank_that_cannot_measure_fails_rank_zero_and_hangs_nobody() -> None:
    messages = run_ranks(_fail_on_rank_one, 2, timeout=60)
    assert messages[0] == (
        "rank 1 could not measure its shard: out of memory, says the test. Set autoshard.measure_plans=0 to start "
        "without measuring."
    )
    assert messages[1] is None


def test_rounds_are_told_as_their_median() -> None:
    plan = ShardingPlan({"t_0": 0}, 1)
    pool = _pool(1)
    profiles = [
        StepProfile(plan, pool.tables, pool.stats, BATCH, (RankCost(*cost),), "probe", noise)
        for cost, noise in (((1, 2, 3, 4), 0.1), ((9, 2, 1, 5), 0.3), ((2, 8, 2, 4), 0.2))
    ]
    assert median_profile(profiles).ranks == (RankCost(2, 2, 2, 4),)
    assert median_profile(profiles).noise == pytest.approx(3.5 / 16)  # the rounds' steps: 10, 16 and 17 ms
    steady = [replace(profile, ranks=profiles[0].ranks) for profile in profiles]
    assert median_profile(steady).noise == 0.2  # rounds agree: what is left is how far each one's own steps differ


@pytest.mark.slow
def test_windows_of_one_buffer_cost_what_real_tables_cost() -> None:
    from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
    from dlrm_autoshard.distributed.tables.storage import Storage

    class OnRealTables(ShardProbe):
        def _module(self, tables: Any, rows: Any) -> Any:
            config = TablesConfig(optimizer=TableOptimizerConfig(lr=1e-6))
            storage = Storage(tables, config, torch.device("cpu"))
            storage.hold([table.name for table in tables])
            self.kept = storage
            return storage.lookups[0].tbe

    pool = synthetic_pool(8, seed=5, batch_size=2048, rows=(1e4, 1e6))
    ratios = []
    for _ in range(5):
        windows = ShardProbe().measure(pool.tables, pool.stats, 2048)
        real = OnRealTables(warmup=4).measure(pool.tables, pool.stats, 2048)
        ratios.append((windows.fwd_compute_ms + windows.bwd_compute_ms) / (real.fwd_compute_ms + real.bwd_compute_ms))
    assert np.median(ratios) == pytest.approx(1.0, abs=0.15), ratios


def _measure_on_ranks(rank: int, world_size: int) -> tuple[list[StepProfile], list[ShardTime]] | None:
    pool = _pool(6)
    names = [table.name for table in pool.tables]
    plans = [
        ShardingPlan({name: i % 2 for i, name in enumerate(names)}, world_size),
        ShardingPlan({name: i % 3 for i, name in enumerate(names)}, world_size),
        ShardingPlan(
            {"t_0[0:8]": 0, f"t_0[8:{pool.tables[0].embedding_dim}]": 2} | {n: 1 for n in names[1:]}, world_size
        ),
    ]
    probe = RankProbe(_runtime(), pool.tables, pool.stats, 3 * 128, ShardProbe(buffer_gib=0.01, repeats=2))
    sets = [[*map(Shard, shard)] for shard in (["t_0[0:8]"], ["t_1", "t_2"], ["t_3"], names)]
    return probe.on_rank_zero(lambda: (probe.measure(plans), probe.measure_shards(sets)))


def _fail_on_rank_one(rank: int, world_size: int) -> str | None:
    class Failing(ShardProbe):
        def measure(self, tables: Any, stats: Any, batch_size: int, wholes: Any = None) -> ShardTime:
            if rank == 1:
                raise RuntimeError("out of memory, says the test")
            return super().measure(tables, stats, batch_size, wholes)

    pool = _pool(2)
    plan = ShardingPlan({"t_0": 0, "t_1": 1}, world_size)
    probe = RankProbe(_runtime(), pool.tables, pool.stats, 128, Failing(buffer_gib=0.01, repeats=1))
    try:
        probe.on_rank_zero(lambda: probe.measure([plan]))
    except ProbeError as error:
        return str(error)
    return None


def _no_room_on_rank_one(rank: int, world_size: int) -> str | None:
    pool = _pool(2)
    probe = RankProbe(_runtime(), pool.tables, pool.stats, 128, ShardProbe(buffer_gib=0.01, repeats=1))
    if rank == 1:
        probe._keep = lambda num_bytes: (_ for _ in ()).throw(MemoryError("no room, says the test"))  # type: ignore[method-assign]
    try:
        probe.on_rank_zero(lambda: probe.measure([ShardingPlan({"t_0": 0, "t_1": 1}, world_size)]))
    except ProbeError as error:
        return str(error)
    return None


def test_a_rank_without_room_for_an_exchange_leaves_no_other_waiting_in_it() -> None:
    said, _ = run_ranks(_no_room_on_rank_one, 2, timeout=30)
    assert said is not None and "rank 1 could not measure its shard: no room, says the test" in said


def _runtime() -> Runtime:
    world = dist.group.WORLD
    assert world is not None
    return runtime_of(world, torch.device("cpu"))


def _pool(num_tables: int) -> TablePool:
    return synthetic_pool(num_tables, seed=3, batch_size=BATCH, rows=(1e2, 1e5), pooling=(1.0, 10.0))


def _stacked(drawn: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return drawn[0][None], drawn[1]


def _faults_while_timed(rank: int, world_size: int, tables: int, rounds: int) -> int:
    """Pages that this rank faults in within what is timed of exchanges, while plans of all sizes have their turns."""
    keep_freed_memory()
    pool, draw, faults = _pool(tables), np.random.default_rng(0), list[int]()
    probe = RankProbe(_runtime(), pool.tables, pool.stats, BATCH, ShardProbe())
    timed = probe._time_collective

    def counted(collective: Callable[[], object]) -> list[float]:
        def once() -> None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            collective()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

        times = timed(once)
        del faults[-7:-5]  # to warm up
        return times

    probe._time_collective = counted  # type: ignore[method-assign]
    names = [table.name for table in pool.tables]
    owners = draw.integers(world_size, size=(12, tables)).tolist()
    plans = [ShardingPlan(dict(zip(names, of_plan, strict=True)), world_size) for of_plan in owners]
    for plan in plans * rounds:
        probe.measure_exchange(plan)
    assert len(faults) == 2 * 5 * len(plans) * rounds
    return sum(faults)


def test_exchanges_of_one_plan_after_another_are_timed_without_page_faults() -> None:
    """A heap that tensors of ever other sizes fragment grows for ever, and to fault 8 MB in took five times as long as
    to exchange them."""
    assert max(run_ranks(_faults_while_timed, 2, 50, 6, timeout=120)) < 2000
