"""Random plans, some of whose tables are split; and what ranks hold under them, put together again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig


@st.composite
def plans_of(
    draw: st.DrawFn, tables: Sequence[TableConfig], ranks: int, most_parts: int = 3, rows: bool = False
) -> ShardingPlan:
    """rows: some tables are split by rows, and each range of rows by columns of its own."""
    rank_of = {}
    for table in tables:
        row_cuts = draw(st.sets(st.integers(1, table.num_embeddings - 1), max_size=most_parts - 1)) if rows else set()
        for first, last in itertools.pairwise([0, *sorted(row_cuts), table.num_embeddings]):
            cuts = st.sets(st.integers(1, table.embedding_dim // 4 - 1), max_size=most_parts - 1)
            inner = draw(cuts) if table.embedding_dim > 4 else set()
            for start, stop in itertools.pairwise([0, *sorted(4 * cut for cut in inner), table.embedding_dim]):
                rank_of[table.row_range(first, last).part(start, stop).name] = draw(st.integers(0, ranks - 1))
    return ShardingPlan(rank_of, ranks)


def whole(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """With the parts of each table put together; what is kept a row, as often as its table has parts by columns."""
    found: dict[str, list[tuple[Shard, Tensor]]] = {}
    for key, value in (item for rank in by_rank for item in rank.items()):
        name, _, tensor = key.rpartition(".")
        shard = Shard(name)
        found.setdefault(f"{shard.table}.{tensor}", []).append((shard, value))
    return {key: _together(parts) for key, parts in found.items()}


def _together(parts: list[tuple[Shard, Tensor]]) -> Tensor:
    by_rows: dict[tuple[int, int], list[tuple[tuple[int, int], Tensor]]] = {}
    for shard, value in parts:
        by_rows.setdefault(shard.rows or (0, 0), []).append((shard.columns or (0, 0), value))
    bands = [torch.cat([v for _, v in sorted(by_rows[rows], key=lambda p: p[0])], -1) for rows in sorted(by_rows)]
    return torch.cat(bands) if len(bands) > 1 else bands[0]
