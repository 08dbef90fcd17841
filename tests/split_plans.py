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
def plans_of(draw: st.DrawFn, tables: Sequence[TableConfig], ranks: int, most_parts: int = 3) -> ShardingPlan:
    rank_of = {}
    for table in tables:
        cuts = st.sets(st.integers(1, table.embedding_dim // 4 - 1), max_size=most_parts - 1)
        inner = draw(cuts) if table.embedding_dim > 4 else set()
        for start, stop in itertools.pairwise([0, *sorted(4 * cut for cut in inner), table.embedding_dim]):
            rank_of[table.part(start, stop).name] = draw(st.integers(0, ranks - 1))
    return ShardingPlan(rank_of, ranks)


def whole(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """With the columns of each table side by side."""
    found: dict[str, list[tuple[tuple[int, int], Tensor]]] = {}
    for key, value in (item for rank in by_rank for item in rank.items()):
        name, _, tensor = key.rpartition(".")
        shard = Shard.parse(name)
        found.setdefault(f"{shard.table}.{tensor}", []).append((shard.columns or (0, 0), value))
    return {
        key: torch.cat([value for _, value in sorted(parts, key=lambda part: part[0])], -1)
        for key, parts in found.items()
    }
