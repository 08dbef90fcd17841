"""The tables as a module in a plain PyTorch loop: what nn.EmbeddingBag and DDP compute, on any number of ranks."""

from __future__ import annotations

import gc
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_autoshard.autoshard.autoshard import Autoshard
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.bag_inputs import BagsError
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad, RowwiseAdagrad
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

TABLES = (
    TableConfig("item", 60, 16),
    TableConfig("user", 1000, 4),
    TableConfig("day", 7, 8, pooling="mean"),
    TableConfig("city", 300, 8),
)
SUMS = tuple(replace(table, pooling="sum") for table in TABLES)
BATCH, STEPS = 6, 4


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (len(TABLES), BATCH), generator=generator)
    counts = lengths.sum(1).tolist()
    values = [
        torch.randint(0, t.num_embeddings, (n,), generator=generator) for t, n in zip(TABLES, counts, strict=True)
    ]
    return lengths, torch.cat(values)


def labels_of(rank: int, step: int) -> Tensor:
    return torch.randint(0, 2, (BATCH,), generator=torch.Generator().manual_seed(7000 * step + rank)).float()


class Tower(nn.Module):
    """Dropout is off by its rate and BatchNorm's statistics are each rank's own, so that one process can stand in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rest = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, pooled_BD: Tensor) -> Tensor:
        return self.rest(pooled_BD).squeeze(1)


def plain_loop(world_size: int, tables: tuple[TableConfig, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """Every rank's losses in turn, by nn.EmbeddingBag, SGD and the mean of the ranks' losses."""
    bags = {t.name: nn.EmbeddingBag(t.num_embeddings, t.embedding_dim, mode=t.pooling) for t in tables}
    for table in tables:
        with torch.no_grad():
            initialise(bags[table.name].weight, table.name, 0)
    tower = Tower(sum(t.embedding_dim for t in tables))
    optimizer = torch.optim.SGD([*(bag.weight for bag in bags.values()), *tower.parameters()], lr=0.5)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for rank in range(world_size):
            lengths, values = ids_of(rank, step)
            parts = values.split(lengths.sum(1).tolist())
            pooled = [
                bags[t.name](part, torch.cat([torch.zeros(1, dtype=torch.int64), row.cumsum(0)[:-1]]))
                for t, part, row in zip(tables, parts, lengths, strict=True)
            ]
            logits = tower(torch.cat(pooled, 1))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels_of(rank, step))
            losses.append(loss.item())
            total = total + loss / world_size
        total.backward()
        optimizer.step()
    return losses, {f"{t.name}.weight": bags[t.name].weight.detach() for t in tables}


def our_loop(
    rank: int, world_size: int, tables: tuple[TableConfig, ...], moves: list[ShardingPlan], how: str = "given"
) -> tuple[list[float], dict[str, Tensor]]:
    bags = ShardedEmbeddingBags(tables, optimizer=SGD(lr=0.5))
    tower = DistributedDataParallel(Tower(sum(t.embedding_dim for t in tables)))
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.5)
    losses = []

    def pooled() -> Iterator[tuple[int, Tensor]]:
        if how == "ahead":
            yield from ((step, bags(ids)) for step, ids in bags.ahead(range(STEPS), lambda step: ids_of(rank, step)))
        else:
            given = (ids_of(rank, step) for step in range(STEPS))
            yield from enumerate(bags(KeyedIds(*ids)) if how == "keyed" else bags(*ids) for ids in given)

    for step, pooled_BD in pooled():
        loss = nn.functional.binary_cross_entropy_with_logits(tower(pooled_BD), labels_of(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step < len(moves):
            reshard(bags.sharded, moves[step], group=bags.runtime.control)
    weights = {name: value.clone() for name, value in bags.own_tensors().items()}
    del tower  # before the group goes: gloo's threads abort otherwise
    return losses, weights


class KeyedIds:
    """What of torchrec's KeyedJaggedTensor is used, in another order of keys."""

    def __init__(self, lengths_TB: Tensor, values_N: Tensor, keys: list[str] | None = None) -> None:
        """keys: if not those of the tables."""
        parts = values_N.split(lengths_TB.sum(1).tolist())
        order = [2, 0, 3, 1]
        self._keys = keys or [TABLES[i].name for i in order]
        self._lengths, self._values = lengths_TB[order].reshape(-1), torch.cat([parts[i] for i in order])

    def keys(self) -> list[str]:
        return self._keys

    def lengths(self) -> Tensor:
        return self._lengths

    def values(self) -> Tensor:
        return self._values


@pytest.mark.parametrize("tables", [SUMS, TABLES], ids=["sums", "sums and means"])
@pytest.mark.parametrize(
    ("world_size", "how"), [(1, "given"), (1, "ahead"), (2, "given"), (2, "keyed"), (2, "ahead"), (3, "given")]
)
def test_a_plain_loop_trains_as_embedding_bags_in_one_process(
    world_size: int, how: str, tables: tuple[TableConfig, ...]
) -> None:
    expected, weights = plain_loop(world_size, tables)
    ranks = run_ranks(our_loop, world_size, tables, [], how)
    losses = [ranks[i % world_size][0][i // world_size] for i in range(len(expected))]
    assert losses == pytest.approx(expected, abs=1e-5)
    for _, own in ranks:
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["given", "ahead"])
def test_moves_between_steps_change_no_bit(how: str) -> None:
    names = [table.name for table in TABLES]
    owners = ((1, 1, 1, 1), (0, 1, 0, 0), (0, 0, 0, 1))
    plans = [ShardingPlan(dict(zip(names, ranks, strict=True)), 2) for ranks in owners]
    still, moved = run_ranks(our_loop, 2, TABLES, []), run_ranks(our_loop, 2, TABLES, plans, how)
    assert [losses for losses, _ in still] == [losses for losses, _ in moved]
    one, other = ({name: value for _, own in ranks for name, value in own.items()} for ranks in (still, moved))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def state_round_trip(rank: int, world_size: int) -> tuple[bool, list[str], dict[str, object]]:
    """Trains, saves, makes another one under another plan, loads what all ranks saved."""
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.5))
    for step in range(2):
        bags(*ids_of(rank, step)).square().sum().backward()
    states: list[dict[str, object]] = [{}] * world_size
    dist.all_gather_object(states, bags.state_dict(), group=bags.runtime.control)
    everything = {key: value for state in states for key, value in state.items()}
    plan = ShardingPlan({table.name: (bags.plan.rank_of[table.name] + 1) % world_size for table in TABLES}, world_size)
    other = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.5), plan=plan, seed=3)
    result = other.load_state_dict(everything, strict=True)
    with torch.no_grad():
        same = torch.equal(bags(*ids_of(rank, 9)), other(*ids_of(rank, 9)))
    incomplete = {key: value for key, value in everything.items() if "user" not in key}
    missing = other.load_state_dict(incomplete, strict=False).missing_keys
    assert not result.missing_keys and not result.unexpected_keys
    return same, missing, other.get_extra_state()


def test_a_state_loads_under_another_plan() -> None:
    ranks = run_ranks(state_round_trip, 2)
    assert all(same for same, _, _ in ranks)
    assert sorted(key for _, missing, _ in ranks for key in missing) == ["user.momentum1", "user.weight"]
    assert [extra["updates"] for _, _, extra in ranks] == [2, 2]


def evaluate_and_complain(rank: int, world_size: int) -> list[str]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=RowwiseAdagrad(lr=0.5))
    before = {name: value.clone() for name, value in bags.own_tensors().items()}
    bags.eval()
    assert not bags(*ids_of(rank, 0)).requires_grad
    assert all(torch.equal(before[name], value) for name, value in bags.own_tensors().items())
    lengths, values = ids_of(rank, 0)
    said = []
    for wrong in ((lengths, values + 10**6), (lengths[:3], values), (lengths[:, :2], values)):
        with pytest.raises(ValueError) as caught:
            bags(*wrong)
        said.append(str(caught.value))
    keyed = KeyedIds(lengths, values, ["item", "user", "day", "town"])
    with pytest.raises(BagsError) as unknown:
        bags(keyed)
    return [*said, str(unknown.value)]


def look_up_apart(rank: int, world_size: int) -> str:
    """Ranks with other numbers of samples."""
    bags = ShardedEmbeddingBags(TABLES, optimizer=RowwiseAdagrad(lr=0.5))
    lengths, values = ids_of(rank, 0)
    samples = lengths.shape[1] - rank
    counts = lengths.sum(1).tolist()
    kept = torch.cat([v[: int(n[:samples].sum())] for v, n in zip(values.split(counts), lengths, strict=True)])
    with pytest.raises((UserError, RuntimeError)) as caught:
        bags(lengths[:, :samples], kept)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_that_look_up_other_numbers_of_samples_are_told() -> None:
    said = run_ranks(look_up_apart, 2)
    assert any("all ranks must look up equally many" in one for one in said), said


def train_in_groups(rank: int, world_size: int) -> list[Tensor]:
    """Two groups of two ranks, each with bags of its own, and their group's autoshard beside them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group: Any = groups[rank // 2]
    bags = ShardedEmbeddingBags(SUMS, optimizer=SGD(lr=0.1), group=group)
    bags(*ids_of(rank % 2, 0)).sum().backward()
    assert bags.runtime.broadcast(rank) == rank // 2 * 2 and bags.runtime.gather(rank) in (None, [rank, rank + 1])
    return [value.clone() for _, value in sorted(bags.own_tensors().items())]


def test_groups_of_ranks_train_each_for_itself() -> None:
    by_rank = run_ranks(train_in_groups, 4, timeout=90)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(by_rank[one], by_rank[other], strict=True))


def train_in_overlapping_groups(rank: int, world_size: int) -> list[Tensor]:
    """Rank 0 is in more groups than rank 1 when the two make theirs: torch's own, and those of other bags."""
    other: Any = dist.new_group([0, 2])
    group: Any = dist.new_group([0, 1])
    if rank != 1:
        assert ShardedEmbeddingBags(SUMS, group=other).runtime.broadcast(rank) == 0
    if rank == 2:
        with pytest.raises(BagsError, match="this rank is not in it"):
            ShardedEmbeddingBags(SUMS, group=group)
        return []
    bags = ShardedEmbeddingBags(SUMS, optimizer=SGD(lr=0.1), group=group)
    bags(*ids_of(rank, 0)).sum().backward()
    return [value.clone() for _, value in sorted(bags.own_tensors().items())]


def test_ranks_in_other_numbers_of_groups_train_together() -> None:
    in_one = run_ranks(train_in_groups, 4, timeout=90)
    for one, other in zip(run_ranks(train_in_overlapping_groups, 3, timeout=30)[:2], in_one[:2], strict=True):
        assert len(one) == len(other) == 2 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def two_lookups_in_a_step(rank: int, world_size: int) -> list[tuple[str, float, float]]:
    bags = ShardedEmbeddingBags(SUMS, optimizer=SGD(lr=0.1))
    with bags.clock.step(sampled=True):
        bags(*ids_of(rank, 0))  # whose loss was not finite, say
        bags(*ids_of(rank, 1)).sum().backward()
    return bags.clock.spans


def test_stages_of_two_lookups_in_a_step_do_not_overlap() -> None:
    for spans in run_ranks(two_lookups_in_a_step, 2):
        in_order = sorted(spans, key=lambda span: span[1])
        assert [name for name, _, _ in in_order].count("dense_fwd") == 2
        assert all(end <= start for (_, _, end), (_, start, _) in itertools.pairwise(in_order)), in_order


def sent_in_any_order(rank: int, world_size: int) -> list[bool]:
    """Whether what is sent and looked up in each way gives what it gives at once: two batches ahead, one of which is
    looked up twice; an evaluation and a move between; one that is never looked up."""
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=0.1))
    one, other, dropped = (bags.send(*ids_of(rank, step)) for step in range(3))
    with torch.no_grad():
        expected = [bags(*ids_of(rank, step)) for step in (0, 1)]
        found = [bags(other), bags(one), bags(other)]
        bags.send(*ids_of(rank, 2))
        owners = {name: 1 - owner for name, owner in bags.plan.rank_of.items()}
        bags.move_to(ShardingPlan(owners, world_size))
        moved = [bags(one), bags(*ids_of(rank, 1))]
    assert dropped.arrived is None
    pairs = zip([expected[1], expected[0], expected[1], *expected], [*found, *moved], strict=True)
    return [torch.equal(a, b) for a, b in pairs]


def test_ids_are_sent_and_looked_up_in_any_order() -> None:
    assert all(all(equal) for equal in run_ranks(sent_in_any_order, 2))


def sampled_ahead(rank: int, world_size: int) -> list[list[str]]:
    """The stages of three steps, all but the first sampled, by the time at which they begin."""
    bags, found = ShardedEmbeddingBags(SUMS, optimizer=SGD(lr=0.1)), []
    batches = bags.ahead(range(4), lambda step: ids_of(rank, step))
    for step in range(3):
        with bags.clock.step(sampled=step > 0):
            _, ids = next(batches)
            bags(ids).sum().backward()
        spans = sorted(bags.clock.spans, key=lambda span: span[1])
        assert all(end <= start for (_, _, end), (_, start, _) in itertools.pairwise(spans)), spans
        found.append([name for name, _, _ in spans])
    return found


def test_a_sampled_step_has_the_time_of_the_next_batchs_ids_apart() -> None:
    for first, *sampled in run_ranks(sampled_ahead, 2):
        assert not first
        for stages in sampled:
            assert stages[-2:] == ["input_dist_wait", "input_dist"] and stages.count("input_dist") == 1


def saved_bytes(rank: int, world_size: int) -> tuple[int, int]:
    """Of what torch.save writes, and of the tensors in it."""
    bags = ShardedEmbeddingBags(SUMS, optimizer=RowwiseAdagrad(lr=0.1))
    state, file = bags.state_dict(), io.BytesIO()
    torch.save(state, file)
    live = next(iter(bags.own_tensors().values()))
    live.fill_(3.0)
    assert all(bool((state[name] == 3.0).all()) for name in list(bags.own_tensors())[:1])  # a view, not a copy
    return len(file.getvalue()), sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def test_a_saved_state_takes_as_much_as_this_ranks_tables() -> None:
    """A tensor is saved with all of the memory that it is a view of."""
    for written, needed in run_ranks(saved_bytes, 2):
        assert needed < written < needed + 10_000


def test_evaluation_changes_nothing_and_wrong_ids_are_named() -> None:
    for beyond, few, uneven, unknown in run_ranks(evaluate_and_complain, 2):
        assert "table 'item' has 60 rows" in beyond and "of rank" in beyond
        assert "4 tables need [4, B]" in few or "add up to" in few
        assert "add up to" in uneven
        assert "'town' is not" in unknown


def weighted(rank: int, world_size: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What the bags give with weights, what EmbeddingBags give, and the tables after a step."""
    bags = ShardedEmbeddingBags(SUMS, optimizer=SGD(lr=1.0))
    lengths, values = ids_of(rank, 0)
    weights = torch.rand(len(values), generator=torch.Generator().manual_seed(rank))
    expected = []
    parts, by_table = (t.split(lengths.sum(1).tolist()) for t in (values, weights))
    for table, ids, own, row in zip(SUMS, parts, by_table, lengths, strict=True):
        plain = nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode="sum")
        with torch.no_grad():
            initialise(plain.weight, table.name, 0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), row.cumsum(0)[:-1]])
        expected.append(plain(ids, offsets, per_sample_weights=own))
    pooled = bags(lengths, values, weights)
    pooled.sum().backward()
    return pooled.detach(), torch.cat(expected, 1).detach(), {n: t.clone() for n, t in bags.own_tensors().items()}


def test_weighted_bags_are_those_of_torch_and_their_gradients_too() -> None:
    ranks = run_ranks(weighted, 2)
    for pooled, expected, _ in ranks:
        torch.testing.assert_close(pooled, expected, atol=1e-5, rtol=1e-5)
    item = next(own["item.weight"] for _, _, own in ranks if "item.weight" in own)
    before = torch.empty_like(item)
    initialise(before, "item", 0)
    used = torch.zeros(SUMS[0].num_embeddings)
    for rank in range(2):
        lengths, values = ids_of(rank, 0)
        count = int(lengths[0].sum())
        weights = torch.rand(len(values), generator=torch.Generator().manual_seed(rank))
        used.index_add_(0, values[:count], weights[:count])
    torch.testing.assert_close(before - item, (used / 2)[:, None].expand_as(item), atol=1e-5, rtol=1e-5)


A, B = (TableConfig(name, 50, 8) for name in "ab")
LENGTHS, VALUES = torch.ones(2, 4, dtype=torch.int32), torch.arange(8)


def settings(**keys: Any) -> Callable[[], object]:
    return lambda: Autoshard(ShardedEmbeddingBags([A, B]), run_dir="unused", **keys)


def test_ranks_without_a_process_group_do_not_train_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BagsError, match="2 ranks were started, but this one has no process group"):
        ShardedEmbeddingBags([A])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ShardedEmbeddingBags([]), "there are no tables"),
        (lambda: ShardedEmbeddingBags([A, A]), "two tables are named 'a'. If features share a table, give"),
        (lambda: ShardedEmbeddingBags([A, replace(B, optimizer=cast(Any, "sgd"))]), "table 'b' is 'sgd'; it must be a"),
        (lambda: ShardedEmbeddingBags([A], exchange_dtype="fp8"), "'fp8'; it must be one of fp32, fp16, bf16"),
        (lambda: ShardedEmbeddingBags([A], optimizer=cast(Any, torch.optim.SGD)), "it must be a RowwiseAdagrad"),
        (lambda: ShardedEmbeddingBags([A, B])(LENGTHS, VALUES.float()), "values are torch.float32"),
        (lambda: ShardedEmbeddingBags([A, B])(LENGTHS.float(), VALUES), "lengths are torch.float32"),
        (lambda: ShardedEmbeddingBags([A, B])([1, 2], VALUES), "lengths are list"),
        (lambda: ShardedEmbeddingBags([A, B])(LENGTHS[:, :0], VALUES[:0]), "the batch has no samples"),
        (lambda: ShardedEmbeddingBags([A, B])(LENGTHS * 2 - 3, VALUES[:0]), "has a bag of length -1 of table 'a'"),
        (lambda: ShardedEmbeddingBags([A, B])(LENGTHS), "or a KeyedJaggedTensor"),
        (lambda: ShardedEmbeddingBags(TABLES)(KeyedIds(*ids_of(0, 0)), None, VALUES.float()), "which has its own"),
        (lambda: ShardedEmbeddingBags([A, B])(LENGTHS, VALUES, torch.ones(8).requires_grad_()), "a gradient"),
        (lambda: ShardedEmbeddingBags([A])(ShardedEmbeddingBags([A, B]).send(LENGTHS, VALUES)), "were sent by other"),
        (
            lambda: [bags(bags.send(LENGTHS, VALUES), VALUES) for bags in [ShardedEmbeddingBags([A, B])]],
            "already include",
        ),
        (settings(pinnd={"a": 0}), "unknown key 'autoshard.pinnd'. Did you mean 'autoshard.pinned'?"),
        (settings(every_steps=0), "'autoshard.reshard.every_steps' is 0; it must be more than 0"),
        (settings(sample_every=0), "'profile.every_steps' is 0"),
        (settings(reshard=3), "'autoshard.reshard' is 3; it is a section"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert said in str(caught.value)


def made_and_dropped(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Threads and open descriptors of this process, after ten loops and after 150."""
    process, found = psutil.Process(), list[tuple[int, int]]()
    for number in range(150):
        bags = ShardedEmbeddingBags(SUMS, optimizer=SGD(lr=0.1))
        tower = DataParallelDense(Tower(36), torch.optim.SGD, lr=0.1, replicas=bags.replicas)
        tower.backward(tower.module(bags(*ids_of(rank, number))).sum())
        tower.step()
        del bags, tower
        if number in (9, 149):
            gc.collect()
            dist.barrier()
            found.append((process.num_threads(), process.num_fds()))
    return found


def test_modules_that_are_dropped_leave_no_threads_and_no_connections() -> None:
    for (threads, descriptors), (later_threads, later_descriptors) in run_ranks(made_and_dropped, 2, timeout=120):
        assert later_threads <= threads + 2 and later_descriptors <= descriptors + 8
