"""Synthetic data: pure by position, true to its settings, learnable, and drifting on schedule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.config import ConfigError, TablesConfig, parse_config
from dlrm_autoshard.config_data import Drift, SyntheticData, SyntheticTable
from dlrm_autoshard.data.batch import Batch, DataError, DataSource
from dlrm_autoshard.data.hashing import key_of
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.sources.power_law import PowerLaw


def tables_with(*poolings: float, rows: int = 1000, alpha: float = 1.05) -> list[SyntheticTable]:
    return [
        SyntheticTable(name=f"t{i}", num_embeddings=rows, mean_pooling=pooling, alpha=alpha)
        for i, pooling in enumerate(poolings)
    ]


def source_of(tables: list[SyntheticTable], **keys: object) -> DataSource:
    data = SyntheticData.model_validate({"source": "synthetic", "tables": tables, "num_dense": 4, **keys})
    return open_source(data, TablesConfig())


def bags(batch: Batch) -> list[list[list[int]]]:
    """Ids by sample and table."""
    ids = iter(batch.values_N.tolist())
    by_table = [[[next(ids) for _ in range(length)] for length in row] for row in batch.lengths_TB.tolist()]
    return [list(sample) for sample in zip(*by_table, strict=True)]


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    ranks = scores.argsort().argsort() + 1.0
    positives = labels == 1
    return float((ranks[positives].mean() - (positives.sum() + 1) / 2) / (~positives).sum())


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=5), epoch=st.integers(0, 4), first=st.integers(0, 10**9))
def test_samples_do_not_depend_on_the_pieces_they_are_read_in(cuts: list[int], epoch: int, first: int) -> None:
    source = source_of(tables_with(1.0, 0.4, 7.5, 0.0), drift=[Drift(epoch=2)])
    whole = source.read("train", epoch, first, first + 300)
    edges = [0, *sorted(cuts), 300]
    pieces = [source.read("train", epoch, first + a, first + b) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat([piece.dense_BF for piece in pieces]), whole.dense_BF)
    assert torch.equal(torch.cat([piece.labels_B for piece in pieces]), whole.labels_B)
    assert [bag for piece in pieces for bag in bags(piece)] == bags(whole)


def test_train_epochs_differ_and_the_test_split_stays() -> None:
    source = source_of(tables_with(3.0))
    assert bags(source.read("train", 0, 0, 50)) != bags(source.read("train", 1, 0, 50))
    assert bags(source.read("test", 0, 0, 50)) == bags(source.read("test", 1, 0, 50))
    assert bags(source.read("test", 0, 0, 50)) != bags(source.read("val", 0, 0, 50))
    assert bags(source_of(tables_with(3.0), seed=1).read("test", 0, 0, 50)) != bags(source.read("test", 0, 0, 50))


@pytest.mark.parametrize("pooling", [0.0, 0.02, 0.7, 1.0, 1.5, 4.0, 23.0])
def test_bag_lengths_have_the_mean_and_range_that_was_asked_for(pooling: float) -> None:
    lengths = source_of(tables_with(pooling)).read("train", 0, 0, 40_000).lengths_TB[0].double()
    assert abs(lengths.mean() - pooling) <= 4 * max(lengths.std().item(), 1e-9) / 200
    assert lengths.min() >= np.ceil(np.floor(pooling) / 2)
    assert lengths.max() <= np.ceil(pooling) + np.floor(np.ceil(pooling) / 2)
    if pooling == 4.0:
        assert set(lengths.tolist()) == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.05, 2.0])
def test_rows_follow_the_power_law(alpha: float) -> None:
    num_rows = 500
    law = PowerLaw.scattered(num_rows, alpha, key_of("any"))
    # An even grid of draws stands for the distribution itself: no noise from sampling.
    rows = law.rows((np.arange(2_000_000) + 0.5) / 2_000_000)
    seen = np.sort(np.bincount(rows.astype(int), minlength=num_rows))[::-1] / 2_000_000
    wanted = np.arange(1, num_rows + 1) ** -alpha
    wanted /= wanted.sum()
    assert len(seen) == num_rows
    np.testing.assert_allclose(seen[:50], wanted[:50], rtol=0.06)
    np.testing.assert_allclose(seen[50:], wanted[50:], rtol=0.04, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 3000), salt=st.integers(0, 1000))
def test_heat_is_scattered_over_rows_one_to_one(num_rows: int, salt: int) -> None:
    law = PowerLaw.scattered(num_rows, 0.0, key_of(salt))
    assert sorted(law.rows((np.arange(num_rows) + 0.5) / num_rows)) == list(range(num_rows))


@given(draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1), rows=st.sampled_from([1, 2, 40_000_000, 2**40]))
def test_rows_are_whole_numbers_within_the_table(draws: list[float], rows: int) -> None:
    ids = PowerLaw.scattered(rows, 1.05, key_of("any")).rows(np.array(draws))
    assert (ids >= 0).all() and (ids < rows).all() and (ids == np.floor(ids)).all()


def test_labels_can_be_learnt_from_what_a_model_sees() -> None:
    """Logistic regression on dense features and one weight a row, trained on half, judged on the other half."""
    source = source_of(tables_with(1.0, 1.0, 3.0, rows=200), num_dense=6)
    batch = source.read("train", 0, 0, 30_000)
    counts = np.zeros((30_000, 600))
    for sample, by_table in enumerate(bags(batch)):
        for table, ids in enumerate(by_table):
            np.add.at(counts[sample], np.array(ids) + 200 * table, 1.0)
    features = torch.tensor(np.hstack([batch.dense_BF.numpy(), counts, np.ones((30_000, 1))]), dtype=torch.float32)
    weights = torch.zeros(features.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            features[:15_000] @ weights, batch.labels_B[:15_000]
        )
        (loss + 1e-4 * weights.square().sum()).backward()
        optimizer.step()
    judged = auc((features[15_000:] @ weights).detach().numpy(), batch.labels_B[15_000:].numpy())
    assert 0.78 < judged < 0.9
    assert 0.15 < batch.labels_B.mean() < 0.35


def test_a_drift_moves_pooling_between_tables_and_heat_between_rows() -> None:
    source = source_of(tables_with(1.0, 8.0, 30.0), drift=[Drift(epoch=3)])
    before, still, after = (source.read("train", epoch, 0, 4000) for epoch in (0, 2, 3))

    def pooling(batch: Batch) -> list[int]:
        return [round(mean) for mean in batch.lengths_TB.double().mean(dim=1).tolist()]

    assert pooling(before) == pooling(still) == [1, 8, 30]
    assert sorted(pooling(after)) == [1, 8, 30]
    assert all(new != old for new, old in zip(pooling(after), [1, 8, 30], strict=True))

    def hottest(batch: Batch, table: int) -> int:
        return int(batch.values_N.split(batch.lengths_TB.sum(1).tolist())[table].mode().values)

    assert [hottest(before, t) for t in range(3)] == [hottest(still, t) for t in range(3)]
    assert all(hottest(before, t) != hottest(after, t) for t in range(3))


def test_a_drift_of_pooling_alone_leaves_hot_rows() -> None:
    source = source_of(tables_with(5.0, 5.0), drift=[Drift(epoch=1, move_hot_ids=False)])
    assert bags(source.read("test", 0, 0, 100)) == bags(source.read("test", 1, 0, 100))


def test_reused_batches_are_drawn_once() -> None:
    source = source_of(tables_with(2.0), reuse_batches=2)
    assert source.read("train", 0, 0, 64) is source.read("train", 1, 0, 64)
    assert source.reuse_batches == 2


def test_dims_come_from_the_table_then_from_the_config() -> None:
    tables = [SyntheticTable(name="a", num_embeddings=5), SyntheticTable(name="b", num_embeddings=5, embedding_dim=32)]
    data = SyntheticData(source="synthetic", tables=tables)
    dims = [table.embedding_dim for table in open_source(data, TablesConfig(embedding_dim=8)).tables]
    assert dims == [8, 32]
    overridden = open_source(data, TablesConfig(embedding_dims={"b": 64}, poolings={"a": "mean"})).tables
    assert [table.pooling for table in overridden[:2]] == ["mean", "sum"]
    assert [table.embedding_dim for table in overridden] == [16, 64]


def test_an_override_for_a_table_that_is_not_there_names_the_nearest() -> None:
    data = SyntheticData(source="synthetic", tables=[SyntheticTable(name="user_id", num_embeddings=5)])
    with pytest.raises(DataError, match=r"'userid'.*Did you mean 'user_id'"):
        open_source(data, TablesConfig(embedding_dims={"userid": 8}))


def test_bad_tables_are_named() -> None:
    twice = [SyntheticTable(name="a", num_embeddings=5)] * 2
    with pytest.raises(DataError, match="more than one table named 'a'"):
        source_of(twice)
    with pytest.raises(DataError, match=r"'a' has embedding_dim 6.*try 8"):
        source_of([SyntheticTable(name="a", num_embeddings=5, embedding_dim=6)])
    with pytest.raises(ConfigError, match=r"data.tables.0.num_embeddings' is 0"):
        parse_config({"data": {"source": "synthetic", "tables": [{"name": "a", "num_embeddings": 0}]}})


def test_geometric_lengths_are_many_short_bags_and_few_long_ones_of_the_same_mean() -> None:
    tables = [{"name": name, "num_embeddings": 50, "mean_pooling": 20.0} for name in ("even", "history")]
    tables[1]["lengths"] = "geometric"
    data = SyntheticData.model_validate({"source": "synthetic", "tables": tables, "train_samples": 20_000})
    source = open_source(data, TablesConfig())
    lengths = source.read("train", 0, 0, 20_000).lengths_TB.double()
    assert lengths.mean(1).tolist() == pytest.approx([20, 20], rel=0.03)
    assert lengths[0].min() == 10 and lengths[0].max() == 30
    assert (lengths[1] == 0).double().mean() == pytest.approx(1 / 21, rel=0.15)
    assert (lengths[1] >= 60).double().mean() == pytest.approx((20 / 21) ** 60, rel=0.15)
    part = source.read("train", 0, 7_000, 7_010)
    assert torch.equal(part.lengths_TB.double(), lengths[:, 7_000:7_010])
