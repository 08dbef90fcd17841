"""The loader: every sample exactly once whatever the ranks, resumable anywhere, ids checked, and it always stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import SyntheticData, SyntheticTable
from dlrm_autoshard.data.batch import Batch, DataError, DataSource, Split
from dlrm_autoshard.data.loader import Loader, reader_threads
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.statistics import measure_stats
from tests.scripted_source import Scripted


def synthetic(**keys: object) -> DataSource:
    tables = [SyntheticTable(name=f"t{i}", num_embeddings=50, mean_pooling=pooling) for i, pooling in enumerate([1, 3])]
    data = {"source": "synthetic", "tables": tables, "num_dense": 2, "train_samples": 100, **keys}
    return open_source(SyntheticData.model_validate(data), TablesConfig())


def test_the_thread_that_reads_is_the_one_that_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's pinning, which there is none of without a GPU."""
    threads: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    with Loader(Scripted(), "train", 0, 10, 0, 1, prefetch_batches=2, pin=True) as loader:
        batches = list(loader)
    assert len(threads) == 4 * len(batches) == 40 and all(name.startswith("data") for name in threads)


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    first_sample=st.integers(0, 60),
)
def test_all_ranks_together_see_each_sample_once_in_order(
    num_samples: int, batch_size: int, world_size: int, first_sample: int
) -> None:
    source = Scripted(num_samples=num_samples)
    ranks = [list(Loader(source, "train", 0, batch_size, rank, world_size, first_sample)) for rank in range(world_size)]
    seen = []
    for step in zip(*ranks, strict=True):
        assert len({batch.padded_size for batch in step}) == 1, "all ranks need the same shapes"
        assert {batch.global_size for batch in step} == {sum(batch.size for batch in step)}
        assert all(batch.lengths_TB[:, batch.size :].sum() == 0 for batch in step)
        assert all(batch.values_N.numel() == batch.lengths_TB.sum() for batch in step)
        seen += [value for batch in step for value in batch.values_N.tolist()]
    assert seen == list(range(first_sample, num_samples))
    assert len(Loader(source, "train", 0, batch_size, 0, world_size, first_sample)) == len(ranks[0])


def test_the_number_of_ranks_does_not_change_the_global_batch() -> None:
    source = synthetic()
    alone = list(Loader(source, "train", 3, 24, 0, 1))
    shared = [list(Loader(source, "train", 3, 8, rank, 3)) for rank in range(3)]
    for whole, parts in zip(alone, zip(*shared, strict=True), strict=True):
        real_labels = torch.cat([part.labels_B[: part.size] for part in parts])
        assert torch.equal(real_labels, whole.labels_B)
        by_table = zip(*(part.values_N.split(part.lengths_TB.sum(1).tolist()) for part in parts), strict=True)
        assert torch.equal(torch.cat([torch.cat(values) for values in by_table]), whole.values_N)


def test_resuming_in_mid_epoch_goes_on_where_it_stopped() -> None:
    source = synthetic()
    whole = list(Loader(source, "train", 1, 10, 1, 2))
    rest = list(Loader(source, "train", 1, 10, 1, 2, first_sample=40))
    assert len(rest) == len(whole) - 2
    for resumed, original in zip(rest, whole[2:], strict=True):
        assert torch.equal(resumed.values_N, original.values_N)
        assert torch.equal(resumed.labels_B, original.labels_B)


def test_an_epoch_can_be_cut_short() -> None:
    batches = list(Loader(synthetic(), "train", 0, 10, 0, 1, global_samples=25))
    assert [batch.size for batch in batches] == [10, 10, 5]


def test_reading_ahead_changes_nothing_and_is_bounded() -> None:
    source = Scripted()
    plain = [batch.values_N.tolist() for batch in Loader(source, "train", 0, 7, 0, 1, prefetch_batches=0)]
    ahead = [batch.values_N.tolist() for batch in Loader(source, "train", 0, 7, 0, 1, prefetch_batches=4)]
    assert plain == ahead
    source.reads.clear()
    iterator = iter(Loader(source, "train", 0, 7, 0, 1, prefetch_batches=2))
    next(iterator)
    time.sleep(0.1)
    assert len(source.reads) == 3, "one in hand and two ahead"


class Slow(Scripted):
    """Counts how many read at once; the first sample's batch is the last to be there."""

    def __init__(self, parallel_reads: bool) -> None:
        super().__init__()
        self.parallel_reads, self.now, self.most = parallel_reads, 0, 0

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.05 if first == 0 else 0.005)
        self.now -= 1
        return super().read(split, epoch, first, last)


@pytest.mark.parametrize("parallel", [True, False])
def test_several_threads_read_what_one_reads_and_at_once_only_where_the_source_bears_it(parallel: bool) -> None:
    source = Slow(parallel)
    alone = [batch.values_N.tolist() for batch in Loader(Scripted(), "train", 0, 7, 0, 1)]
    together = [batch.values_N.tolist() for batch in Loader(source, "train", 0, 7, 0, 1, threads=4)]
    assert together == alone
    assert source.most > 1 if parallel else source.most == 1
    bad = Slow(parallel)
    bad.ids = {25: 1000}
    with pytest.raises(DataError, match="sample 25 "), Loader(bad, "train", 0, 7, 0, 1, threads=4) as loader:
        list(loader)


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "threads"),
    [("cpu", 64, 2, 1), ("cuda", 16, 1, 4), ("cuda", 16, 4, 3), ("cuda", 8, 8, 1), ("cuda", 2, 4, 1)],
)
def test_a_gpu_has_as_many_threads_that_read_as_the_host_has_cores_for(
    device: str, cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    assert reader_threads(None, torch.device(device), ranks) == threads


def test_reuse_goes_over_the_first_batches_in_turn() -> None:
    batches = list(Loader(synthetic(reuse_batches=2, train_samples=60), "train", 0, 10, 0, 1))
    assert [batches[0].values_N.tolist(), batches[1].values_N.tolist()] * 3 == [b.values_N.tolist() for b in batches]
    assert batches[0].values_N.tolist() != batches[1].values_N.tolist()


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("data")]


def test_closing_in_mid_epoch_ends_the_thread() -> None:
    with Loader(synthetic(train_samples=10**6), "train", 0, 10, 0, 1) as loader:
        batches = iter(loader)
        next(batches)
        assert data_threads()
    assert list(batches) == []
    assert not data_threads()
    with Loader(synthetic(train_samples=10**6), "train", 0, 10, 0, 1, threads=3) as loader:
        next(iter(loader))
    assert not data_threads()


def test_leaving_the_loop_ends_the_thread() -> None:
    for _ in Loader(synthetic(train_samples=10**6), "train", 0, 10, 0, 1):
        break
    assert not data_threads()


def test_an_error_in_the_thread_reaches_the_loop_after_the_good_batches() -> None:
    source = Scripted(rows=100, ids={25: 100})
    sizes = []
    with pytest.raises(DataError, match="'user'"):
        for batch in Loader(source, "train", 0, 10, 0, 1):
            sizes.append(batch.size)
    assert sizes == [10, 10]
    assert not data_threads()


@pytest.mark.parametrize("bad", [100, -1, 2**40, -(2**40)])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_id_out_of_range_is_an_error_that_says_where(bad: int, rank: int) -> None:
    source = Scripted(rows=100, ids={rank * 5 + 12: bad})
    with pytest.raises(DataError) as caught:
        list(Loader(source, "train", 2, 5, rank, 2))
    message = str(caught.value)
    for part in ["table 'user' has 100 rows", f"sample {rank * 5 + 12} ", "'train'", "epoch 2", f"id {bad}", "on_bad"]:
        assert part in message


@pytest.mark.parametrize("num_weights", [3, 5])
def test_a_batch_whose_ids_have_not_one_weight_each_is_refused(num_weights: int) -> None:
    source = Scripted()
    source.num_weights = 4
    assert len(list(Loader(source, "train", 0, 4, 0, 1))) == 25
    source.num_weights = num_weights
    with pytest.raises(
        DataError, match=rf"from sample 0 .* 'train' .*weights_N as float32 \[{num_weights}\]; .* \[4\]"
    ):
        list(Loader(source, "train", 0, 4, 0, 1))


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("weights_N", lambda batch: batch.weights_N.double(), r"float64 \[4\]; .* must be float32 \[4\]"),
        (
            "values_N",
            lambda batch: batch.values_N.double(),
            r"float64 \[4\]; .* must be int32 or int64 or uint64 \[4\]",
        ),
        ("lengths_TB", lambda batch: batch.lengths_TB.long(), r"int64 \[2, 4\]; .* must be int32 \[2, 4\]"),
        ("labels_B", lambda batch: batch.labels_B.double(), r"float64 \[4\]; .* must be float32 \[4\]"),
        ("dense_BF", lambda batch: batch.dense_BF[:3], r"float32 \[3, 1\]; .* must be float32 \[4, 1\]"),
    ],
)
def test_a_later_batch_in_another_form_than_the_first_is_refused(
    name: str, wrong: Callable[[Batch], torch.Tensor], says: str
) -> None:
    class Changing(Scripted):
        def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
            self.num_weights = last - first
            batch = super().read(split, epoch, first, last)
            return replace(batch, **{name: wrong(batch)}) if first == 8 else batch  # type: ignore[arg-type]

    sizes = []
    with pytest.raises(DataError, match=rf"data source 'Changing', from sample 8 .*, gives {name} as {says}"):
        for batch in Loader(Changing(), "train", 0, 4, 0, 1):
            sizes.append(batch.size)
    assert sizes == [4, 4]


@pytest.mark.parametrize(("on_bad_id", "repaired"), [("clip", [0, 99, 99, 3]), ("hash", [99, 0, 2**40 % 100, 3])])
def test_bad_ids_are_repaired_where_asked(on_bad_id: str, repaired: list[int]) -> None:
    source = Scripted(rows=100, ids={0: -1, 1: 100, 2: 2**40})
    batch = next(iter(Loader(source, "train", 0, 4, 0, 1, on_bad_id=on_bad_id)))  # type: ignore[arg-type]
    assert batch.values_N.tolist() == repaired


@pytest.mark.parametrize(("on_bad_id", "repaired"), [("clip", [99, 99, 2]), ("hash", [2**63 % 100, 0, 2])])
def test_unsigned_ids_of_63_bits_and_more_are_what_they_say(on_bad_id: str, repaired: list[int]) -> None:
    source = Scripted(rows=100, ids={0: 2**63, 1: 2**64 - 16})
    source.dtype = torch.uint64
    loader = Loader(source, "train", 0, 3, 0, 1, on_bad_id=on_bad_id)  # type: ignore[arg-type]
    batch = next(iter(loader))
    assert batch.values_N.tolist() == repaired and batch.values_N.dtype == torch.int32
    with pytest.raises(DataError, match=r"sample 0 \(from 0\) .* has id 9223372036854775808: data source 'Scripted'"):
        next(iter(Loader(source, "train", 0, 3, 0, 1)))


@pytest.mark.parametrize("on_bad_id", ["clip", "hash", "error"])
def test_statistics_see_ids_as_training_does(on_bad_id: Any) -> None:
    source = Scripted(rows=100, ids={0: -1, 1: 10**12})
    if on_bad_id == "error":
        with pytest.raises(DataError, match=r"table 'user' has 100 rows .* sample 0 .* has id -1: data source"):
            measure_stats(source, 50, 1)
        return
    stats = measure_stats(source, 50, 1, on_bad_id=on_bad_id)[1]
    repaired = [0, 99] if on_bad_id == "clip" else [99, 10**12 % 100]
    assert stats.mean_reuse == pytest.approx(50 / len({*repaired, *range(2, 50)}))


def test_ids_travel_as_int32_unless_a_table_is_too_long_for_it() -> None:
    source = Scripted(rows=100)
    assert next(iter(Loader(source, "train", 0, 4, 0, 1))).values_N.dtype == torch.int32
    for rows in (2**31, 2**31 - 1):  # fbgemm's backward on GPUs counts rows through all tables
        source.tables = (source.tables[0], replace(source.tables[1], num_embeddings=rows))
        assert next(iter(Loader(source, "train", 0, 4, 0, 1))).values_N.dtype == torch.int64


def test_checking_ids_is_a_small_part_of_loading() -> None:
    from dlrm_autoshard.data.id_check import IdCheck

    tables = [SyntheticTable(name=f"t{i}", num_embeddings=10_000, mean_pooling=10) for i in range(26)]
    source = open_source(SyntheticData(source="synthetic", tables=tables), TablesConfig())
    check = IdCheck(source.tables, "error")

    def shortest(work: object, repeats: int) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    batch = source.read("train", 0, 0, 1024)
    reading = shortest(lambda: source.read("train", 0, 0, 1024), 5)
    assert shortest(lambda: check(batch, str), 20) < 0.06 * reading  # 2% when nobody else uses the machine
