"""Tables split by rows train as whole ones do, whatever moves in between and on however many ranks they go on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.lookup.row_ranges import RowRanges
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.moves.transfer import Chunk, Sent
from dlrm_autoshard.plan import Move, ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig
from tests.ranks import run_ranks
from tests.small_embeddings import global_batch, make, own_tensors, resident, train_step, world
from tests.split_plans import whole

TABLES = [TableConfig("a", 50, 8), TableConfig("b", 1000, 4), TableConfig("c", 7, 64)]
WHOLE = ShardingPlan({"a": 0, "b": 1, "c": 0}, 2)
BY_ROWS = ShardingPlan({"a[rows 0:20]": 1, "a[rows 20:50]": 0, "b[rows 0:999]": 0, "b[rows 999:1000]": 1, "c": 1}, 2)
GRID = ShardingPlan(
    {"a[rows 0:9, 0:4]": 0, "a[rows 0:9, 4:8]": 1, "a[rows 9:50]": 1, "b": 0, "c[rows 0:3]": 0, "c[rows 3:7]": 1}, 2
)


def with_one_id(batch: Batch) -> Batch:
    """The first id of each bag."""
    lengths = batch.lengths_TB.clamp(max=1)
    starts = batch.lengths_TB.flatten().cumsum(0) - batch.lengths_TB.flatten()
    return replace(batch, lengths_TB=lengths, values_N=batch.values_N[starts[batch.lengths_TB.flatten() > 0]])


def one_id_each(rank: int, world_size: int, optimizer: str, plans: list[ShardingPlan]) -> dict[str, Tensor]:
    embeddings, found = make(rank, plans[0], optimizer, "fp32", TABLES), {}
    for step in range(6):
        if step:
            reshard(embeddings, plans[step % len(plans)], group=world(), chunk_bytes=4096, checksums=True)
        batch = with_one_id(global_batch(step, world_size, TABLES)[rank])
        found[f"step {step} on {rank}"] = train_step(embeddings, batch)
    return found | own_tensors(embeddings)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_bags_of_one_id_are_bit_equal_however_rows_are_split(optimizer: str) -> None:
    grid = BY_ROWS if optimizer == "rowwise_adagrad" else GRID
    unsplit, split = (whole(run_ranks(one_id_each, 2, optimizer, plans)) for plans in ([WHOLE], [BY_ROWS, grid, WHOLE]))
    assert unsplit.keys() == split.keys() and all(torch.equal(value, split[key]) for key, value in unsplit.items())


def test_ids_go_to_the_owner_of_their_rows() -> None:
    features = Features.one_each([TableConfig("a", 10, 4), TableConfig("b", 10, 4)])
    plan = ShardingPlan({"a": 0, "b[rows 0:5]": 0, "b[rows 5:10]": 1}, 2)
    ids = torch.tensor([3, 9, 7, 4, 5, 0])
    weights = torch.arange(6.0)
    batch = Batch(torch.zeros(2, 0), torch.tensor([[1, 1], [3, 1]]), ids, torch.zeros(2), 2, 2, weights)
    split = RowRanges(features, plan).split(batch)
    assert split.lengths_TB.tolist() == [[1, 1], [1, 1], [2, 0]]
    assert split.values_N.tolist() == [3, 9, 4, 0, 2, 0] and split.weights_N is not None
    assert split.weights_N.tolist() == [0, 1, 3, 5, 2, 4]
    whole_plan = ShardingPlan({"a": 0, "b": 1}, 2)
    assert RowRanges(features, whole_plan).split(batch) is batch


def memory_of_rows(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """Resident bytes before, the most during, and after moves of a table of 64 MiB to rows, columns and a grid."""
    embeddings = make(rank, ShardingPlan({"t": 0}, 2), "sgd", "fp32", [TableConfig("t", 1 << 18, 64)])
    release, found, most, half = embeddings.storage.release_part, [], 0, 1 << 17

    def watch(*args: Any) -> None:
        nonlocal most
        most = max(most, resident())
        release(*args)

    embeddings.storage.release_part = watch  # type: ignore[method-assign,assignment]
    for parts in (
        {f"t[rows 0:{half}]": 0, f"t[rows {half}:{1 << 18}]": 1},
        {"t[0:32]": 0, "t[32:64]": 1},
        {f"t[rows 0:{half}, 0:32]": 1, f"t[rows 0:{half}, 32:64]": 0, f"t[rows {half}:{1 << 18}]": 1},
        {"t": 1},
    ):
        before, most = resident(), 0
        reshard(embeddings, ShardingPlan(parts, 2), group=world(), chunk_bytes=1 << 20)
        found.append((before, max(most, resident()), resident()))
    return found


def test_a_move_of_rows_takes_no_more_than_the_larger_layout_and_a_few_chunks() -> None:
    mib = 1 << 20
    held = [[64, 32, 32, 16, 0], [0, 32, 32, 48, 64]]
    for rank, by_move in enumerate(run_ranks(memory_of_rows, 2)):
        for (before, most, after), was, will_be in zip(by_move, held[rank], held[rank][1:], strict=False):
            assert most - before < (max(0, will_be - was) + 24) * mib
            assert abs((after - before) - (will_be - was) * mib) < 16 * mib


def test_a_page_that_rows_share_with_ones_that_are_still_to_be_sent_is_kept() -> None:
    released: list[tuple[int, int]] = []
    storage: Any = SimpleNamespace(
        row_bytes=lambda name: {"weight": (400, 48)}, release_part=lambda *args: released.append(args[2:])
    )
    rows = [(0, 23), (23, 25), (25, 400)]
    moves = [Move(Shard(f"t[rows {start}:{stop}]"), 0, 1, leaves=Shard("t")) for start, stop in rows]
    chunks = [Chunk(move, "weight", 0, stop - start) for move, (start, stop) in zip(moves, rows, strict=True)]
    sent = Sent(storage, chunks)
    for chunk in (chunks[1], chunks[2]):
        sent.mark(chunk)
    assert all(start >= 4096 for start, stop in released if stop > start)
    sent.mark(chunks[0])
    assert max(stop for _, stop in released) == 400 * 48
