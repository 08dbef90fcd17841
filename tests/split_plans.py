"""Random plans, some of whose tables are split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig


@st.composite
def plans_of(draw: st.DrawFn, tables: Sequence[TableConfig], ranks: int, most_parts: int = 3) -> ShardingPlan:
    rank_of = {}
    for table in tables:
        cuts = st.sets(st.integers(1, table.embedding_dim // 4 - 1), max_size=most_parts - 1)
        inner = draw(cuts) if table.embedding_dim > 4 else set()
        for start, stop in itertools.pairwise([0, *sorted(4 * cut for cut in inner), table.embedding_dim]):
            rank_of[table.part(start, stop).name] = draw(st.integers(0, ranks - 1))
    return ShardingPlan(rank_of, ranks)
