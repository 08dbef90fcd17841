"""Bags of one id that a rank's batch has several times travel once, and nobody can tell but by the bytes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

import dlrm_autoshard as das
from dlrm_autoshard.data.bags_once import bags_once
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.statistics import SentOnce, measure_stats
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.lookup import embeddings
from dlrm_autoshard.distributed.lookup.exchange import Exchange
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.rank_probe import RankProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe
from dlrm_autoshard.records.interval import epochs_file
from dlrm_autoshard.tables import TableConfig, TableStats
from dlrm_autoshard.training.checkpoints.manifest import read_manifest
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


@contextlib.contextmanager
def _vectors_counted() -> Iterator[list[int]]:
    """Bytes of vectors and gradients that this rank receives, in the list's only place."""
    left, send = [0], Exchange.all_to_all
    with pytest.MonkeyPatch.context() as patch:

        def counted(self: Exchange, channel: str, received: Tensor, *others: Any) -> Any:
            left[0] += received.nbytes if channel == "vectors" else 0
            return send(self, channel, received, *others)

        patch.setattr(Exchange, "all_to_all", counted)
        yield left


def _trained(rank: int, world_size: int, plans: list[dict[str, int]], settings: dict[str, Any]) -> dict[str, Any]:
    """Every rank's shards, what left the ranks in vectors and gradients, and the last pooled vectors."""
    of_plans = [ShardingPlan(plan, world_size) for plan in plans]
    bags = ShardedEmbeddingBags(TABLES, plan=of_plans[0], optimizer=das.RowwiseAdagrad(lr=0.1), **settings)
    with _vectors_counted() as left:
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


@contextlib.contextmanager
def _link(seconds_per_mb: float) -> Iterator[None]:
    """As if ranks were on hosts of their own, with such a link between them."""
    with pytest.MonkeyPatch.context() as patch:
        send = Exchange.all_to_all

        def slow(self: Exchange, channel: str, received: Tensor, *others: Any) -> Any:
            time.sleep(seconds_per_mb * received.nbytes / 1e6)
            return send(self, channel, received, *others)

        patch.setattr(embeddings, "connect", lambda group: None)
        patch.setattr(Exchange, "all_to_all", slow)
        yield


def _chosen(rank: int, world_size: int) -> list[Any]:
    """What a first batch chooses over a slow link; what bags on one host choose that load that state, or none; and
    whether each gives the same vectors twice."""
    found, wide = list[Any](), [TableConfig("user", 10**6, 64), TableConfig("item", 40, 64), TableConfig("tag", 7, 64)]
    drawn = torch.Generator().manual_seed(rank)
    ids = torch.cat([torch.randint(table.num_embeddings, (SIZE,), generator=drawn) for table in wide])
    state: dict[str, Any] | None = None
    for link in (_link(1.5), contextlib.nullcontext(), contextlib.nullcontext()):
        with link:
            bags = ShardedEmbeddingBags(wide, dedup="auto")
            if state is not None:
                bags.load_state_dict({"_extra_state": state}, strict=False)
            pooled = [bags(torch.ones(3, SIZE, dtype=torch.int32), ids).detach().clone() for _ in range(2)]
        found += [bags.get_extra_state()["dedup"], torch.equal(*pooled)]
        state = bags.get_extra_state() if state is None else {**state, "dedup": None}
    return found


def test_auto_chooses_by_the_first_batch_over_this_link_for_good() -> None:
    for slow, same, loaded, still_same, one_host, here_same in run_ranks(_chosen, 2, timeout=60):
        assert slow == loaded == ("item", "tag")
        assert one_host == () and same and still_same and here_same


def test_what_dedup_cannot_be_is_said() -> None:
    with pytest.raises(UserError, match=r"dedup is 'yes'; it must be 'auto', 'none' or a list of tables' names"):
        ShardedEmbeddingBags(TABLES, dedup="yes")


def _job(rank: int, world_size: int, folder: Path, dedup: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a job in one start, and of the same in two, of which the second has a fast link."""
    runtime, found = replace(make_runtime(rank, world_size), local_world_size=1), []
    data = {"tables": [{"name": t.name, "num_embeddings": 40, "embedding_dim": 32} for t in TABLES]}
    own = {"data": {**data, "train_samples": 1280, "test_samples": 41}, "tables": {"dedup": dedup}}
    for name, stops in (("one", [12]), ("two", [5, 12])):
        for steps in stops:
            train = {"batch_size": 64, "epochs": 3, "max_steps": steps}
            settings = config(folder, **own, checkpoint={"enabled": True}, train=train)
            with _link(0.0 if stops[0] < steps else 4.0), trainer(settings, runtime, folder / name) as made:
                made.run()
                last = tensors(made)
        found.append(last)
    return found[0], found[1]


@pytest.mark.parametrize("dedup", [NAMES, "auto"])
def test_a_job_resumes_without_a_bit_changed(tmp_path: Path, dedup: Any) -> None:
    for one, two in run_ranks(_job, 2, tmp_path, dedup, timeout=120):
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[name]) for name, value in one.items())
    newest = max((tmp_path / "two" / "checkpoints").glob("step_*"))
    assert read_manifest(newest).state.dedup == NAMES


SKEWED = [{"name": t.name, "num_embeddings": 300, "embedding_dim": 8, "mean_pooling": 1.0} for t in TABLES]


def _observed(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """A job that plans and moves, and measures two plans at its start."""
    planned = {"enabled": True, "measure_plans": 2, "budget_seconds": 2.0, "reshard": {"every_steps": 5}}
    own = {"data": {"tables": SKEWED, "train_samples": 640}, "tables": {"dedup": NAMES[:2]}, "autoshard": planned}
    settings = config(folder, **own, train={"batch_size": 32, "max_steps": 20, "epochs": 3})
    with trainer(settings, make_runtime(rank, world_size), folder / "run") as made:
        made.run()
        return tensors(made)


def test_tables_are_observed_as_they_were_measured_at_the_start(tmp_path: Path) -> None:
    """Both are of the ids that reach the owners: else each job would see its data change after the start."""
    run_ranks(_observed, 2, tmp_path, timeout=120)
    settings = config(tmp_path, data={"tables": SKEWED, "train_samples": 640})
    source = open_source(settings.data, settings.tables)
    once = SentOnce(32, tables=NAMES[:2])
    stats = dict(zip(NAMES, measure_stats(source, 64, 8, Features.one_each(source.tables), once=once), strict=True))
    records = [json.loads(line)["tables"] for line in epochs_file(tmp_path / "run").read_text().splitlines()]
    assert records
    for name in NAMES:
        seen = [{key: record[key][record["name"].index(name)] for key in record} for record in records]
        for key in ("features", "mean_pooling", "mean_reuse"):
            assert mean(of[key] for of in seen) == pytest.approx(getattr(stats[name], key), rel=0.1), (name, key)
    assert stats["user"].features < 0.8 and stats["user"].features == stats["user"].mean_pooling
    assert stats["tag"].features == 1


LARGER = [TableConfig(table.name, 1000, table.embedding_dim) for table in TABLES]


def _probed(rank: int, world_size: int, features: float) -> int:
    runtime, stats = make_runtime(rank, world_size), [TableStats(features, features=features)] * 3
    probe = RankProbe(runtime, LARGER, stats, 2 * SIZE, ShardProbe(repeats=1, buffer_gib=0.01))
    with _vectors_counted() as left:
        probe.measure_exchange(ShardingPlan({"user[0:4]": 0, "user[4:8]": 1, "item": 1, "tag": 0}, world_size))
    return left[0]


def test_a_start_measures_and_prices_as_many_vectors_as_travel() -> None:
    for one, other in zip(run_ranks(_probed, 2, 1.0), run_ranks(_probed, 2, 0.25), strict=True):
        assert other == pytest.approx(0.25 * one, rel=0.1)
    plan, costs = ShardingPlan(WHOLE, 2), LearnedCosts()
    once, each = (
        costs.predict(
            PlacementTask.build(LARGER, [TableStats(1.0, features=n)] * 3, Topology(2), batch_size=10**6), plan
        )[0].fwd_comms_ms
        for n in (0.25, 1)
    )
    assert 0.2 * each < once < 0.35 * each
