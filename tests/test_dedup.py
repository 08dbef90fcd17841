"""Bags of one id that a rank's batch has several times travel once, and nobody can tell but by the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlrm_autoshard as das
from dlrm_autoshard.data.bags_once import bags_once
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.lookup.exchange import Exchange
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, tensors, trainer

TABLES = [TableConfig("user", 40, 8), TableConfig("item", 9, 16), TableConfig("tag", 7, 8)]
NAMES = [table.name for table in TABLES]
SIZE = 64


def batch_of(lengths_FB: list[list[int]], values: list[int], weights_N: Tensor | None = None) -> Batch:
    size = len(lengths_FB[0])
    none = torch.zeros(size, 0)
    return Batch(none, torch.tensor(lengths_FB).int(), torch.tensor(values), none.sum(1), size, size, weights_N)


def test_each_id_has_one_bag_and_empty_bags_come_last() -> None:
    batch = batch_of([[1, 0, 1, 1], [2, 0, 1, 1]], [5, 3, 5, 1, 2, 3, 4])
    sent, same = bags_once(batch, [0, 1])
    assert sent.lengths_TB.tolist() == [[1, 1, 0, 0], [2, 0, 1, 1]]  # a bag of two ids: the feature stays
    assert sent.values_N.tolist() == [3, 5, 1, 2, 3, 4]
    assert same.bag_FB.tolist() == [[1, 2, 0, 1], [0, 1, 2, 3]]
    assert same.order_FB[0].tolist() == [2, 0, 3, 1]


def test_ids_with_weights_stay_as_they_are() -> None:
    batch = batch_of([[1, 1]], [4, 4], torch.tensor([0.5, 1.0]))
    assert bags_once(batch, [0])[0] is batch


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """One id a sample, or none."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    lengths_TB = (torch.rand(len(TABLES), SIZE, generator=drawn) < 0.9).int()
    ids = [
        torch.randint(table.num_embeddings, (int(own.sum()),), generator=drawn)
        for table, own in zip(TABLES, lengths_TB, strict=True)
    ]
    return lengths_TB, torch.cat(ids)


def _trained(rank: int, world_size: int, plans: list[dict[str, int]], settings: dict[str, Any]) -> dict[str, Any]:
    """Every rank's shards, what left the ranks in vectors and gradients, and the last pooled vectors."""
    of_plans = [ShardingPlan(plan, world_size) for plan in plans]
    bags = ShardedEmbeddingBags(TABLES, plan=of_plans[0], optimizer=das.RowwiseAdagrad(lr=0.1), **settings)
    left = [0]
    with pytest.MonkeyPatch.context() as patch:
        send = Exchange.all_to_all

        def counted(self: Exchange, channel: str, received: Tensor, *others: Any) -> Any:
            left[0] += received.nbytes if channel == "vectors" else 0
            return send(self, channel, received, *others)

        patch.setattr(Exchange, "all_to_all", counted)
        for step in range(6):
            if step == 3 and len(of_plans) > 1:
                bags.move_to(of_plans[1], checksums=True)
            pooled = bags(*ids_of(rank, step))
            (pooled.sin().sum() / SIZE).backward()
    return {"own": {k: v.clone() for k, v in bags.own_tensors().items()}, "bytes": left[0], "pooled": pooled.detach()}


WHOLE = {"user": 0, "item": 1, "tag": 0}


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_no_plan_and_no_move_changes_a_bit(dtype: str) -> None:
    settings: dict[str, Any] = {"dedup": NAMES, "exchange_dtype": dtype}
    stayed = run_ranks(_trained, 2, [WHOLE], settings)
    moved = run_ranks(_trained, 2, [{"user": 1, "item": 0, "tag": 1}, WHOLE], settings)
    for one, other in zip(stayed, moved, strict=True):
        assert torch.equal(one["pooled"], other["pooled"])
        assert one["own"].keys() == other["own"].keys()
        assert all(torch.equal(value, other["own"][key]) for key, value in one["own"].items())


def test_the_same_is_learned_from_fewer_bytes() -> None:
    plain, once = run_ranks(_trained, 2, [WHOLE], {}), run_ranks(_trained, 2, [WHOLE], {"dedup": NAMES})
    for one, other in zip(plain, once, strict=True):
        assert other["bytes"] < 0.5 * one["bytes"]
        torch.testing.assert_close(one["pooled"], other["pooled"], rtol=1e-5, atol=1e-6)
        for key, value in one["own"].items():
            torch.testing.assert_close(value, other["own"][key], rtol=1e-5, atol=1e-6)


def test_a_table_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match=r"dedup names table 'itme', .* Did you mean 'item'\?"):
        ShardedEmbeddingBags(TABLES, dedup=["itme"])


def _job(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a job in one start, and of the same in two."""
    runtime, found = make_runtime(rank, world_size), []
    data = {"tables": [{"name": t.name, "num_embeddings": 40, "embedding_dim": 8} for t in TABLES]}
    own = {"data": {**data, "train_samples": 320, "test_samples": 41}, "tables": {"dedup": NAMES}}
    for name, stops in (("one", [20]), ("two", [9, 20])):
        for steps in stops:
            settings = config(folder, **own, checkpoint={"enabled": True}, train={"epochs": 3, "max_steps": steps})
            with trainer(settings, runtime, folder / name) as made:
                made.run()
                last = tensors(made)
        found.append(last)
    return found[0], found[1]


def test_a_job_resumes_without_a_bit_changed(tmp_path: Path) -> None:
    for one, two in run_ranks(_job, 2, tmp_path, timeout=120):
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[name]) for name, value in one.items())
