"""Moving tables in mid-training changes no bit of the model, needs little memory, and is all or nothing."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.distributed.moves.reshard import ReshardError, ReshardRefused, reshard
from dlrm_autoshard.distributed.moves.transfer import in_common_order
from dlrm_autoshard.plan import Move, PlanError, ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig
from tests.ranks import RankError, run_ranks
from tests.small_embeddings import TABLES, global_batch, make, resident, world

STEPS = 8
Schedule = dict[int, str]  # step -> owners, one digit a table; the step before which to move


def plan_of(owners: str, world_size: int) -> ShardingPlan:
    return ShardingPlan({t.name: int(r) for t, r in zip(TABLES, owners, strict=True)}, world_size)


def train(rank: int, world_size: int, optimizer: str, dtype: str, first: str, schedule: Schedule) -> dict[str, Any]:
    """Digests of every step's pooled output and of every final tensor."""
    embeddings = make(rank, plan_of(first, world_size), optimizer, dtype, TABLES)
    pooled_bytes = hashlib.sha256()
    for step in range(STEPS):
        if step in schedule:
            plan = plan_of(schedule[step], world_size)
            stats = reshard(embeddings, plan, group=world(), chunk_bytes=4096, checksums=step % 2 == 0)
            assert embeddings.plan == plan
            assert (stats.bytes > 0) == (len(stats.moves) > 0)
        embeddings.set_learning_rate(0.1 / (1 + step))
        local = embeddings.lookup(embeddings.distribute(global_batch(step, world_size)[rank]).finish())
        pooled = embeddings.exchange.in_output_order(embeddings.exchange.send_pooled(local).wait())
        pooled_bytes.update(pooled.detach().numpy().tobytes())
        embeddings.update(local, embeddings.exchange.send_gradients(torch.sin(pooled) / 10).wait())
    result: dict[str, Any] = {f"pooled on {rank}": pooled_bytes.hexdigest()}
    for name in embeddings.plan.shards_on(rank):
        for key, value in embeddings.storage.tensors(name).items():
            result[f"{name}.{key}"] = hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
    assert embeddings.updates == STEPS  # on every rank, also one that was empty for a while
    for own in embeddings.storage.lookups:
        assert own.tbe.get_learning_rate() == pytest.approx(0.1 / STEPS)
    return result


def train_all(rank: int, world_size: int, runs: list[tuple[str, str, str, Schedule]]) -> list[dict[str, Any]]:
    return [train(rank, world_size, *run) for run in runs]


def assert_no_bit_differs(world_size: int, runs: list[tuple[str, str, str, Schedule]]) -> None:
    """Each run with its moves equals the run of that optimizer and dtype that never moves."""
    still: list[tuple[str, str, str, Schedule]] = [(optimizer, dtype, first, {}) for optimizer, dtype, first, _ in runs]
    by_rank = run_ranks(train_all, world_size, [*still, *runs], timeout=120)
    merged = [{key: value for rank in by_rank for key, value in rank[i].items()} for i in range(2 * len(runs))]
    for unmoved, moved, run in zip(merged[: len(runs)], merged[len(runs) :], runs, strict=True):
        assert moved == unmoved, run


OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_swaps_empty_ranks_and_returns_change_no_bit(dtype: str) -> None:
    schedule = {1: "1100", 3: "1111", 4: "0000", 6: "0110"}
    assert_no_bit_differs(2, [(optimizer, dtype, "0011", schedule) for optimizer in OPTIMIZERS])


@st.composite
def trainings(draw: st.DrawFn) -> tuple[int, list[tuple[str, str, str, Schedule]]]:
    world_size = draw(st.integers(2, 4))
    owners = st.text("0123"[:world_size], min_size=len(TABLES), max_size=len(TABLES))
    runs = []
    for optimizer in OPTIMIZERS:
        schedule = draw(st.dictionaries(st.integers(0, STEPS - 1), owners, min_size=1, max_size=5))
        runs.append((optimizer, draw(st.sampled_from(["fp32", "fp16"])), draw(owners), schedule))
    return world_size, runs


@settings(max_examples=3, deadline=None)
@given(trainings())
def test_any_moves_at_any_steps_change_no_bit(training: tuple[int, list[tuple[str, str, str, Schedule]]]) -> None:
    assert_no_bit_differs(*training)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(trainings())
def test_any_moves_at_any_steps_change_no_bit_at_length(
    training: tuple[int, list[tuple[str, str, str, Schedule]]],
) -> None:
    assert_no_bit_differs(*training)


def away_and_back(rank: int, world_size: int) -> bool:
    tables = [TableConfig("big", 300_001, 8), TableConfig("small", 5, 4), TableConfig("other", 1000, 12)]
    home = ShardingPlan({"big": 0, "small": 2, "other": 1}, world_size)
    embeddings = make(rank, home, "adagrad", "fp32", tables)
    generator = torch.Generator().manual_seed(rank)
    for name in home.shards_on(rank):
        for value in embeddings.storage.tensors(name).values():
            value.detach().copy_(torch.rand(value.shape, generator=generator))
    before = {n: {k: v.clone() for k, v in embeddings.storage.tensors(n).items()} for n in home.shards_on(rank)}
    away = ShardingPlan({"big": 1, "small": 0, "other": 2}, world_size)
    stats = reshard(embeddings, away, group=world(), chunk_bytes=100_000, checksums=True)
    assert stats.bytes == sum(2 * t.weight_bytes for t in tables)
    reshard(embeddings, home, group=world())
    return all(
        torch.equal(value, embeddings.storage.tensors(name)[key])
        for name, tensors in before.items()
        for key, value in tensors.items()
    )


def test_away_and_back_restores_every_byte() -> None:
    assert run_ranks(away_and_back, 3) == [True] * 3


def refused(rank: int, world_size: int) -> tuple[str, bool]:
    embeddings = make(rank, plan_of("0011", world_size), "adagrad", "fp32", TABLES)
    digest = {n: embeddings.storage.tensors(n)["weight"].clone() for n in embeddings.plan.shards_on(rank)}
    message = ""
    try:
        reshard(embeddings, plan_of("1111", world_size), group=world(), free_bytes=[10**9, 1000][rank])
    except ReshardRefused as error:
        message = str(error)
    same = embeddings.plan == plan_of("0011", world_size) and all(
        torch.equal(value, embeddings.storage.tensors(name)["weight"]) for name, value in digest.items()
    )
    pooled = embeddings.lookup(embeddings.distribute(global_batch(0, world_size)[rank]).finish())  # training goes on
    return message, same and pooled.shape[1] == embeddings.local_dim


def test_a_rank_without_memory_is_named_and_nothing_moves() -> None:
    messages, unchanged = zip(*run_ranks(refused, 2), strict=True)
    assert messages[0] == messages[1]  # of every rank, so that all go on
    arriving = (50 * 8 + 1000 * 4) * 4 * 2
    assert f"rank 1 needs {arriving / 1024:.3g} KiB more" in messages[0]
    assert unchanged == (True, True)


def swap_with_memory_for_nothing(rank: int, world_size: int) -> bool:
    tables = [TableConfig("a", 5000, 8), TableConfig("b", 5000, 8)]
    embeddings = make(rank, ShardingPlan({"a": 0, "b": 1}, world_size), "sgd", "fp32", tables)
    reshard(embeddings, ShardingPlan({"a": 1, "b": 0}, world_size), group=world(), free_bytes=0)
    return embeddings.plan.rank_of["a"] == 1


def test_a_swap_needs_no_room_for_both_layouts() -> None:
    assert run_ranks(swap_with_memory_for_nothing, 2) == [True, True]


def memory_of_a_swap(rank: int, world_size: int) -> tuple[int, int, int, int]:
    """Resident bytes before, the most during a swap of all tables, after it, and after this rank gave all away."""
    names = [f"t{i}" for i in range(8)]
    tables = [TableConfig(name, 65_536, 64) for name in names]  # 16 MiB each, 64 MiB a rank
    embeddings = make(rank, ShardingPlan({n: i % 2 for i, n in enumerate(names)}, 2), "sgd", "fp32", tables)
    before, most = resident(), 0
    release = embeddings.storage.release_part

    def watch(*args: Any) -> None:
        nonlocal most
        most = max(most, resident())
        release(*args)

    embeddings.storage.release_part = watch  # type: ignore[method-assign,assignment]
    swapped = ShardingPlan({n: 1 - i % 2 for i, n in enumerate(names)}, 2)
    reshard(embeddings, swapped, group=world(), chunk_bytes=1 << 20)
    after = resident()
    reshard(embeddings, ShardingPlan({n: 1 for n in names}, 2), group=world())
    return before, most, after, resident()


def test_a_swap_of_everything_takes_a_few_chunks_and_gives_pages_back() -> None:
    mib = 1 << 20
    results = run_ranks(memory_of_a_swap, 2)
    for before, most, after, _ in results:
        assert most - before < 24 * mib  # of 64 that come and 64 that go
        assert abs(after - before) < 24 * mib
    assert results[0][3] - results[0][2] < -40 * mib  # rank 0 gave its 64 MiB away
    assert results[1][3] - results[1][2] > 40 * mib


def disagree(rank: int, world_size: int) -> str:
    embeddings = make(rank, plan_of("0011", world_size), "sgd", "fp32", TABLES)
    with pytest.raises(ReshardError, match="given different moves") as caught:
        reshard(embeddings, plan_of(["0111", "0011"][rank], world_size), group=world())
    with pytest.raises(PlanError, match="for 3 ranks, this job has 2"):
        reshard(embeddings, plan_of("0012", 3), group=world())
    return str(caught.value)


def test_ranks_with_different_plans_notice_before_anything_moves() -> None:
    first, second = run_ranks(disagree, 2)
    assert first == second


def damage(rank: int, world_size: int) -> str:
    embeddings = make(rank, plan_of("0011", world_size), "sgd", "fp32", TABLES)
    if rank == 1:
        hold = embeddings.storage.tensors

        def tensors(name: Shard) -> dict[str, torch.Tensor]:
            values = hold(name)
            if name == "a" and values["weight"].any():  # it has arrived
                values["weight"][3, 1] += 1
            return values

        embeddings.storage.tensors = tensors  # type: ignore[method-assign]
    with pytest.raises(ReshardError, match=r"changed on their way: 'a' \(weight\)") as caught:
        reshard(embeddings, plan_of("1011", world_size), group=world(), checksums=True)
    return str(caught.value)


def test_checksums_find_one_wrong_bit() -> None:
    first, second = run_ranks(damage, 2)
    assert first == second


def die_in_the_middle(rank: int, world_size: int) -> None:
    import os
    import signal

    tables = [TableConfig("a", 100_000, 16), TableConfig("b", 100_000, 16)]
    embeddings = make(rank, ShardingPlan({"a": 0, "b": 1}, 2), "sgd", "fp32", tables)
    if rank == 1:
        send = dist.isend
        sent = 0

        def send_some(part: torch.Tensor, **options: Any) -> dist.Work | None:
            nonlocal sent
            sent += 1
            if sent == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(part, **options)

        dist.isend = send_some  # type: ignore[assignment]
    reshard(embeddings, ShardingPlan({"a": 1, "b": 0}, 2), group=world(), chunk_bytes=1 << 16)


def test_a_rank_that_dies_in_the_middle_ends_the_job() -> None:
    with pytest.raises(RankError, match=r"rank 1 died|broke off half-way"):
        run_ranks(die_in_the_middle, 2, timeout=30)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 50)).filter(lambda m: m[0] != m[1])),
    st.integers(1, 9),
)
def test_a_rank_never_holds_more_than_its_larger_layout_and_its_chunks_under_way(
    moves: list[tuple[int, int, int]], chunk_bytes: int
) -> None:
    sizes = {f"t{i}": {"weight": (size, 1)} for i, (_, _, size) in enumerate(moves)}
    order = in_common_order([Move(Shard(f"t{i}"), s, d) for i, (s, d, _) in enumerate(moves)], sizes, chunk_bytes)
    assert sum(chunk.stop - chunk.start for chunk in order) == sum(size for _, _, size in moves)
    pairs = {(s, d) for s, d, _ in moves}
    for rank in range(4):
        growth = sum(size * ((d == rank) - (s == rank)) for s, d, size in moves)
        held = most = 0
        for chunk in order:
            held += (chunk.stop - chunk.start) * ((chunk.move.destination == rank) - (chunk.move.source == rank))
            most = max(most, held)
        assert held == growth
        assert most <= max(0, growth) + chunk_bytes * sum(rank in pair for pair in pairs)
