"""Tables split, merged and moved by columns in mid-training train as if nobody had touched them, to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.moves.reshard import ReshardRefused, reshard
from dlrm_autoshard.distributed.tables.optimizers import RowwiseAdagrad
from dlrm_autoshard.distributed.tables.storage import Storage
from dlrm_autoshard.plan import PlanError, ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig
from tests.ranks import run_ranks
from tests.small_embeddings import global_batch, make, resident, world
from tests.split_plans import plans_of, whole

TABLES = [TableConfig("a", 50, 8), TableConfig("b", 1000, 4), TableConfig("c", 7, 64), TableConfig("d", 300, 28)]
STEPS = 6
Run = tuple[str, str, ShardingPlan, dict[int, ShardingPlan]]
"""Optimizer, dtype, the first plan, and plans by the step before which to move."""


def train(rank: int, world_size: int, runs: list[Run]) -> list[dict[str, Tensor]]:
    """Of each run: every step's pooled output here, and this rank's shards at the end."""
    results = []
    for optimizer, dtype, first, schedule in runs:
        embeddings = make(rank, first, optimizer, dtype, TABLES)
        result = {}
        for step in range(STEPS):
            if step in schedule:
                reshard(embeddings, schedule[step], group=world(), chunk_bytes=4096, checksums=True)
            local = embeddings.lookup(embeddings.distribute(global_batch(step, world_size, TABLES)[rank]).finish())
            pooled = embeddings.exchange.in_output_order(embeddings.exchange.send_pooled(local).wait())
            result[f"step {step} on {rank}"] = pooled.clone()
            embeddings.update(local, embeddings.exchange.send_gradients(torch.sin(pooled) / 10).wait())
        for name in embeddings.plan.shards_on(rank):
            result |= {f"{name}.{key}": value.clone() for key, value in embeddings.storage.tensors(name).items()}
        results.append(result)
    return results


def assert_no_bit_differs(world_size: int, runs: list[Run]) -> None:
    """From the run of that optimizer and dtype in which no table is ever split or moved."""
    still = ShardingPlan({table.name: i % world_size for i, table in enumerate(TABLES)}, world_size)
    unsplit: list[Run] = [(optimizer, dtype, still, {}) for optimizer, dtype, _, _ in runs]
    by_rank = run_ranks(train, world_size, [*unsplit, *runs], timeout=150)
    merged = [whole([rank[i] for rank in by_rank]) for i in range(2 * len(runs))]
    for expected, found, run in zip(merged[: len(runs)], merged[len(runs) :], runs, strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value, found[key]), (key, run)


@st.composite
def trainings(draw: st.DrawFn, world_sizes: st.SearchStrategy[int]) -> tuple[int, list[Run]]:
    world_size = draw(world_sizes)
    plans = plans_of(TABLES, world_size)
    runs: list[Run] = []
    for optimizer in ("sgd", "adagrad"):
        for dtype in ("fp32", "fp16"):
            schedule = draw(st.dictionaries(st.integers(0, STEPS - 1), plans, min_size=2, max_size=5))
            runs.append((optimizer, dtype, draw(plans), schedule))
    return world_size, runs


@settings(max_examples=3, deadline=None)
@given(trainings(st.just(2)))
def test_splits_merges_and_moves_change_no_bit(training: tuple[int, list[Run]]) -> None:
    assert_no_bit_differs(*training)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(trainings(st.integers(1, 4)))
def test_splits_merges_and_moves_change_no_bit_at_length(training: tuple[int, list[Run]]) -> None:
    assert_no_bit_differs(*training)


def row_sums(rank: int, world_size: int) -> dict[str, list[float]]:
    embeddings = make(rank, ShardingPlan({"t": 0}, 2), "rowwise_adagrad", "fp32", [TableConfig("t", 9, 16)])
    with pytest.raises(PlanError, match=r"splits table 't'.*per_part: true"):
        reshard(embeddings, ShardingPlan({"t[0:4]": 0, "t[4:16]": 1}, 2), group=world())
    optimizer = embeddings.config.optimizer.model_copy(update={"per_part": True})
    embeddings.config = embeddings.config.model_copy(update={"optimizer": optimizer})
    seen: dict[str, list[float]] = {}

    def look(when: str) -> None:
        for name in embeddings.plan.shards_on(rank):
            seen[f"{when}: {name}"] = embeddings.storage.tensors(name)["momentum1"].tolist()

    if rank == 0:
        embeddings.storage.tensors(Shard("t"))["momentum1"].copy_(torch.arange(9.0))
    reshard(embeddings, ShardingPlan({"t[0:4]": 0, "t[4:16]": 1}, 2), group=world(), chunk_bytes=4096)
    look("split")
    if rank == 1:
        embeddings.storage.tensors(Shard("t[4:16]"))["momentum1"].add_(8.0)
    reshard(embeddings, ShardingPlan({"t[0:8]": 1, "t[8:16]": 0}, 2), group=world(), chunk_bytes=4096, checksums=True)
    look("split anew")
    reshard(embeddings, ShardingPlan({"t": 1}, 2), group=world(), chunk_bytes=4096)
    look("merged")
    return seen


def test_a_rows_sum_is_every_parts_and_parts_make_their_mean_by_columns() -> None:
    first, second = run_ranks(row_sums, 2)
    rows = [float(row) for row in range(9)]
    assert first["split: t[0:4]"] == second["split: t[4:16]"] == rows
    assert second["split anew: t[0:8]"] == [row + 4 for row in rows]
    assert first["split anew: t[8:16]"] == [row + 8 for row in rows]
    assert second["merged: t"] == [row + 6 for row in rows]


def memory_of_a_split(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """Resident bytes before, the most during, and after: a split, another split, and a merge of 64 MiB."""
    embeddings = make(rank, ShardingPlan({"t": 0}, 2), "sgd", "fp32", [TableConfig("t", 1 << 18, 64)])
    release, found = embeddings.storage.release_part, []
    most = 0

    def watch(*args: Any) -> None:
        nonlocal most
        most = max(most, resident())
        release(*args)

    embeddings.storage.release_part = watch  # type: ignore[method-assign,assignment]
    for parts in ({"t[0:32]": 1, "t[32:64]": 0}, {"t[0:16]": 0, "t[16:64]": 1}, {"t": 0}):
        before, most = resident(), 0
        reshard(embeddings, ShardingPlan(parts, 2), group=world(), chunk_bytes=1 << 20)
        found.append((before, max(most, resident()), resident()))
    return found


def test_a_split_takes_no_more_than_the_larger_layout_and_a_few_chunks() -> None:
    mib = 1 << 20
    held = [[64, 32, 16, 64], [0, 32, 48, 0]]
    for rank, by_move in enumerate(run_ranks(memory_of_a_split, 2)):
        for (before, most, after), was, will_be in zip(by_move, held[rank], held[rank][1:], strict=False):
            assert most - before < (max(0, will_be - was) + 24) * mib
            assert abs((after - before) - (will_be - was) * mib) < 16 * mib


def refused(rank: int, world_size: int) -> tuple[str, bool]:
    embeddings = make(rank, ShardingPlan({"t": 0}, 2), "adagrad", "fp32", [TableConfig("t", 1000, 16)])
    plan, message = embeddings.plan, ""
    try:
        reshard(embeddings, ShardingPlan({"t[0:8]": 0, "t[8:16]": 1}, 2), group=world(), free_bytes=10_000)
    except ReshardRefused as error:
        message = str(error)
    reshard(embeddings, ShardingPlan({"t[0:8]": 0, "t[8:16]": 1}, 2), group=world(), free_bytes=64_000)
    return message, embeddings.plan != plan


def test_a_rank_without_memory_for_its_part_is_named_and_nothing_moves() -> None:
    for message, moved_later in run_ranks(refused, 2):
        assert "rank 1 needs 62.5 KiB more" in message and moved_later


def test_one_rank_may_hold_all_parts() -> None:
    still = ShardingPlan(dict.fromkeys((table.name for table in TABLES), 0), 1)
    split = ShardingPlan({"a[0:4]": 0, "a[4:8]": 0, "b": 0, "c[0:12]": 0, "c[12:64]": 0, "d": 0}, 1)
    [[expected, found]] = run_ranks(train, 1, [("sgd", "fp32", still, {}), ("sgd", "fp32", split, {})])
    expected, found = whole([expected]), whole([found])
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


def reloaded(rank: int, world_size: int) -> bool:
    """Two saved parts into three others, and into the whole table, and that into parts again."""
    plans = [ShardingPlan(dict.fromkeys(names, 0), 1) for names in (
        ("c[0:12]", "c[12:64]"), ("c[0:8]", "c[8:16]", "c[16:64]"), ("c",), ("c[0:12]", "c[12:64]"))]  # fmt: skip
    tables, optimizer = [TABLES[2]], RowwiseAdagrad(per_part=True)
    bags = [ShardedEmbeddingBags(tables, optimizer=optimizer, plan=plan, seed=i) for i, plan in enumerate(plans)]
    for value in bags[0].own_tensors().values():
        value.copy_(torch.rand(value.shape[:1])[:, None].expand(value.shape) if value.dim() > 1 else torch.tensor(3.0))
    for before, after in itertools.pairwise(bags):
        after.load_state_dict(before.state_dict())
    first, last = bags[0].own_tensors(), bags[-1].own_tensors()
    return first.keys() == last.keys() and all(torch.equal(value, last[name]) for name, value in first.items())


def test_a_modules_state_loads_under_any_splits() -> None:
    assert run_ranks(reloaded, 1) == [True]


def test_parts_that_are_cut_anew_too_often_at_once_are_refused_before_anything_moves() -> None:
    storage = Storage([TableConfig("t", 1 << 20, 64)], TablesConfig(), torch.device("cpu"))
    for stop in (52, 56, 60):
        assert storage.claim([Shard(f"t[0:{stop}]")]) is None
    assert storage.claim([Shard("t[rows 0:1000000]")]) is None
    assert "split again while too many" in (storage.claim([Shard("t[24:64]"), Shard("t[0:24]")]) or "")
    storage.give_up([Shard("t[0:60]")])
    assert storage.claim([Shard("t[0:24]")]) is None and storage.claim([Shard("t[24:48]"), Shard("t")]) is None
