"""A plan is a set of shards: tables, or columns of them, named in one way, each held exactly once."""

from __future__ import annotations

import itertools
import json
import pickle
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import Constraints, Move, PlanError, ShardingPlan, Topology, check_plan, shard_tables
from dlrm_autoshard.tables import Shard, TableConfig
from dlrm_autoshard.torchrec.plan_format import torchrec_plan
from tests.split_plans import plans_of

TABLES = (TableConfig("user", 100, 16), TableConfig("item", 50, 32), TableConfig("a[b]", 5, 4))
SPLIT = ShardingPlan({"user": 0, "item[0:8]": 1, "item[8:32]": 0, "a[b]": 1}, 2)


RANGES = st.none() | st.tuples(st.integers(0, 999), st.integers(0, 999))


@given(st.text(min_size=1), RANGES, RANGES)
def test_a_shard_is_read_back_from_its_name(
    table: str, columns: tuple[int, int] | None, rows: tuple[int, int] | None
) -> None:
    shard = Shard.of(table, columns, rows)
    assert Shard.of(shard.table, shard.columns, shard.rows) == shard == Shard(str(shard))
    if not table.endswith("]"):
        assert (shard.table, shard.columns, shard.rows) == (table, columns, rows)
    for copy in (pickle.loads(pickle.dumps(shard)), deepcopy(shard), Shard(json.loads(json.dumps(shard)))):
        assert (copy, copy.table, copy.columns, copy.rows) == (shard, shard.table, shard.columns, shard.rows)


def test_shards_are_named_by_rows_and_columns() -> None:
    names = ("item", "item[0:64]", "item[rows 0:1000000]", "item[rows 0:1000000, 0:64]", "a[b]", "a[]")
    assert [Shard(name).table for name in names] == ["item"] * 4 + ["a[b]", "a[]"]
    assert Shard(names[3]) == names[3] == Shard.of("item", (0, 64), (0, 10**6))


@given(RANGES, RANGES, RANGES, RANGES)
def test_what_two_shards_have_in_common_lies_in_both(
    columns: tuple[int, int] | None, rows: tuple[int, int] | None,
    other_columns: tuple[int, int] | None, other_rows: tuple[int, int] | None,
) -> None:  # fmt: skip
    one, other = Shard.of("t", columns, rows), Shard.of("t", other_columns, other_rows)
    cells = np.arange(10**6).reshape(1000, 1000)
    held = [cells[slice(*shard.rows or (None,)), slice(*shard.columns or (None,))] for shard in (one, other)]
    common = one & other
    if common is None:
        assert not {*np.unique(held[0][:, :1])} & {*np.unique(held[1][:, :1])} or not np.intersect1d(
            held[0][:1] % 1000, held[1][:1] % 1000).size  # fmt: skip
        return
    found = [of[common.within(shard)] for of, shard in zip(held, (one, other), strict=True)]
    assert np.array_equal(found[0], found[1]) and found[0].size


def test_a_plan_says_where_the_parts_of_a_table_are() -> None:
    assert SPLIT.split_tables == ("item",)
    assert SPLIT.parts_of("item") == ("item[0:8]", "item[8:32]")
    assert SPLIT.parts_of("user") == ("user",) and SPLIT.parts_of("shop") == ()
    assert SPLIT.shards_on(0) == ("user", "item[8:32]")
    assert SPLIT.shards_on(1) == ("item[0:8]", "a[b]")
    assert SPLIT.ranks_of("item") == (0, 1) and SPLIT.ranks_of("item[0:4]") == (1,)


def test_the_shards_of_a_plan_are_tables_in_canonical_order() -> None:
    shuffled = ShardingPlan({name: SPLIT.rank_of[name] for name in [*SPLIT.rank_of][::-1]}, 2)
    shards = shard_tables(TABLES, shuffled)
    assert [shard.name for shard in shards] == list(SPLIT.rank_of) == list(shuffled.ordered([*SPLIT.rank_of]).rank_of)
    assert list(shuffled.ordered([table.name for table in TABLES]).rank_of) == list(SPLIT.rank_of)
    assert [shard.embedding_dim for shard in shards] == [16, 8, 24, 4]
    assert [shard.columns for shard in shards] == [(0, 16), (0, 8), (8, 32), (0, 4)]
    assert shard_tables(shards, SPLIT) == shards
    assert shards[2].part(8, 16).part(8, 12) == TableConfig("item[8:12]", 50, 4)


@pytest.mark.parametrize(
    ("rank_of", "said"),
    [
        ({"item": 0, "item[0:8]": 1}, "once each"),
        ({"item[0:8]": 0, "item[4:32]": 1}, "once each"),
        ({"item[0:8]": 0, "item[12:32]": 1}, "once each"),
        ({"item[0:32]": 0}, "only part"),
        ({"item[0:6]": 0, "item[6:32]": 1}, "multiples of 4"),
        ({"item[0:0]": 0, "item[0:32]": 1}, "multiples of 4"),
        ({"item[rows 0:9]": 0, "item[rows 8:50]": 1}, "in common"),
        ({"item[rows 0:9]": 0, "item[0:8]": 1}, "in common"),
        ({"item[rows 0:50]": 0}, "only part"),
        ({"item[rows 0:9, 0:6]": 0, "item[rows 9:50]": 1}, "multiples of 4"),
    ],
)
def test_columns_that_are_held_twice_or_not_at_all_are_refused(rank_of: dict[str, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ShardingPlan(rank_of, 2)


def test_parts_of_a_wider_or_narrower_table_are_refused_by_name() -> None:
    for end in (28, 36):
        with pytest.raises(PlanError, match="item"):
            shard_tables(TABLES[1:2], ShardingPlan({"item[0:8]": 0, f"item[8:{end}]": 1}, 2))
    for parts, said in (
        (("item[rows 0:8]", "item[rows 8:49]"), "has 50 rows, but its parts hold 49"),
        (("item[rows 0:8]", "item[rows 9:50]"), "once each"),
        (("item[rows 0:8, 0:8]", "item[rows 8:50]"), "has 32 columns, but its parts hold 8"),
        (("item[rows 0:50, 0:8]", "item[8:32]"), "Leave them out"),
        (("item[rows 0:8, 0:32]", "item[rows 8:50]"), "Leave them out"),
    ):
        with pytest.raises(PlanError, match=said):
            shard_tables(TABLES[1:2], ShardingPlan(dict.fromkeys(parts, 0), 2))
    with pytest.raises(UserError, match="named as rows 0 to 8"):
        TableConfig("item[rows 0:8]", 10, 16)
    with pytest.raises(UserError, match="named as columns 0 to 8"):
        TableConfig("item[0:8]", 10, 16)
    with pytest.raises(UserError, match="not a part of it"):
        TABLES[1].part(4, 36)


def test_a_plan_without_splits_is_written_as_before(tmp_path: Path) -> None:
    whole = ShardingPlan({"user": 0, "item": 1}, 2)
    assert whole.to_json() == {"schema": 1, "world_size": 2, "rank_of": {"user": 0, "item": 1}}
    for plan in (whole, SPLIT):
        plan.save(tmp_path / "plan.json")
        assert ShardingPlan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == 2
    by_rows = ShardingPlan({"user": 0, "item[rows 0:9]": 1, "item[rows 9:50, 0:8]": 0, "item[rows 9:50, 8:32]": 1}, 2)
    by_rows.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == by_rows
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == 3


def test_constraints_on_a_table_hold_for_its_parts() -> None:
    sizes = dict.fromkeys(SPLIT.rank_of, 1)
    for broken in (
        Constraints(pinned={"item": 0}),
        Constraints(pinned={"item[0:8]": 0}),
        Constraints(together=(("item", "user"),)),
        Constraints(apart=(("item", "user"),)),
        Constraints(apart=(("item[8:32]", "user"),)),
    ):
        with pytest.raises(PlanError):
            check_plan(SPLIT, sizes, Topology(2), broken)
    held = Constraints(pinned={"item[0:8]": 1}, together=(("item[8:32]", "user"),), apart=(("item[0:8]", "user"),))
    check_plan(SPLIT, sizes, Topology(2), held)


def test_a_split_moves_what_leaves_its_rank_and_nothing_else() -> None:
    whole = ShardingPlan({"user": 0, "item": 0, "a[b]": 1}, 2)
    assert whole.moves_to(SPLIT) == (Move(Shard("item[0:8]"), 0, 1, leaves=Shard("item")),)
    assert SPLIT.moves_to(whole) == (Move(Shard("item[0:8]"), 1, 0, arrives=Shard("item")),)
    assert whole.changes_to(SPLIT)[1:] == (Move(Shard("item[8:32]"), 0, 0, leaves=Shard("item")),)
    assert SPLIT.changes_to(SPLIT) == ()


@given(plans_of(TABLES, 3, rows=True), plans_of(TABLES, 3, rows=True))
def test_moves_carry_every_row_and_column_that_changes_its_rank_once(plan: ShardingPlan, other: ShardingPlan) -> None:
    def owners(of: ShardingPlan) -> dict[str, np.ndarray]:
        found = {table.name: np.full((table.num_embeddings, table.embedding_dim), -1) for table in TABLES}
        for shard in shard_tables(TABLES, of):
            found[shard.shard.table][slice(*shard.rows), slice(*shard.columns)] = of.rank_of[shard.name]
        return found

    before, after = owners(plan), owners(other)
    for move in plan.moves_to(other):
        shard = move.shard
        part = before[shard.table][slice(*shard.rows or (None,)), slice(*shard.columns or (None,))]
        assert (part == move.source).all()
        part[:] = move.destination
    assert all(np.array_equal(before[name], after[name]) for name in after)


@given(plans_of(TABLES, 3), plans_of(TABLES, 3))
def test_moves_carry_every_column_that_changes_its_rank_once(plan: ShardingPlan, other: ShardingPlan) -> None:
    ranks = {}
    for shard, rank in zip(plan.shards, plan.rank_of.values(), strict=True):
        start, stop = shard.columns or (0, 32)
        ranks.update({(shard.table, column): rank for column in range(start, stop)})
    for move in plan.moves_to(other):
        shard = move.shard
        for column in range(*(shard.columns or (0, 32))):
            assert ranks[shard.table, column] == move.source
            ranks[shard.table, column] = move.destination
    for table, column in itertools.product(("user", "item"), range(16)):
        assert (ranks[table, column],) == other.ranks_of(f"{table}[{column}:{column + 1}]")


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (999.4 * 2**20, "999 MiB"), (999.7 * 2**20, "1,000 MiB"),
     (1023 * 2**20, "1,023 MiB"), (6.2 * 2**30, "6.2 GiB"), (4000 * 2**30, "4,000 GiB")],
)  # fmt: skip
def test_bytes_are_said_in_a_unit_that_people_read(size: float, said: str) -> None:
    assert gib(size) == said


def test_torchrec_is_given_no_plan_with_rows_that_it_cannot_hold() -> None:
    uneven, of_other_ranks = (
        {"user[rows 0:9]": 0, "user[rows 9:100]": 1},
        {"user[rows 0:50]": 1, "user[rows 50:100]": 0},
    )
    grid = {"user[rows 0:50]": 0, "user[rows 50:100, 0:8]": 1, "user[rows 50:100, 8:16]": 1}
    for rank_of in (uneven, of_other_ranks, grid):
        with pytest.raises(PlanError, match=r"'user' by rows.*splits\.rows: never"):
            torchrec_plan(ShardingPlan(rank_of, 2), TABLES[:1])
