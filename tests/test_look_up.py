"""A lookup in two halves gives the bits of one in one go, whatever is computed, dropped or refused between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad
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
WIDTH = sum(table.embedding_dim for table in TABLES)
SAMPLES, STEPS = 6, 4


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (len(TABLES), SAMPLES), generator=generator)
    values = [
        torch.randint(0, table.num_embeddings, (n,), generator=generator)
        for table, n in zip(TABLES, lengths.sum(1).tolist(), strict=True)
    ]
    return lengths, torch.cat(values)


def make(world_size: int, owners: str, *, shared_memory: bool = True) -> ShardedEmbeddingBags:
    plan = ShardingPlan({t.name: int(owner) for t, owner in zip(TABLES, owners, strict=True)}, world_size)
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.5), plan=plan)
    if not shared_memory:
        bags.sharded._link = None
        bags.sharded.adopt(plan)
    return bags


def own(bags: ShardedEmbeddingBags) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in bags.own_tensors().items()}


def loop(rank: int, world_size: int, owners: str, how: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Pooled vectors and gradients of the bottom part of some steps, and the tables after them."""
    bags = make(world_size, owners, shared_memory="group" not in how)
    torch.manual_seed(0)
    bottom, top = nn.Linear(3, 4), nn.Linear(4 + WIDTH, 1)
    found = []
    given = ((step, ids_of(rank, step)) for step in range(STEPS))
    batches = bags.ahead(range(STEPS), lambda step: ids_of(rank, step)) if "ahead" in how else given
    for step, ids in batches:
        dense = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(step))
        with bags.clock.step(sampled="sampled" in how):
            if "at once" in how:
                hidden = bottom(dense)
                pooled = bags(*ids) if isinstance(ids, tuple) else bags(ids)
            else:
                lookup = bags.look_up(*ids) if isinstance(ids, tuple) else bags.look_up(ids)
                hidden = bottom(dense)
                pooled = lookup.wait()
            top(torch.cat([hidden, pooled], 1)).square().mean().backward()
        assert bottom.weight.grad is not None
        found += [pooled.detach(), bottom.weight.grad.clone()]
    return found, own(bags)


@pytest.mark.parametrize(("world_size", "owners"), [(1, "0000"), (2, "0110"), (3, "2022")])
def test_both_halves_give_the_bits_of_one_call(world_size: int, owners: str) -> None:
    expected = run_ranks(loop, world_size, owners, "at once")
    for how in ("in two halves", "in two halves, ahead, by the group", "in two halves, sampled", "ahead, sampled"):
        for (found, tables), (other, same) in zip(run_ranks(loop, world_size, owners, how), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True)), how
            assert all(torch.equal(tables[name], same[name]) for name in same), how


def order_of_events(rank: int, world_size: int) -> list[str]:
    bags = make(world_size, "0101")
    events: list[str] = []
    bottom, top = nn.Linear(3, 4), nn.Linear(4 + WIDTH, 1)
    bottom.weight.register_post_accumulate_grad_hook(lambda _: events.append("bottom"))
    top.weight.register_post_accumulate_grad_hook(lambda _: events.append("top"))
    lookup = bags.look_up(*ids_of(rank, 0))
    for name in ("send_gradients", "receive_gradients"):
        setattr(lookup._halves, name, noted(events, name, getattr(lookup._halves, name)))
    pooled = (hidden := bottom(torch.ones(SAMPLES, 3))), lookup.wait()
    before = own(bags)
    top(torch.cat([hidden, pooled[1]], 1)).sum().backward()
    assert all(not torch.equal(before[name], value) for name, value in own(bags).items() if "weight" in name)
    return events


def noted(events: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any) -> Any:
        events.append(name)
        return call(*args)

    return noting


def test_gradients_travel_while_what_ran_between_the_halves_runs_backward() -> None:
    expected = ["top", "send_gradients", "bottom", "receive_gradients"]
    assert run_ranks(order_of_events, 2) == [expected, expected]


def two_at_a_time(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    """Two lookups of each step, both of which the loss is made of."""
    bags = make(world_size, "0110", shared_memory="group" not in how)
    for step in range(STEPS):
        if "one after the other" in how:
            one, other = (bags(*ids_of(rank, 2 * step + i)) for i in range(2))
        else:
            first, second = (bags.look_up(*ids_of(rank, 2 * step + i)) for i in range(2))
            if "last first" in how:
                other, one = second.wait(), first.wait()
            else:
                one, other = first.wait(), second.wait()
        (one * other.detach() + other).square().sum().backward()
    return own(bags)


def test_lookups_may_be_on_their_way_together() -> None:
    """Through shared memory, too, whose channels carry one message at a time."""
    results = {}
    for how in ("one after the other", "together", "together, by the group", "together, last first"):
        ranks = run_ranks(two_at_a_time, 2, how, timeout=60)
        results[how] = {name: value for tables in ranks for name, value in tables.items()}
    expected = results.pop("one after the other")
    results.pop("together, last first")  # the update that comes first is another one
    for how, tables in results.items():
        assert all(torch.equal(expected[name], value) for name, value in tables.items()), how


def given_up(rank: int, world_size: int, how: str) -> tuple[dict[str, Tensor], int]:
    """Lookups that come to nothing between two that are trained on."""
    bags = make(world_size, "0110")
    for step in range(3):
        if how == "dropped":
            bags.look_up(*ids_of(rank, 7))
        elif how == "raised" and step == 1:
            with pytest.raises(ZeroDivisionError):
                fail_in_between(bags, rank)
        elif how == "cancelled":
            bags.look_up(*ids_of(rank, 7)).cancel()
        elif how == "cancelled late":
            lookup = bags.look_up(*ids_of(rank, 7))
            lookup.wait()
            lookup.cancel()
            lookup.cancel()
        bags(*ids_of(rank, step)).square().sum().backward()
    return own(bags), bags.sharded.updates


def fail_in_between(bags: ShardedEmbeddingBags, rank: int) -> None:
    lookup = bags.look_up(*ids_of(rank, 8))
    print(1 // 0, lookup)


def test_a_lookup_that_comes_to_nothing_harms_no_other() -> None:
    expected = run_ranks(given_up, 2, "never begun")
    for how in ("dropped", "raised", "cancelled", "cancelled late"):
        for (tables, updates), (same, count) in zip(run_ranks(given_up, 2, how, timeout=60), expected, strict=True):
            assert all(torch.equal(tables[name], same[name]) for name in same), how
            assert updates == count or "cancelled" not in how


def changed_in_place(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """The gradient of relu is that of what it was given, in place or not; margins are the caller's."""
    bags, other = make(world_size, "0" * len(TABLES)), make(world_size, "0" * len(TABLES))
    plain = bags(*ids_of(rank, 0)).relu()
    plain.sum().backward()
    within = other.look_up(*ids_of(rank, 0)).wait((3, 5))
    assert within.shape == (SAMPLES, 3 + WIDTH + 5)
    assert torch.equal(within[:, 3:-5].relu(), plain)
    within[:, :3], within[:, -5:] = 1.0, 2.0
    within.relu_().sum().backward()
    for name, value in own(bags).items():
        assert torch.equal(value, own(other)[name]), name
    return plain.detach(), other(*ids_of(rank, 1)).relu_()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_comes_out_may_be_changed_in_place(world_size: int) -> None:
    run_ranks(changed_in_place, world_size)


def refused(rank: int, world_size: int) -> list[str]:
    said = []

    def refuses(call: Callable[[], object]) -> None:
        with pytest.raises(UserError) as caught:
            call()
        said.append(str(caught.value))

    bags = make(world_size, "0110")
    lookup = bags.look_up(*ids_of(rank, 0))
    pooled = lookup.wait()
    refuses(lookup.wait)
    loss = pooled.sum()
    loss.backward(retain_graph=True)
    before = own(bags)
    refuses(loss.backward)
    assert all(torch.equal(before[name], value) for name, value in own(bags).items())
    lookup = bags.look_up(*ids_of(rank, 1))
    pooled = lookup.wait()
    lookup.cancel()
    refuses(pooled.sum().backward)
    lookup = bags.look_up(*ids_of(rank, 1))
    bags.move_to(ShardingPlan({name: 1 - owner for name, owner in bags.plan.rank_of.items()}, world_size))
    refuses(lookup.wait)
    bags(*ids_of(rank, 2)).sum().backward()
    return said


def test_what_would_update_tables_twice_or_wrongly_is_refused() -> None:
    for twice, second, cancelled, moved in run_ranks(refused, 2):
        assert "waited for twice" in twice and "second backward pass" in second
        assert "after its cancel()" in cancelled and "tables moved" in moved


def without_gradients(rank: int, world_size: int) -> None:
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=1.0))
    before = own(bags)
    with torch.no_grad():
        one, other = bags.look_up(*ids_of(rank, 0)), bags.look_up(*ids_of(rank, 1))
        found = other.wait(), one.wait()
        expected = bags(*ids_of(rank, 1)), bags(*ids_of(rank, 0))
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(before[name], value) for name, value in own(bags).items()) and not bags.sharded.updates


def test_evaluations_are_looked_up_in_two_halves_too() -> None:
    run_ranks(without_gradients, 2)


def summed(rank: int, world_size: int, average: bool) -> dict[str, Tensor]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.5), average=average)
    for step in range(2):
        loss = bags(*ids_of(rank, step)).square().mean()
        (loss if average else loss / world_size).backward()
    return own(bags)


def test_shares_of_the_mean_are_summed_where_that_is_said() -> None:
    for one, other in zip(run_ranks(summed, 2, True), run_ranks(summed, 2, False), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
