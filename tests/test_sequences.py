"""Vectors that are not pooled: the same numbers as plain PyTorch's, whatever the plan, and each sample's own."""

from __future__ import annotations

import random
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlrm_autoshard as das
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.jagged import Jagged
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig
from tests.ranks import run_ranks

TABLES = (
    TableConfig("item", 60, 8), TableConfig("user", 900, 4), TableConfig("tag", 7, 16, pooling="mean"),
    TableConfig("query", 40, 16),
)  # fmt: skip
FEATURES = {"item": ["candidate", "clicks", "bought"]}
NAMES = ["candidate", "clicks", "bought", "user", "tag", "query"]
TABLE_OF = [0, 0, 0, 1, 2, 3]
SEQUENCES = ["clicks", "query"]
PLANS: dict[int, list[dict[str, int]]] = {
    1: [
        {"item": 0, "user": 0, "tag": 0, "query": 0},
        {"item[0:4]": 0, "item[4:8]": 0, "user": 0, "tag": 0, "query": 0},
    ],
    2: [
        {"item": 1, "user": 0, "tag": 1, "query": 0},
        {"item[0:4]": 1, "item[4:8]": 0, "user": 1, "tag": 0, "query[0:8]": 0, "query[8:16]": 1},
        {"item": 0, "user": 0, "tag": 0, "query": 0},
    ],
    3: [
        {"item": 2, "user": 0, "tag": 0, "query": 2},
        {"item[0:4]": 0, "item[4:8]": 2, "user": 0, "tag": 0, "query": 1},
    ],
}
SAMPLES = 5


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Sequences of 0 to 9 ids, of which there are none at all in some steps."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (len(NAMES), SAMPLES), generator=generator)
    for name in SEQUENCES:
        lengths[NAMES.index(name)] = torch.randint(0, 10, (SAMPLES,), generator=generator)
    if step % 3 == 1:
        lengths[NAMES.index("query")] = 0
    values = [
        torch.randint(0, TABLES[table].num_embeddings, (n,), generator=generator)
        for table, n in zip(TABLE_OF, lengths.sum(1).tolist(), strict=True)
    ]
    return lengths, torch.cat(values)


def loss_of(pooled: Tensor, sequences: dict[str, Jagged]) -> Tensor:
    """Of a toy attention: each click is weighed by its place and by the user."""
    total = pooled.sin().sum(1)
    for name in SEQUENCES:
        vectors, mask = sequences[name].padded(6)
        place = torch.arange(1, 7)[:, None] / 7
        total = total + ((vectors * place).sin() * mask[:, :, None] * pooled[:, :1, None]).sum((1, 2))
    return total.square().mean()


OPTIMIZERS: dict[str, Any] = {
    "sgd": das.SGD(lr=0.1),
    "adagrad": das.Adagrad(lr=0.1),
    "rowwise_adagrad": das.RowwiseAdagrad(lr=0.1),
    "per_part": das.RowwiseAdagrad(lr=0.1, per_part=True),
}
Found = tuple[list[Tensor], dict[str, Tensor]]


def ours(
    rank: int, world_size: int, optimizer: str, plans: list[dict[str, int]], how: str = "", once: bool = True
) -> Found:
    """What two steps under each plan looked up, tables moved between; and this rank's tables afterwards."""
    bags = ShardedEmbeddingBags(
        TABLES, optimizer=OPTIMIZERS[optimizer], plan=ShardingPlan(plans[0], world_size), features=FEATURES,
        sequences=SEQUENCES, replicate=["user", "tag"] if how == "replicated" else "none", rows_once=once,
    )  # fmt: skip
    if how == "group":
        bags.sharded._link = None
        bags.sharded.adopt(bags.plan)
    found: list[Tensor] = []
    for number, plan in enumerate(plans):
        if number:
            bags.move_to(ShardingPlan(plan, world_size))
        for step in range(2 * number, 2 * number + 2):
            with bags.clock.step(sampled=how == "sampled"):
                if how == "halves":
                    lookup = bags.look_up(*ids_of(rank, step))
                    pooled, sequences = lookup.wait(), lookup.sequences
                else:
                    pooled, sequences = bags(*ids_of(rank, step))
                found += [pooled.detach(), *(sequences[name].values.detach().clone() for name in SEQUENCES)]
                loss_of(pooled, sequences).backward()
    return found, {name: value.clone() for name, value in bags.own_tensors().items()}


def initial(table: TableConfig) -> nn.Parameter:
    """The weights that every job starts from, in float64: what a reference rounds is nothing beside float32's."""
    weight = torch.empty(table.num_embeddings, table.embedding_dim)
    initialise(weight, table.name, 0)
    return nn.Parameter(weight.double())


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6 * largest)


def reference(world_size: int, optimizer: str, count: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """nn.Embedding and embedding_bag in one process, over the whole batch, and the optimizers as their papers say."""
    weights = {t.name: initial(t) for t in TABLES}
    sums: dict[str, Tensor | float] = dict.fromkeys(weights, 0.0)
    found: list[list[Tensor]] = [[] for _ in range(world_size)]
    for step in range(count):
        losses = []
        for rank in range(world_size):
            lengths, values = ids_of(rank, step)
            pooled, sequences = [], {}
            for name, table, own, ids in zip(
                NAMES, TABLE_OF, lengths, values.split(lengths.sum(1).tolist()), strict=True
            ):
                weight = weights[TABLES[table].name]
                if name in SEQUENCES:
                    sequences[name] = Jagged(nn.functional.embedding(ids, weight), own)
                else:
                    mode = TABLES[table].pooling
                    pooled.append(nn.functional.embedding_bag(ids, weight, own.cumsum(0) - own, mode=mode))
            joined = torch.cat(pooled, 1)
            found[rank] += [joined.detach(), *(sequences[name].values.detach() for name in SEQUENCES)]
            losses.append(loss_of(joined, sequences))
        torch.stack(losses).mean().backward()
        for name, weight in weights.items():
            assert weight.grad is not None
            gradient, weight.grad = weight.grad, None
            with torch.no_grad():
                if optimizer == "sgd":
                    weight.sub_(0.1 * gradient)
                    continue
                squares = gradient**2
                sums[name] = sums[name] + (squares if optimizer == "adagrad" else squares.mean(1, keepdim=True))
                weight.sub_(0.1 * gradient / (sums[name] ** 0.5 + 1e-8))
    return found, {f"{name}.weight": weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sequences_train_as_plain_pytorch_does(world_size: int, optimizer: str, once: bool) -> None:
    """A table looked up by a sequence and by pooled features has one update for both; tables are moved and split."""
    plans = PLANS[world_size]
    if optimizer == "rowwise_adagrad":  # a split table is another optimizer then
        plans = [plan for plan in plans if "item" in plan]
    expected, tables = reference(world_size, optimizer, 2 * len(plans))
    for rank, (found, own) in enumerate(run_ranks(ours, world_size, optimizer, plans, "", once, timeout=90)):
        for one, other in zip(found, expected[rank], strict=True):
            assert_equal(one, other)
        for key, value in own.items():
            shard = Shard(key.rsplit(".", 1)[0])
            if key.endswith(".weight"):
                whole = tables[f"{shard.table}.weight"]
                expected_part = whole[:, slice(*(shard.columns or (0, whole.shape[1])))]
                assert_equal(value, expected_part)


def test_tables_with_sequences_lie_beside_copies_of_small_tables() -> None:
    expected, _ = reference(2, "adagrad", 2)
    for rank, (found, _) in enumerate(run_ranks(ours, 2, "adagrad", [{"item": 1, "query": 0}], "replicated")):
        for one, other in zip(found, expected[rank], strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_no_plan_no_move_and_no_way_of_travel_changes_a_bit(optimizer: str, once: bool) -> None:
    plans = PLANS[2] if optimizer != "rowwise_adagrad" else [PLANS[2][0], PLANS[2][2]]
    expected = run_ranks(ours, 2, optimizer, [plans[0]] * len(plans), "", once)
    for how, under in [("", plans), ("halves", plans[::-1]), ("group", plans), ("sampled", [plans[-1]] * len(plans))]:
        ranks = run_ranks(ours, 2, optimizer, under, how, once, timeout=60)
        for (found, _), (same, _) in zip(ranks, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True)), how


def only_sequences(rank: int, world_size: int, dtype: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of tables of which nothing is pooled, what one step gives; the first rank has no ids."""
    tables = [TableConfig("a", 30, 8), TableConfig("b", 30, 4)]
    plan = ShardingPlan({"a": world_size - 1, "b": world_size - 1}, world_size)
    bags = ShardedEmbeddingBags(
        tables, optimizer=das.SGD(lr=1.0), plan=plan, sequences=["a", "b"], exchange_dtype=dtype
    )
    lengths = torch.tensor([[2, 0, 1], [0, 0, 3]]) * rank
    pooled, sequences = bags(lengths, torch.arange(int(lengths.sum())))
    before = sequences["b"].values.detach().clone()
    (sequences["a"].values.sum() + pooled.sum()).backward()
    with torch.no_grad():
        after = bags(lengths, torch.arange(int(lengths.sum()))).sequences["a"].values
    return pooled, before, {"before": sequences["a"].values.detach(), "after": after}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_tables_of_which_nothing_is_pooled(dtype: str) -> None:
    (nothing, none, _), (pooled, b, found) = run_ranks(only_sequences, 2, dtype)
    assert nothing.shape == pooled.shape == (3, 0) and none.shape == (0, 4) and b.shape == (3, 4)
    torch.testing.assert_close(found["before"] - 0.5, found["after"], atol=0.01, rtol=0.01)


def test_padded_vectors_are_each_samples_last() -> None:
    values = torch.arange(6.0)[:, None].requires_grad_()
    history = Jagged(values, torch.tensor([2, 0, 4]))
    vectors, mask = history.padded(3)
    assert vectors[:, :, 0].tolist() == [[0, 1, 0], [0, 0, 0], [3, 4, 5]]
    assert mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    vectors.sum().backward()
    assert values.grad is not None and values.grad[:, 0].tolist() == [1, 1, 0, 1, 1, 1]
    assert history.padded()[0].shape == (3, 4, 1) and history.padded(9)[0].shape == (3, 9, 1)
    assert Jagged(values[:0], torch.zeros(2, dtype=torch.int32)).padded()[0].shape == (2, 0, 1)


def given_up(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=das.Adagrad(lr=0.1), features=FEATURES, sequences=SEQUENCES)
    for step in range(2):
        if how == "cancelled":
            bags.look_up(*ids_of(rank, 7)).cancel()
        if how == "evaluated":
            with torch.no_grad():
                bags(*ids_of(rank, 7))
        pooled, sequences = bags(*ids_of(rank, step))
        if how == "dropped":
            bags.look_up(*ids_of(rank, 7))
        loss_of(pooled, sequences).backward()
    return {name: value.clone() for name, value in bags.own_tensors().items()}


@pytest.mark.parametrize("how", ["cancelled", "dropped", "evaluated"])
def test_a_lookup_that_comes_to_nothing_harms_no_other(how: str) -> None:
    for tables, same in zip(run_ranks(given_up, 2, how), run_ranks(given_up, 2, ""), strict=True):
        assert all(torch.equal(tables[name], same[name]) for name in same)


def grown(rank: int, world_size: int, how: str) -> int:
    """Bytes by which this rank has grown over twenty steps whose vectors are 5 MB each."""
    bags = ShardedEmbeddingBags([TableConfig("item", 60, 64)], optimizer=das.SGD(lr=0.1), sequences=["item"])
    ids = torch.full((1, 400), 50), torch.arange(20_000) % 60
    before = 0
    for step in range(23):
        lookup = bags.look_up(*ids)
        if how != "dropped":
            lookup.wait()
        if how == "trained":
            lookup.sequences["item"].values.sum().backward()
        del lookup
        before = psutil.Process().memory_info().rss if step == 2 else before
    return psutil.Process().memory_info().rss - before


@pytest.mark.parametrize("how", ["trained", "waited for", "dropped"])
def test_steps_give_their_memory_back(how: str) -> None:
    assert max(run_ranks(grown, 2, how)) < 30e6


def chosen(rank: int, world_size: int) -> list[Any]:
    """What a first batch of so many different ids, of 100, has chosen; whether a batch later, or a loaded state changes
    it; and what of weighted ids comes back, and their rows' changes, sent once each and as they came."""
    made = []
    for different in (100, 20):
        bags = ShardedEmbeddingBags([TableConfig("item", 100, 4)], sequences=["item"])
        for count in (different, 50):
            bags(torch.tensor([[60, 40]]), torch.arange(100) % count)
        made.append(bags)
    made[0].load_state_dict({"_extra_state": made[1].get_extra_state()}, strict=False)
    found: list[Any] = [bags.get_extra_state()["rows_once"] for bags in made]
    lengths, ids = torch.tensor([[3, 2]]), torch.tensor([7, 7, 9, 7, 9])
    for once in (False, True):
        table = TableConfig("item", 10, 4)
        bags = ShardedEmbeddingBags([table], optimizer=das.SGD(lr=1.0), sequences=["item"], rows_once=once)
        values = bags(lengths, ids, torch.arange(5.0)).sequences["item"].values
        (values * torch.arange(1.0, 6)[:, None]).sum().backward()
        after = bags(lengths, ids).sequences["item"].values
        found.append(torch.stack([values, after]).detach().clone())
    return found


def test_the_first_batch_chooses_for_good_and_weights_are_kept() -> None:
    for fresh, repeated, came, once in run_ranks(chosen, 2):
        assert fresh is True and repeated is True  # the first one's was False, until the second's state was loaded
        torch.testing.assert_close(once, came, rtol=1e-6, atol=1e-6)
    (alone, _, came, once) = run_ranks(chosen, 1)[0]
    assert alone is False  # where nothing travels
    torch.testing.assert_close(once, came, rtol=1e-6, atol=1e-6)


def saved_and_loaded(rank: int, world_size: int) -> list[bool]:
    """Whether another module, of other owners, gives what the one whose state it loaded does."""
    made = [
        ShardedEmbeddingBags(TABLES, optimizer=OPTIMIZERS["per_part"], plan=ShardingPlan(plan, world_size),
                             features=FEATURES, sequences=SEQUENCES, seed=seed)
        for seed, plan in enumerate(PLANS[2][:3:2])
    ]  # fmt: skip
    loss_of(*made[0](*ids_of(rank, 0))).backward()
    states: list[dict[str, Any]] = [{}] * world_size
    dist.all_gather_object(states, made[0].state_dict(), group=made[0].runtime.control)
    made[1].load_state_dict({key: value for state in states for key, value in state.items()})
    found = []
    for bags in made:
        for step in range(1, 4):
            pooled, sequences = bags(*ids_of(rank, step))
            loss_of(pooled, sequences).backward()
        found.append([pooled.detach(), *(sequences[name].values.detach() for name in SEQUENCES)])
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


def test_a_saved_state_loads_under_another_plan() -> None:
    assert all(all(same) for same in run_ranks(saved_and_loaded, 2))


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UserError, match=r"rows_once is 'yes'; it must be True, False or 'auto'"):
        ShardedEmbeddingBags(TABLES, rows_once="yes")  # type: ignore[arg-type]
    for sequences, said in [
        (["clickz"], "'clickz' is not a feature. Did you mean 'clicks'?"),
        ("clicks", "a list of names"),
    ]:
        with pytest.raises(UserError, match=said):
            ShardedEmbeddingBags(TABLES, features=FEATURES, sequences=sequences)
    bags = ShardedEmbeddingBags(TABLES, features=FEATURES, sequences=SEQUENCES)
    lengths, values = ids_of(0, 0)
    values[int(lengths[0].sum())] = 60
    with pytest.raises(UserError, match=r"'clicks'.* 60"):
        bags(lengths, values)


def drawn_job(rank: int, world_size: int, seed: int) -> tuple[list[Tensor], dict[str, Tensor], list[Any], bool]:
    """Tables, features, sequences and plans by the seed; what a step under each plan looks up, and the tables; and
    whether the same steps under these plans in reverse look up the same to the bit."""
    draw = random.Random(seed)
    tables = [
        TableConfig(f"t{n}", draw.randint(1, 40), draw.choice([4, 8, 12]), pooling=draw.choice(["sum", "mean"]))
        for n in range(draw.randint(1, 4))
    ]
    features = {t.name: [f"{t.name}_{i}" for i in range(draw.randint(1, 3))] for t in tables}
    names = [name for own in features.values() for name in own]
    sequences = draw.sample(names, draw.randint(1, len(names)))
    optimizer = draw.choice(["sgd", "adagrad", "rowwise_adagrad"])
    plans = [
        ShardingPlan({s: draw.randrange(world_size) for t in tables for s in cut(t, optimizer, draw)}, world_size)
        for _ in range(2)
    ]
    batches = [drawn_ids(tables, features, draw, seed * 10 + rank) for _ in plans]

    def trained(plans: list[ShardingPlan]) -> tuple[list[Tensor], dict[str, Tensor]]:
        bags = ShardedEmbeddingBags(
            tables, optimizer=OPTIMIZERS[optimizer], plan=plans[0], features=features, sequences=sequences,
            rows_once=seed % 3 > 0,
        )  # fmt: skip
        found: list[Tensor] = []
        for plan, batch in zip(plans, batches, strict=True):
            bags.move_to(plan)
            pooled, vectors = bags(*batch)
            parts = [pooled, *(vectors[name].values for name in names if name in sequences)]
            found += [part.detach().clone() for part in parts]
            torch.stack([part.sin().sum() for part in parts]).sum().backward()
        return found, {name: value.clone() for name, value in bags.own_tensors().items() if name.endswith(".weight")}

    (found, own), (others, _) = trained(plans), trained(plans[::-1])
    same = all(map(torch.equal, found, others))
    return found, own, [tables, features, sequences, optimizer, batches], same


def drawn_ids(
    tables: list[TableConfig], features: dict[str, list[str]], draw: random.Random, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [t.num_embeddings for t in tables for _ in features[t.name]]
    lengths = torch.randint(0, draw.choice([2, 9]), (len(rows), draw.randint(1, 6)), generator=generator)
    ids = [torch.randint(0, n, (int(c),), generator=generator) for n, c in zip(rows, lengths.sum(1), strict=True)]
    return lengths, torch.cat(ids)


def cut(table: TableConfig, optimizer: str, draw: random.Random) -> list[str]:
    if optimizer == "rowwise_adagrad" or table.embedding_dim == 4 or draw.random() < 0.5:
        return [table.name]
    return [f"{table.name}[0:4]", f"{table.name}[4:{table.embedding_dim}]"]


def check_drawn(world_size: int, seed: int) -> None:
    ranks = run_ranks(drawn_job, world_size, seed, timeout=60)
    assert all(same for *_, same in ranks), "another plan changed bits"
    tables, features, sequences, optimizer, _ = ranks[0][2]
    weights = {table.name: initial(table) for table in tables}
    states = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    expected: list[list[Tensor]] = [[] for _ in ranks]
    for step in range(2):
        losses = []
        for rank, (_, _, [*_, batches], _) in enumerate(ranks):
            lengths, values = batches[step]
            bags = iter(zip(lengths, values.split(lengths.sum(1).tolist()), strict=True))
            pooled, vectors = [], []
            for table in tables:
                for name in features[table.name]:
                    own, ids = next(bags)
                    if name in sequences:
                        vectors.append(nn.functional.embedding(ids, weights[table.name]))
                    else:
                        offsets = own.cumsum(0) - own
                        pooled.append(
                            nn.functional.embedding_bag(ids, weights[table.name], offsets, mode=table.pooling)
                        )
            parts = [torch.cat(pooled, 1) if pooled else torch.zeros(lengths.shape[1], 0).double(), *vectors]
            expected[rank] += [part.detach() for part in parts]
            losses.append(torch.stack([part.sin().sum() for part in parts]).sum())
        torch.stack(losses).mean().backward()
        for name, weight in weights.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = None
            squares = gradient**2
            states[name] += squares if optimizer == "adagrad" else squares.mean(1, keepdim=True)
            with torch.no_grad():
                weight.sub_(0.1 * (gradient if optimizer == "sgd" else gradient / (states[name].sqrt() + 1e-8)))
    for (found, own, *_), wanted in zip(ranks, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
        for key, value in own.items():
            shard = Shard(key.removesuffix(".weight"))
            start, stop = shard.columns or (0, value.shape[1])
            assert_equal(value, weights[shard.table][:, start:stop].detach())


@pytest.mark.parametrize("seed", range(6))
def test_drawn_jobs_are_plain_pytorchs(seed: int) -> None:
    check_drawn(seed % 4 + 1, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 100))
def test_a_hundred_drawn_jobs_are_plain_pytorchs(seed: int) -> None:
    check_drawn(seed % 4 + 1, seed)
