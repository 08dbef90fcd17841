"""Compares arguments that must be equal on all ranks, before anything depends on them.

agree(runtime, {"table 0": "'item', 60 rows", "the optimizer's lr": 0.02})     # DisagreementError on all ranks or none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig


class DisagreementError(UserError):
    """Ranks do not train the same model, or not in the same place."""


@dataclass(frozen=True)
class Difference:
    """The first fact on which ranks differ from rank 0. value, first: theirs and rank 0's; None: missing."""

    fact: str
    ranks: tuple[int, ...]
    value: object
    first: object


def agree(runtime: Runtime, facts: Mapping[str, object]) -> None:
    """Raises DisagreementError on every rank if facts differ, with the fact and the ranks. Collective."""
    found = difference(runtime.all_gather(dict(facts)))
    if found is not None:
        others = f"rank{'s' if len(found.ranks) > 1 else ''} {', '.join(map(str, found.ranks))}"
        raise DisagreementError(
            f"{found.fact} is {_text(found.first)} on rank 0, but {_text(found.value)} on {others}: give all ranks the "
            "same, in the same order."
        )


def facts_of(tables: Sequence[TableConfig], plan: ShardingPlan | None = None) -> dict[str, object]:
    """Returns facts about the tables in order, and about the plan, if given."""
    found: dict[str, object] = {
        f"table {number}": f"'{table.name}' ({table.num_embeddings:,} rows of {table.embedding_dim}, {table.dtype}, "
        f"{', '.join([table.pooling, *(repr(own) for own in (table.optimizer, table.init) if own is not None)])})"
        for number, table in enumerate(tables)
    }
    return found | {
        f"the plan's rank of '{shard}'": rank for shard, rank in ({} if plan is None else plan.rank_of).items()
    }


def difference(said: Sequence[Mapping[str, object]]) -> Difference | None:
    """Returns the first difference between ranks' facts; None if all are equal."""
    for fact in dict.fromkeys(fact for facts in said for fact in facts):
        values = [facts.get(fact) for facts in said]
        other = next((value for value in values if value != values[0]), values[0])
        if other != values[0]:
            return Difference(fact, tuple(rank for rank, v in enumerate(values) if v == other), other, values[0])
    return None


def _text(value: object) -> str:
    return "not there" if value is None else str(value)
