"""Moves of a TorchRec model's tables change no bit of what it learns; what can't be moved is refused in words."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from dlrm_autoshard.distributed.moves.reshard import ReshardRefused
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from tests.ranks import run_ranks
from tests.torchrec_jobs import DIMS, WHY_NOT, Model, all_rows, features_of, plan_of, sharded, train_step

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
START = plan_of(0, 1, 0, 1, 0, 1)


def drawn_plan(step: int, world_size: int, split: bool) -> ShardingPlan:
    """Every fifth leaves all ranks but one empty. split: tables are sharded by columns, too."""
    drawn = random.Random(step)
    only = drawn.randrange(world_size) if step % 5 == 1 else None
    rank_of = {}
    for table, dim in DIMS.items():
        cuts = [cut for cut in range(4, dim, 4) if split and drawn.random() < 0.5]
        shards = zip([0, *cuts], [*cuts, dim], strict=True)
        for name in [f"{table}[{start}:{stop}]" for start, stop in shards] if cuts else [table]:
            rank_of[name] = drawn.randrange(world_size) if only is None else only
    return ShardingPlan(rank_of, world_size)


def train(
    rank: int, world_size: int, steps: int, moving: bool, fused: str, plain: bool, split: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """With a learning rate that falls. plain: the optimizer is torch's own, of all the model's parameters."""
    model, optimizer = sharded(plan_of(*(i % world_size for i in range(6)), world_size=world_size), fused)
    if plain:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    bags = None
    if moving:
        from dlrm_autoshard.torchrec.bags import TorchrecBags
        from dlrm_autoshard.torchrec.sharding import plan_of as plan_of_torchrec

        bags = TorchrecBags(model, optimizer)
    torch.manual_seed(rank)
    losses = []
    for step in range(steps):
        for group in [*optimizer.param_groups, *model.fused_optimizer.param_groups]:
            group["lr"] = 0.5 / (1 + step)
        losses.append(train_step(model, optimizer, features_of(rank, step)))
        model.fused_optimizer.step()  # which is how a rate gets from the groups to the lookups
        if bags is not None:
            plan = drawn_plan(step, world_size, split)
            bags.move_to(plan)
            assert plan_of_torchrec(model.plan, bags.sharded.collections, world_size) == plan == bags.plan
    return losses, {} if split else all_rows(model)


@pytest.mark.parametrize(
    ("world_size", "steps", "fused", "plain", "split"),
    [
        (2, 50, "EXACT_SGD", False, False),
        (2, 15, "EXACT_ROWWISE_ADAGRAD", True, False),
        (2, 15, "EXACT_ADAGRAD", False, True),
        (3, 10, "EXACT_SGD", True, True),
    ],
)
def test_random_moves_change_no_bit(world_size: int, steps: int, fused: str, plain: bool, split: bool) -> None:
    still = run_ranks(train, world_size, steps, False, fused, plain, split, timeout=150)
    moved = run_ranks(train, world_size, steps, True, fused, plain, split, timeout=150)
    assert [losses for losses, _ in still] == [losses for losses, _ in moved]
    (_, one), (_, other) = still[0], moved[0]
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def beside_copies(
    rank: int, world_size: int, moving: bool, plain: bool, fused: str
) -> tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor], set[str]]:
    """Tables users.b, users.c and items.e are data-parallel. plain: the optimizer is torch's Adagrad, of all the
    model's parameters. Returns losses, rows that have an owner, this rank's copies and their Adagrad's state, and the
    names of the tables that the live plan places."""
    from dlrm_autoshard.torchrec.bags import TorchrecBags
    from dlrm_autoshard.torchrec.plan_format import to_sharding_plan
    from dlrm_autoshard.torchrec.sharding import plan_record, shapes_of
    from dlrm_autoshard.torchrec.tables import embedding_bags

    module, copied = Model(), ("users.b", "users.c", "items.e")
    start = ShardingPlan({name: i % world_size for i, name in enumerate(DIMS) if name not in copied}, world_size)
    record = plan_record(start, shapes_of(embedding_bags(module)), "cpu", replicated=copied)
    model, optimizer = sharded(to_sharding_plan(record), fused, module)
    if plain:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    bags = TorchrecBags(model, optimizer) if moving else None
    torch.manual_seed(rank)
    losses = []
    for step in range(12):
        losses.append(train_step(model, optimizer, features_of(rank, step)))
        if bags is not None:
            kept = drawn_plan(step, world_size, split=fused == "EXACT_SGD" and plain).rank_of.items()
            bags.move_to(ShardingPlan({n: owner for n, owner in kept if n.partition("[")[0] not in copied}, world_size))
    tables = [parameter for name, parameter in model.named_parameters() if name.endswith(COPIED)]
    assert len(tables) == len(copied)
    states = [optimizer.state[table]["sum"] for table in tables] if plain else []
    placed = set(start.tables) if bags is None else set(bags.plan.tables)
    rows = {} if fused == "EXACT_SGD" and plain else all_rows(model)
    return losses, rows, [tensor.detach() for tensor in (*tables, *states)], placed


COPIED = ("users.embedding_bags.b.weight", "users.embedding_bags.c.weight", "items.embedding_bags.e.weight")


@pytest.mark.parametrize(
    ("plain", "fused"), [(False, "EXACT_SGD"), (True, "EXACT_SGD"), (True, "EXACT_ROWWISE_ADAGRAD")]
)
def test_data_parallel_tables_stay_on_every_rank_and_no_move_beside_them_changes_a_bit(plain: bool, fused: str) -> None:
    still = run_ranks(beside_copies, 2, False, plain, fused, timeout=150)
    moved = run_ranks(beside_copies, 2, True, plain, fused, timeout=150)
    for (losses, rows, copies, _), (as_moved, rows_moved, copies_moved, placed) in zip(still, moved, strict=True):
        assert losses == as_moved and losses[0] != losses[-1] and placed == {"users.a", "users.d", "items.a"}
        assert rows.keys() == rows_moved.keys() and all(torch.equal(rows[name], rows_moved[name]) for name in rows)
        assert all(torch.equal(one, other) for one, other in zip(copies, copies_moved, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(moved[0][2], moved[1][2], strict=True)), "copies agree"


def states_after_moves(rank: int, world_size: int) -> tuple[int, int]:
    """Of Adagrad over all of the model's parameters, of which it makes a state each at once."""
    from dlrm_autoshard.torchrec.bags import TorchrecBags

    model, _ = sharded(START)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    bags = TorchrecBags(model, optimizer)
    for step in range(3):
        train_step(model, optimizer, features_of(rank, step))
        bags.move_to(plan_of(*((i + step + 1) % 2 for i in range(6))))
        held = optimizer.state_dict()["state"]
    return len(held), sum(parameter.grad is not None for parameter in model.parameters())


def test_an_optimizer_of_all_parameters_lets_go_of_tables_that_have_moved() -> None:
    for held, trained in run_ranks(states_after_moves, 2, timeout=100):
        assert held == trained > 0


def memory_after_moves(rank: int, world_size: int) -> list[bool]:
    """Of each move: whether the lookups that it replaced are still held. Python's collector does not come by itself."""
    from dlrm_autoshard.torchrec.bags import TorchrecBags

    model, optimizer = sharded(START)
    bags = TorchrecBags(model, optimizer)
    gc.disable()
    held = []
    for step in range(4):
        train_step(model, optimizer, features_of(rank, step))
        old = [weakref.ref(lookup) for c in bags.sharded.collections.values() for lookup in c._lookups]
        bags.move_to(plan_of(*((i + step + 1) % 2 for i in range(6))))
        held.append(any(lookup() is not None for lookup in old))
    return held


def test_what_a_move_replaced_is_let_go_at_once() -> None:
    assert run_ranks(memory_after_moves, 2, timeout=100) == [[False] * 4] * 2


def damaged_on_its_way(rank: int, world_size: int) -> tuple[list[float], str, bool]:
    """A move during which one number of a table is lost; the losses after it."""
    from dlrm_autoshard.torchrec import move
    from dlrm_autoshard.torchrec.bags import TorchrecBags

    model, optimizer = sharded(START, "EXACT_ROWWISE_ADAGRAD")
    bags = TorchrecBags(model, optimizer)
    losses = [train_step(model, optimizer, features_of(rank, 0))]
    before, plan = all_rows(model), dict(model.plan.plan)
    arrives = move.transfer

    def lossy(between: Any, chunks: Any, group: Any) -> None:
        arrives(between, chunks, group)
        if rank == 1:
            between.storage.tensors("items.a")["weight"].view(-1)[7] += 1

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReshardRefused) as caught:
        patch.setattr(move, "transfer", lossy)
        bags.move_to(plan_of(0, 0, 0, 1, 1, 1))
    same = all(torch.equal(value, before[name]) for name, value in all_rows(model).items())
    assert bags.plan == START and {k: v for k, v in model.plan.plan.items()} == plan
    losses.append(train_step(model, optimizer, features_of(rank, 1)))
    bags.move_to(plan_of(0, 0, 0, 1, 1, 1))
    losses.append(train_step(model, optimizer, features_of(rank, 2)))
    return losses, str(caught.value), same


def test_what_arrives_damaged_is_taken_back_and_training_goes_on() -> None:
    still = run_ranks(train_three_steps, 2)
    for (losses, said, same), expected in zip(run_ranks(damaged_on_its_way, 2), still, strict=True):
        assert "undone" in said and "'items.a' changed on its way" in said
        assert same and losses == expected


def train_three_steps(rank: int, world_size: int) -> list[float]:
    model, optimizer = sharded(START, "EXACT_ROWWISE_ADAGRAD")
    return [train_step(model, optimizer, features_of(rank, step)) for step in range(3)]


def rates_in_effect(rank: int, world_size: int) -> set[float]:
    """A scheduler has set the next rate, which lookups learn by the fused optimizer's next step; then tables move."""
    from dlrm_autoshard.torchrec.bags import TorchrecBags
    from dlrm_autoshard.torchrec.shards import kernels

    model, optimizer = sharded(START)
    bags = TorchrecBags(model, optimizer)
    train_step(model, optimizer, features_of(rank, 0))
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.25
    bags.move_to(plan_of(1, 1, 1, 0, 0, 0))
    assert {group["lr"] for group in model.fused_optimizer.param_groups} == {0.25}
    collections = bags.sharded.collections.values()
    return {kernel.emb_module.get_learning_rate() for c in collections for kernel, _ in kernels(c)}


def test_a_rate_that_is_set_and_not_yet_in_effect_stays_so() -> None:
    assert run_ranks(rates_in_effect, 2) == [{0.5}, {0.5}]


def heard(rank: int, world_size: int, broken: bool) -> list[torch.Tensor]:
    """Ids that reach this rank's tables. broken: in a step before, which ended between the two modules' lookups."""
    from dlrm_autoshard.torchrec.bags import TorchrecBags

    model, optimizer = sharded(START)
    bags = TorchrecBags(model, optimizer)
    said: list[torch.Tensor] = []
    bags.on_lookup(lambda ids, _: said.extend((ids.values_N, ids.offsets)))
    if broken:
        model.module.users(features_of(rank, 0)).wait()
    train_step(model, optimizer, features_of(rank, 1))
    return said


def test_a_step_that_broke_off_leaves_no_ids_to_the_next() -> None:
    for whole, after in zip(run_ranks(heard, 2, False), run_ranks(heard, 2, True), strict=True):
        assert len(whole) == len(after) == 2
        assert all(torch.equal(one, other) for one, other in zip(whole, after, strict=True))


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is said of models that can't be moved, or not so."""
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import DataType
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    import dlrm_autoshard.torchrec as das
    from dlrm_autoshard.torchrec.bags import TorchrecBags

    said = {}

    def refusal(name: str, attempt: Any) -> None:
        with pytest.raises(UserError) as caught:
            attempt()
        said[name] = str(caught.value)

    constraints = {t: ParameterConstraints(sharding_types=["data_parallel"]) for t in "abcde"}
    planner = EmbeddingShardingPlanner(Topology(world_size=2, compute_device="cpu"), constraints=constraints)
    module, group = Model(), dist.group.WORLD
    assert group is not None
    plan = planner.collective_plan(module, [EmbeddingBagCollectionSharder()], group)
    replicated = DistributedModelParallel(module, device=torch.device("cpu"), plan=plan)
    refusal("replicated", lambda: TorchrecBags(replicated))
    others = [name for name in DIMS if name != "users.b"]
    by_rows = ShardingPlan({"users.b[rows 0:100]": 0, "users.b[rows 100:200]": 1, **dict.fromkeys(others, 0)}, 2)
    refusal("by rows", lambda: TorchrecBags(*sharded(by_rows)))
    refusal("no tables", lambda: das.plan(torch.nn.Linear(1, 1), features_of(rank, 0)))
    halves = EmbeddingBagConfig(
        name="x", num_embeddings=9, embedding_dim=4, feature_names=["g"], data_type=DataType.BF16
    )
    bf16 = EmbeddingBagCollection(tables=[halves], device=torch.device("meta"))
    refusal("dtype", lambda: das.plan(bf16, features_of(rank, 0)))
    odd = EmbeddingBagConfig(name="y", num_embeddings=9, embedding_dim=4, feature_names=["unheard"])
    lacking = EmbeddingBagCollection(tables=[odd], device=torch.device("meta"))
    refusal("feature", lambda: das.plan(lacking, features_of(rank, 0)))

    model, optimizer = sharded(START)
    train_step(model, optimizer, features_of(rank, 0))
    refusal("other plans", lambda: TorchrecBags(model, optimizer).move_to([START, plan_of(1, 1, 1, 0, 0, 0)][rank]))
    model, _ = sharded(START)
    everything = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.5))
    refusal("optimizer", lambda: TorchrecBags(model, everything).move_to(plan_of(1, 1, 1, 0, 0, 0)))
    model, optimizer = sharded(START)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer, 0.5)
    train_step(model, optimizer, features_of(rank, 0))
    scheduler.step()
    refusal("scheduler", lambda: TorchrecBags(model, optimizer).move_to(plan_of(0, 0, 0, 0, 0, 0)))
    model, optimizer = sharded(plan_of(0, 0, 0, 0, 0, 0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer, 0.5)
    train_step(model, optimizer, features_of(rank, 0))
    scheduler.step()
    refusal("scheduler of none", lambda: TorchrecBags(model, optimizer).move_to(plan_of(0, 0, 0, 0, 1, 0)))
    split = ShardingPlan({"users.a[0:4]": 0, "users.a[4:8]": 1, **dict.fromkeys(list(DIMS)[1:], 0)}, 2)
    model, optimizer = sharded(split, "EXACT_ROWWISE_ADAGRAD")
    refusal("split", lambda: TorchrecBags(model, optimizer))
    model, optimizer = sharded(START, "EXACT_ROWWISE_ADAGRAD")
    refusal("to split", lambda: TorchrecBags(model, optimizer).move_to(split))
    refusal("module", lambda: das.plan(Model(), {"users": features_of(rank, 0)}))
    model.module.users.is_pipelined = True
    refusal("pipeline", lambda: TorchrecBags(model, optimizer))
    return said


def test_what_cannot_be_moved_is_said_on_every_rank() -> None:
    for said in run_ranks(refused, 2, timeout=120):
        assert "all tables of the model are data-parallel" in said["replicated"]
        assert "'b' of 'users' is sharded row_wise with the fused kernel" in said["by rows"]
        assert "no EmbeddingBagCollection" in said["no tables"]
        assert "'x'" in said["dtype"] and "BF16" in said["dtype"]
        assert "lack feature 'unheard' of table 'y'" in said["feature"]
        assert "given different plans" in said["other plans"]
        assert "in_backward_optimizer_filter" in said["optimizer"]
        assert "learning rate scheduler" in said["scheduler"]
        assert "learning rate scheduler" in said["scheduler of none"]
        assert "'users.a' is split by columns" in said["split"] and "row-wise Adagrad" in said["split"]
        assert "'users.a' is split by columns" in said["to split"]
        assert "module 'items'" in said["module"]
        assert "train pipeline" in said["pipeline"]
