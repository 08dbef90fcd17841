"""Vectors and gradients in eight bits between ranks: how exact they are, and that no plan changes a bit of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtypes, TableOptimizerConfig, TablesConfig
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.wire import Wire, block_of
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.errors import BagsError
from dlrm_autoshard.plan import PlanError, ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks
from tests.small_embeddings import global_batch, own_tensors, train_step, world
from tests.split_plans import whole

TABLES = [TableConfig("a", 50, 32), TableConfig("b", 1000, 16), TableConfig("c", 7, 64)]


def wire_of(*dims: int) -> Wire:
    return Wire("int8", [TableConfig(f"t{dim}", 8, dim) for dim in dims])


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 3e30])
def test_a_value_is_off_by_at_most_a_hundred_and_twenty_eighth_of_the_largest_beside_it(scale: float) -> None:
    wire = wire_of(64)
    values = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)) * scale
    values[3], values[4, 5] = 0.0, 1000 * scale
    sent = wire.encode(values)
    assert len(sent) == wire.size(values.numel()) == values.numel() * 17 // 16
    blocks, found = values.view(-1, 16), wire.decode(sent).view(-1, 16)
    assert ((found - blocks).abs().amax(1) <= blocks.abs().amax(1) / 127).all()
    assert torch.equal(wire.encode(found), sent), "what arrived is sent on as it is"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_arrives_as_no_number(value: float) -> None:
    wire = wire_of(16)
    values = torch.ones(4, 16)
    values[2, 7] = value
    found = wire.decode(wire.encode(values)).view(4, 16)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3]], values[[0, 1, 3]])


@pytest.mark.parametrize("dims,block", [((64, 128, 16), 16), ((96,), 8), ((8, 64), 8), ((20, 64), 4)])
def test_halves_of_tables_never_cut_a_block(dims: tuple[int, ...], block: int) -> None:
    assert block_of([TableConfig(f"t{dim}", 8, dim) for dim in dims]) == block


def train(rank: int, world_size: int, plans: list[ShardingPlan], dtypes: object) -> list[dict[str, Tensor]]:
    config = TablesConfig(optimizer=TableOptimizerConfig(name="adagrad", lr=0.1))
    results, ids = [], new_group()
    for plan in plans:
        embeddings = ShardedEmbeddings(
            TABLES, plan, config, rank=rank, group=world(), id_group=ids, device=torch.device("cpu"),
            exchange_dtype=ExchangeDtypes.model_validate(dtypes),
        )  # fmt: skip
        pooled = [train_step(embeddings, global_batch(step, world_size, TABLES)[rank]) for step in range(4)]
        results.append({f"pooled of {rank}.{step}": own for step, own in enumerate(pooled)} | own_tensors(embeddings))
    return results


@pytest.mark.parametrize("dtypes", ["int8", {"vectors": "int8", "gradients": "fp16"}])
def test_no_plan_changes_a_bit_of_what_travels_in_eight_bits(dtypes: object) -> None:
    plans = [
        ShardingPlan({"a": 0, "b": 1, "c": 1}, 2),
        ShardingPlan({"a": 1, "b": 1, "c": 1}, 2),
        ShardingPlan({"a[0:16]": 1, "a[16:32]": 0, "b": 0, "c[0:16]": 0, "c[16:64]": 1}, 2),
    ]
    by_rank = run_ranks(train, 2, plans, dtypes)
    first, *others = [whole([rank[i] for rank in by_rank]) for i in range(len(plans))]
    for other in others:
        assert other.keys() == first.keys()
        for key, value in first.items():
            assert torch.equal(value, other[key]), key
    exact = whole([rank[0] for rank in run_ranks(train, 2, plans[:1], "fp32")])
    for key, value in exact.items():
        assert not torch.equal(first[key], value), key
        if key.endswith(".0"):  # before any update
            torch.testing.assert_close(first[key], value, rtol=0, atol=float(value.abs().max()) / 127)


def test_a_plan_that_cuts_a_block_is_refused_with_where_to_cut() -> None:
    plan = ShardingPlan({"a[0:8]": 0, "a[8:32]": 1, "b": 0, "c": 0}, 2)
    with pytest.raises(PlanError, match=r"'a\[0:8\]'.* multiples of 16"):
        Wire("int8", TABLES).check(plan)
    Wire("fp16", TABLES).check(plan)


def test_a_wrong_name_of_a_part_is_a_sentence() -> None:
    from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags

    with pytest.raises(BagsError, match="exchange_dtype has a key 'gradient'; its keys are vectors, gradients"):
        ShardedEmbeddingBags(TABLES, exchange_dtype={"gradient": "int8"})
    with pytest.raises(BagsError, match=r"exchange_dtype\['gradients'\] is 'fp8'; it must be one of fp32, fp16"):
        ShardedEmbeddingBags(TABLES, exchange_dtype={"gradients": "fp8"})
