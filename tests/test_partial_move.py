"""A move too large for one time: its first part is legal, small enough and, by prediction, no slower than now."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, Topology, check_plan
from dlrm_autoshard.planner.moves.partial_move import first_part, movable
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.tables import TableConfig, TableStats

NAMES = [f"t{i}" for i in range(8)]
SIZES = {name: 10 + 7 * i for i, name in enumerate(NAMES)}
plans = st.lists(st.integers(0, 2), min_size=8, max_size=8).map(
    lambda ranks: ShardingPlan(dict(zip(NAMES, ranks, strict=True)), 3)
)


def imbalance(plan: ShardingPlan) -> float:
    return float(max(sum(SIZES[table] for table in plan.shards_on(rank)) for rank in range(3)))


def legal_in(topology: Topology, constraints: Constraints) -> Callable[[ShardingPlan], bool]:
    def legal(plan: ShardingPlan) -> bool:
        try:
            check_plan(plan, SIZES, topology, constraints)
        except PlanError:
            return False
        return True

    return legal


@given(plans, plans, st.integers(1, 200), st.integers(150, 400))
def test_a_part_is_legal_small_and_no_slower(plan: ShardingPlan, target: ShardingPlan, limit: int, memory: int) -> None:
    legal = legal_in(Topology(3, (memory,) * 3), Constraints())
    part = first_part(plan, target, SIZES, limit, imbalance, legal)
    if isinstance(part, str):
        assert part
        return
    moves = plan.moves_to(part)
    assert 0 < sum(SIZES[move.shard] for move in moves) <= limit
    assert all(part.rank_of[move.shard] == target.rank_of[move.shard] for move in moves)
    assert legal(part) and imbalance(part) <= imbalance(plan)


def test_tables_that_stay_together_move_together() -> None:
    together = Constraints(together=(("t0", "t1"),))
    plan = ShardingPlan(dict.fromkeys(NAMES, 0), 3)
    target = ShardingPlan({**plan.rank_of, "t0": 1, "t1": 1, "t7": 2}, 3)
    legal = legal_in(Topology(3), together)
    part = first_part(plan, target, SIZES, SIZES["t0"] + SIZES["t1"], imbalance, legal, together)
    assert isinstance(part, ShardingPlan) and set(part.shards_on(1)) == {"t0", "t1"}
    smaller = first_part(plan, target, SIZES, SIZES["t0"], imbalance, legal, together)
    assert isinstance(smaller, str) and "'t0' and 't1'" in smaller


def test_two_full_ranks_swap_at_once() -> None:
    plan = ShardingPlan({name: int(i % 2) for i, name in enumerate(NAMES)}, 3)
    target = ShardingPlan({**plan.rank_of, "t6": 1, "t5": 0}, 3)
    full = Topology(3, (imbalance_of(plan, 0), imbalance_of(plan, 1) + SIZES["t6"] - SIZES["t5"], 0))
    part = first_part(plan, target, SIZES, 1000, lambda _: 1.0, legal_in(full, Constraints()))
    assert part == target


def imbalance_of(plan: ShardingPlan, rank: int) -> int:
    return sum(SIZES[table] for table in plan.shards_on(rank))


def test_what_may_never_move_is_pinned_by_itself_or_with_what_it_must_stay_with() -> None:
    """Else targets are chosen that no number of parts reaches."""
    tables = [TableConfig(name, 100, 16) for name in NAMES]
    together = Constraints(together=(("t0", "t1", "t2"),), pinned={"t3": 1})
    task = PlacementTask.build(
        tables, [TableStats(1.0, batch_size=64)] * 8, Topology(3), batch_size=64, constraints=together
    )
    plan = ShardingPlan({**dict.fromkeys(NAMES, 0), "t3": 1, "t7": 2}, 3)

    def pinned(limit: int) -> dict[str, int]:
        return dict(movable(task, plan, SIZES, limit).constraints.pinned)

    assert pinned(SIZES["t7"]) == {"t3": 1}
    assert pinned(SIZES["t7"] - 1) == {"t7": 2, "t3": 1}
    group = SIZES["t0"] + SIZES["t1"] + SIZES["t2"]  # 51, of tables of 24 at most
    assert pinned(group - 1) == {"t0": 0, "t1": 0, "t2": 0, "t6": 0, "t7": 2, "t3": 1}
