"""Splitting tables by columns: where it pays, within what is asked, and never slower by the planner's own evidence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard import Constraints, PlanError, Planner, ShardingPlan, SimulatedCluster, Topology
from dlrm_autoshard.autoshard.table_observer import of_whole_tables
from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.distributed.lookup.wire import Wire
from dlrm_autoshard.plan import shard_tables
from dlrm_autoshard.planner.moves.relabel import relabelled
from dlrm_autoshard.planner.search.splits import split_search
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.tables import Shard, TableConfig, TableStats, measure_table_stats, stats_of_part
from tests.planning_problems import BATCH, measurer, random_samples, some_tables, some_task
from tests.split_plans import plans_of

FOUR = Splits(max_parts=4, min_dim=16)


def task_of(
    tables: list[TableConfig], stats: list[TableStats], ranks: int, splits: Splits = FOUR, **asked: object
) -> PlacementTask:
    memory = asked.pop("memory", None)
    return PlacementTask.build(
        tables, stats, Topology(ranks, memory), batch_size=BATCH, splits=splits, **asked  # type: ignore[arg-type]
    )  # fmt: skip


def with_a_dominant_table(count: int = 12, seed: int = 0) -> tuple[list[TableConfig], list[TableStats]]:
    """Half of all lookups are `big`'s, at dim 128."""
    tables, stats = some_tables(count, seed)
    rest = sum(stat.mean_pooling * table.embedding_dim for table, stat in zip(tables, stats, strict=True))
    return [TableConfig("big", 100_000, 128), *tables], [TableStats(rest / 128, batch_size=BATCH), *stats]


def learned(algorithm: str = "auto", *, seed: int = 0) -> Planner:
    """Fitted to a simulated machine on tables and parts of many dims."""
    planner = Planner(algorithm, seed=seed)
    planner.costs.learn(random_samples(SimulatedCluster(seed=seed), profiles=60), updates=200)
    return planner


def true_ms(task: PlacementTask, plan: ShardingPlan) -> float:
    cluster = SimulatedCluster(seed=0, noise=0.0)
    return step_cost_ms(cluster.profile(task.wholes, stats_of(task), plan, task.batch_size).ranks)


def stats_of(task: PlacementTask) -> list[TableStats]:
    by_name = dict(zip(task.names, task.stats, strict=True))
    return [by_name[table.shard] for table in task.wholes]


def test_a_table_costlier_than_an_even_share_is_split_and_the_step_gets_quicker() -> None:
    tables, stats = with_a_dominant_table()
    planner = learned()
    whole, split = (planner.plan(task_of(tables, stats, 4, splits)) for splits in (Splits(), FOUR))
    assert not whole.plan.split_tables and "big" in split.plan.split_tables
    task = task_of(tables, stats, 4)
    assert split.predicted_ms < 0.85 * whole.predicted_ms
    assert true_ms(task, split.plan) < 0.85 * true_ms(task, whole.plan)
    assert shard_tables(tables, split.plan)  # its parts make up the tables
    assert len(split.plan.parts_of("big")) <= 4 and len(set(split.plan.ranks_of("big"))) > 1


def test_where_splits_change_what_is_trained_the_result_says_what_one_would_bring() -> None:
    tables, stats = with_a_dominant_table()
    result = learned().plan(task_of(tables, stats, 4, Splits(4, 16, allowed=False)))
    assert not result.plan.split_tables
    assert result.would_split is not None and "big" in result.would_split.plan.split_tables
    assert result.would_split.predicted_ms < 0.85 * result.predicted_ms
    record = result.to_json()["would_split"]
    assert record["predicted_ms"] == result.would_split.predicted_ms
    assert record["tables"] == list(result.would_split.plan.split_tables)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_parts_keep_to_their_limits_memory_and_constraints(data: st.DataObject) -> None:
    count, ranks = data.draw(st.integers(2, 10)), data.draw(st.integers(2, 4))
    tables, stats = with_a_dominant_table(count, seed=data.draw(st.integers(0, 5)))
    splits = Splits(data.draw(st.integers(1, 6)), data.draw(st.sampled_from([4, 16, 32, 64])))
    names = data.draw(st.permutations([table.name for table in tables]))
    constraints = Constraints({names[0]: ranks - 1}, together=(tuple(names[1:3]),), apart=((names[0], names[-1]),))
    whole = task_of(tables, stats, ranks, splits)
    memory = int(data.draw(st.sampled_from([0.7, 1.1, 4.0])) * sum(whole.table_bytes.values()) / ranks)
    task = task_of(tables, stats, ranks, splits, memory=(memory,) * ranks, constraints=constraints)
    try:
        candidates = Planner().plan(task).candidates
    except PlanError:
        return
    for candidate in candidates:
        task.check(candidate.plan)
        shards = shard_tables(tables, candidate.plan)
        for name in candidate.plan.split_tables:
            dims = [shard.embedding_dim for shard in shards if shard.name.startswith(f"{name}[")]
            assert len(dims) <= splits.max_parts and min(dims) >= splits.min_dim


def test_a_table_that_fits_no_rank_whole_is_split_and_without_splits_it_is_named() -> None:
    tables, stats = [TableConfig("huge", 1_000_000, 128), TableConfig("small", 1000, 32)], [TableStats(2.0)] * 2
    need = task_of(tables, stats, 2).table_bytes["huge"]
    memory = (int(0.6 * need),) * 2
    plan = Planner().plan(task_of(tables, stats, 2, FOUR, memory=memory)).plan
    assert plan.split_tables == ("huge",) and len(plan.ranks_of("huge")) == 2
    for splits in (Splits(), Splits(4, 16, allowed=False)):
        with pytest.raises(PlanError, match="'huge' needs"):
            Planner().plan(task_of(tables, stats, 2, splits, memory=memory))


@pytest.mark.parametrize("algorithm", ["auto", "lookup_greedy"])
def test_a_table_that_fits_no_rank_by_columns_is_split_by_rows_and_no_other_is(algorithm: str) -> None:
    tables, stats = [TableConfig("huge", 1_000_000, 16), TableConfig("small", 1000, 32)], [TableStats(2.0)] * 2
    need = task_of(tables, stats, 2).table_bytes["huge"]
    for splits in (Splits(4, 16, rows=True), Splits(4, 16, allowed=False, rows=True), Splits(1, 16, rows=True)):
        task = task_of(tables, stats, 3, splits, memory=(int(2 * need / 3),) * 3)
        plan = Planner(algorithm).plan(task).plan
        assert plan.row_split_tables == plan.split_tables == ("huge",) and len(plan.ranks_of("huge")) > 1
        task.check(plan)
        assert task.splits_enough(plan) and not task_of(tables, stats, 3).splits_enough(plan)
        roomy = Planner(algorithm).plan(task_of(tables, stats, 3, splits, memory=(2 * need,) * 3)).plan
        assert not roomy.row_split_tables
    with pytest.raises(PlanError, match=r"set autoshard\.splits\.min_dim: 8\.$"):
        Planner(algorithm).plan(task_of(tables, stats, 3, Splits(4, 16), memory=(int(2 * need / 3),) * 3))


@pytest.mark.parametrize("algorithm", ["auto", "lookup_greedy"])
@pytest.mark.parametrize(
    ("splits", "settings"),
    [
        (Splits(4, 16, allowed=False), "tables.optimizer.per_part: true (or use sgd)"),
        (Splits(1, 16), "autoshard.splits.max_parts: 8"),
        (Splits(2, 16), "autoshard.splits.max_parts: 8"),
        (Splits(8, 32), "autoshard.splits.min_dim: 16"),
        (Splits(2, 32), "autoshard.splits.max_parts: 8 and autoshard.splits.min_dim: 16"),
        (Splits(2, 64, allowed=False), "tables.optimizer.per_part: true (or use sgd) and autoshard.splits.max_parts: 8 "
         "and autoshard.splits.min_dim: 16"),
    ],
)  # fmt: skip
def test_where_only_splits_would_fit_the_refusal_says_what_to_set(
    splits: Splits, settings: str, algorithm: str
) -> None:
    tables, stats = [TableConfig("huge", 100_000, 128), TableConfig("small", 1000, 32)], [TableStats(2.0)] * 2
    parts = 4 if settings == "tables.optimizer.per_part: true (or use sgd)" else 8
    need = task_of(tables, stats, 2).table_bytes["huge"]
    task = task_of(tables, stats, parts + 1, splits, memory=(int(1.1 * need / parts),) * (parts + 1))
    with pytest.raises(PlanError) as refused:
        Planner(algorithm).plan(task)
    assert "'huge' needs" in str(refused.value)
    assert str(refused.value).endswith(f" Split by columns, the tables would fit: set {settings}.")


def test_where_no_split_would_fit_either_the_refusal_says_that_it_was_tried() -> None:
    tables, stats = [TableConfig(name, 10_000, 4) for name in "abc"], [TableStats(2.0)] * 3
    need = task_of(tables, stats, 2).table_bytes["a"]
    for splits in (Splits(), FOUR, Splits(4, 16, allowed=False)):
        with pytest.raises(PlanError, match=r"No placement fits: .*Splitting tables by columns was tried, too\.$"):
            Planner().plan(task_of(tables, stats, 2, splits, memory=(int(1.6 * need),) * 2))


@pytest.mark.parametrize("splits", [FOUR, Splits(4, 16, allowed=False)])
def test_where_all_ranks_together_have_too_little_no_split_is_tried(
    splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unasked(task: PlacementTask, name: str) -> None:
        raise AssertionError("halves take no less")

    monkeypatch.setattr(PlacementTask, "split", unasked)
    tables, stats = with_a_dominant_table()
    memory = int(0.99 * sum(task_of(tables, stats, 2).table_bytes.values()) / 2)
    for constraints, words in ((Constraints(), "ranks have"), (Constraints(pinned={"t_0": 5}), "there are 2 ranks")):
        with pytest.raises(PlanError, match=words):
            Planner().plan(task_of(tables, stats, 2, splits, memory=(memory,) * 2, constraints=constraints))


def test_auto_never_returns_a_split_plan_that_its_evidence_calls_slower_than_an_unsplit_one() -> None:
    for seed in range(3):
        tables, stats = with_a_dominant_table(10, seed)
        task, cluster = task_of(tables, stats, 3), SimulatedCluster(seed=seed, noise=0.05)
        measure = measurer(cluster)
        result = learned(seed=1).plan(task, measure=partial(measure, task))
        unsplit = [c for c in result.candidates if not c.plan.split_tables and c.measured_ms is not None]
        assert unsplit and result.chosen.estimate_ms <= min(c.estimate_ms for c in unsplit)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_table_with_nearly_all_lookups_is_cut_into_one_part_a_rank(ranks: int) -> None:
    """Halvings alone would make it two, four or eight."""
    tables, stats = some_tables(8, seed=2)
    tables, stats = [TableConfig("big", 100_000, 240), *tables], [TableStats(120.0, batch_size=BATCH), *stats]
    plan = learned().plan(task_of(tables, stats, ranks, Splits(max_parts=6, min_dim=4))).plan
    assert len(plan.parts_of("big")) == len(plan.ranks_of("big")) == ranks


def test_even_parts_never_cut_what_an_exchange_in_eight_bits_scales_together() -> None:
    wide = [TableConfig(f"t_{dim}", 100, dim) for dim in (16, 48, 64, 128, 240)]
    wire = Wire("int8", tuple(wide))
    for table, parts in itertools.product(wide, range(2, 9)):
        cut = table.even_columns(parts, 16)
        if cut is not None:
            wire.check(ShardingPlan({part.name: 0 for part in cut}, 2))
            assert min(part.embedding_dim for part in cut) >= 16


def test_where_columns_may_not_be_split_rows_are_if_asked_and_the_step_gets_quicker() -> None:
    tables, stats = with_a_dominant_table()
    planner = learned()
    asked = Splits(4, 16, allowed=False, rows=True)
    whole = planner.plan(task_of(tables, stats, 4, asked)).plan
    task = task_of(tables, stats, 4, replace(asked, rows_to_balance=True))
    plan = planner.plan(task).plan
    assert not whole.split_tables and plan.split_tables == plan.row_split_tables and "big" in plan.row_split_tables
    assert true_ms(task, plan) < 0.85 * true_ms(task, whole)
    assert task.splits_enough(plan)


def test_ranges_of_rows_have_as_much_work_each_however_ids_are_sorted() -> None:
    """Half of it lookups, half different rows."""
    draws = np.random.default_rng(0).random(40_000)
    by_frequency = (10_000**draws).astype(np.int64) - 1
    scattered = np.random.default_rng(1).permutation(10_000)[by_frequency]
    table, lengths = TableConfig("t", 10_000, 16), np.full((1, 4_000), 10)
    for ids in (by_frequency, scattered):
        [stats] = measure_table_stats(lengths, ids)
        for parts in (2, 3, 4):
            ranges = table.even_rows(parts, stats)
            assert ranges is not None and [r.rows for r in ranges][-1][1] == 10_000
            inside = [ids[(ids >= first) & (ids < last)] for first, last in (r.rows for r in ranges)]
            work = [len(own) / len(ids) / 2 + len(np.unique(own)) / len(np.unique(ids)) / 2 for own in inside]
            assert work == pytest.approx([1 / parts] * parts, abs=0.02)
    [of_one_row] = measure_table_stats(lengths, np.zeros(40_000, dtype=np.int64))
    assert stats_of_part(table.row_range(0, 1), table, of_one_row).mean_pooling > 0.9 * of_one_row.mean_pooling
    assert table.even_rows(3, of_one_row) is None


def test_what_ranks_saw_of_their_rows_is_put_together() -> None:
    ids = (10_000 ** np.random.default_rng(0).random(40_000)).astype(np.int64) - 1
    [whole] = measure_table_stats(np.full((1, 4_000), 10), ids)
    seen = []
    for first, last in ((0, 500), (500, 10_000)):
        inside = (ids >= first) & (ids < last)
        lengths = inside.reshape(4_000, 10).sum(1)[None]
        seen.append({Shard(f"t[rows {first}:{last}]"): measure_table_stats(lengths, ids[inside] - first)[0]})
    together = of_whole_tables(seen)["t"]
    assert together.mean_pooling == pytest.approx(whole.mean_pooling)
    assert together.work_below(500, 10_000) == pytest.approx(whole.work_below(500, 10_000), abs=0.02)
    for row in whole.row_sixteenths:  # within a range lookups and different rows may lie apart from those of the table
        assert together.work_below(row, 10_000) == pytest.approx(whole.work_below(row, 10_000), abs=0.12)


def test_splitting_stops_where_it_gains_nothing() -> None:
    tables, stats = some_tables(30, seed=4)
    task = task_of(tables, stats, 2)  # two ranks are balanced with whole tables
    planner = learned()
    result = planner.plan(task_of(tables, stats, 2, Splits()))
    assert split_search(task, planner.costs.costs_of, task.ranks_from(result.plan)) == []


def test_a_table_that_becomes_dominant_is_split_live_and_merged_when_it_no_longer_is() -> None:
    tables, quiet = some_tables(12, seed=3)
    tables = [TableConfig("big", 100_000, 128), *tables]
    _, busy = with_a_dominant_table(12, seed=3)
    quiet = [TableStats(1.0, batch_size=BATCH), *quiet]
    planner = learned()
    task = task_of(tables, quiet, 4)
    plan = planner.plan(task_of(tables, quiet, 4, Splits())).plan
    found, ms = planner.propose(task_of(tables, busy, 4), plan)[0]
    assert "big" in found.split_tables and ms < 0.85 * planner.step_costs(task_of(tables, busy, 4))(plan)
    proposed = [plan for plan, _ in planner.propose(task, found)]
    assert any("big" not in plan.split_tables for plan in proposed)


def test_a_table_whose_name_ends_in_brackets_is_no_part_of_another() -> None:
    tables = [TableConfig("a", 1000, 64), *(TableConfig(name, 5000, 32) for name in ("a[b]", "c", "d"))]
    task = task_of(tables, [TableStats(3.0, batch_size=BATCH)] * 4, 2)
    current = ShardingPlan({"a": 0, "a[b]": 0, "c": 1, "d": 1}, 2)
    for plan, _ in Planner().propose(task, current):
        task.check(plan)


def test_what_a_split_tables_parts_are_off_by_is_learned_of_the_whole_and_the_other_way_round() -> None:
    tables, stats = with_a_dominant_table(8)
    task, planner = task_of(tables, stats, 3), learned()
    whole = ShardingPlan({table.name: i % 3 for i, table in enumerate(tables)}, 3)
    parts = {"big[0:64]": 0, "big[64:128]": 1} | {n: r for n, r in whole.rank_of.items() if n != "big"}
    split = ShardingPlan(parts, 3)
    for measured, other in ((whole, split), (split, whole)):
        fresh = Planner()
        fresh.load_state_dict(planner.state_dict())
        before = fresh.predict(task, other)
        profile = SimulatedCluster(seed=0, noise=0.0).profile(tables, stats, measured, BATCH)
        busier = profile.plan.ranks_of("big")
        slow = [
            type(rank)(1.5 * rank.fwd_compute_ms, rank.fwd_comms_ms, rank.bwd_comms_ms, 1.5 * rank.bwd_compute_ms)
            if number in busier else rank for number, rank in enumerate(profile.ranks)
        ]  # fmt: skip
        for _ in range(2):
            fresh.costs.observe(type(profile)(measured, profile.tables, profile.stats, BATCH, tuple(slow), "measured"))
        after = fresh.predict(task, other)
        [gain] = fresh.gains(task, measured, [other])
        assert np.isfinite([gain.mean, gain.std]).all() and gain.std > 0
        owner = other.ranks_of("big")[0]
        assert after[owner].bwd_compute_ms > 1.05 * before[owner].bwd_compute_ms


def test_relabelling_equal_ranks_moves_the_fewest_bytes_and_costs_as_much() -> None:
    for seed in range(5):
        task = some_task(12, 4, seed=seed)
        costs, generator = Planner().costs.costs_of(task), np.random.default_rng(seed)
        wanted_U = generator.integers(4, size=12)
        current = task.plan_from(generator.permutation(4)[wanted_U])  # the same plan under other names
        named_U = relabelled(task, costs, wanted_U, current)
        assert costs.step_ms(named_U) == pytest.approx(costs.step_ms(wanted_U), rel=1e-3)
        moved = sum(task.table_bytes[m.shard] for m in current.moves_to(task.plan_from(named_U)))
        assert moved == 0


def test_ranks_that_are_not_equal_keep_their_names() -> None:
    tables, stats = some_tables(8)
    task = PlacementTask.build(
        tables, stats, Topology(2, speed=(1.0, 0.5)), batch_size=BATCH, constraints=Constraints({"t_7": 1})
    )
    costs = Planner().costs.costs_of(task)
    uneven_U = np.array([0, 0, 0, 0, 0, 0, 0, 1])  # the slow rank has less, and what is pinned to it
    swapped = ShardingPlan({name: 1 - int(rank) for name, rank in zip(task.names, uneven_U, strict=True)}, 2)
    assert (relabelled(task, costs, uneven_U, swapped) == uneven_U).all()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_relabelling_counts_parts_that_stay(data: st.DataObject) -> None:
    """However both plans are split, never more bytes move than without."""
    tables, stats = some_tables(6, seed=1)
    task = task_of(tables, stats, 3)
    plan, current = (data.draw(plans_of(tables, 3)) for _ in range(2))
    of_plan = task.split_as(plan)
    rank_U = of_plan.ranks_from(plan)
    named = of_plan.plan_from(relabelled(of_plan, Planner().costs.costs_of(of_plan), rank_U, current))
    assert _moved_bytes(tables, current, named) <= _moved_bytes(tables, current, plan)


def _moved_bytes(tables: list[TableConfig], current: ShardingPlan, plan: ShardingPlan) -> float:
    table_of, total = {table.name: table for table in tables}, 0
    for move in current.moves_to(plan):
        shard = move.shard
        moved = table_of[shard.table].part(*shard.columns) if shard.columns else table_of[shard.table]
        total += moved.weight_bytes + moved.optimizer_bytes("rowwise_adagrad")
    return total
