"""Chooses tables to copy to every rank, outside the plan: once, before the first step, for the whole job.

replicated_tables("auto", tables, features={"day": 1}, batch_size=2048, world_size=4, exchange_bytes=8, optimizer="sgd")
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.optimizers import OPTIMIZERS
from dlrm_autoshard.plan.sharding_plan import PlanError
from dlrm_autoshard.tables import TableConfig, TableOptimizer

_SUM_BYTES = 8
"""Bytes sent per element of a copy's float32 gradient: to be summed, and the sum back."""


def replicated_tables(
    asked: str | Sequence[str],
    tables: Sequence[TableConfig],
    *,
    features: Mapping[str, int],
    batch_size: int,
    world_size: int,
    exchange_bytes: int,
    optimizer: TableOptimizer,
    decays: bool = False,
    placed: Collection[str] = (),
    sequences: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns names of the tables to copy to every rank, in the tables' order; none on one rank.

    asked: `auto`, `none` or names. `auto` takes a table if summing its whole gradient sends fewer bytes than its
    vectors and their gradients would. With one feature and float32 vectors, that is a table with fewer rows than a
    rank's batch has samples. If all tables are so small, the largest keeps an owner.

    features: number of features that look up each table. batch_size: of one rank. exchange_bytes: per element of a
    vector and of its gradient, together. decays: the optimizer has weight decay. placed: tables that a plan or a
    constraint places. sequences: tables that are looked up without pooling. PlanError names a table that cannot be
    copied.
    """
    if isinstance(asked, str):
        if asked not in ("auto", "none"):
            raise PlanError(f"replicate is {asked!r}; it must be 'auto', 'none' or a list of tables.")
        wanted = [
            table
            for table in tables
            if asked == "auto"
            and _why_not(table, optimizer, decays, placed, sequences) is None
            and table.num_embeddings * _SUM_BYTES < features[table.name] * batch_size * exchange_bytes
        ]
        if len(wanted) == len(tables):
            wanted.remove(max(wanted, key=lambda table: table.weight_bytes))
    else:
        by_name = {table.name: table for table in tables}
        for name in asked:
            if name not in by_name:
                near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.0)[0]
                raise PlanError(
                    f"replicate names table '{name}', which the model does not have. Did you mean '{near}'?"
                )
            reason = _why_not(by_name[name], optimizer, decays, placed, sequences)
            if reason is not None and world_size > 1:
                raise PlanError(f"replicate names table '{name}', {reason}")
        wanted = [table for table in tables if table.name in asked]
        if len(wanted) == len(tables):
            raise PlanError("replicate names all tables; at least one must be left for the plan to place.")
    return tuple(table.name for table in wanted) if world_size > 1 else ()


def bytes_of_copies(tables: Iterable[TableConfig], optimizer: TableOptimizer) -> int:
    """Returns bytes of replicated tables on each rank: weights, optimizer state and gradients."""
    return sum(2 * table.weight_bytes + table.optimizer_bytes(optimizer) for table in tables)


def said_of(names: Sequence[str]) -> str:
    """'12 small tables are on every rank: day, hour, ...'"""
    small = "1 small table is" if len(names) == 1 else f"{len(names)} small tables are"
    return f"{small} on every rank: {some_of(names)}"


def _why_not(
    table: TableConfig, optimizer: TableOptimizer, decays: bool, placed: Collection[str], sequences: Collection[str]
) -> str | None:
    if table.optimizer is not None:
        return "which has its own optimizer, but copies use that of the other tables. Leave it out."
    if decays:
        return "but weight decay needs the rows that a batch looks up, which copies do not keep. Leave one of them out."
    if not OPTIMIZERS[optimizer].replicates:
        return "but Adam updates only the rows that a batch looks up, which copies do not keep. Use another optimizer."
    if table.dtype != "fp32":
        return f"which is {table.dtype}, but copies are fp32. Leave it out, or make the tables fp32."
    if table.name in sequences:
        return "which a sequence looks up, but copies are pooled. Leave it out."
    if table.name in placed:
        return "but the plan or a constraint places it too. Leave it out of one of them."
    return None
