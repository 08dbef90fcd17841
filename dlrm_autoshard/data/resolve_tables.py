"""Combines each table's rows, from the data source, with the settings of the `tables:` section.

resolve_tables([TableRows("user", 943)], TablesConfig(embedding_dim=32))
# (TableConfig("user", num_embeddings=943, embedding_dim=32, pooling="sum", dtype="fp32"),)
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.features import shared_by
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.tables import TableConfig


@dataclass(frozen=True)
class TableRows:
    """A table as its source knows it, before `tables:` is applied."""

    name: str
    num_embeddings: int
    embedding_dim: int | None = None


def resolve_tables(rows: Sequence[TableRows], tables: TablesConfig) -> tuple[TableConfig, ...]:
    """Returns a table per feature, under its name. Settings: the table's own, else the source's, else `tables`."""
    names = [table.name for table in rows]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise DataError(f"data has more than one table named '{duplicates[0]}'. Give each its own name.")
    shared = shared_by(names, tables.shared)
    table_of = {name: shared.get(name, name) for name in names}
    known = list(dict.fromkeys(table_of.values()))
    for key in ("embedding_dims", "poolings", "per_table"):
        for name in getattr(tables, key):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                raise DataError(
                    f"tables.{key} names a table '{name}', which the data does not have."
                    + (f" Did you mean '{near[0]}'?" if near else "")
                )
    try:
        return tuple(_resolved(table, table_of[table.name], tables) for table in rows)
    except UserError as error:
        raise DataError(f"data: {error}.") from error


def _resolved(given: TableRows, table: str, tables: TablesConfig) -> TableConfig:
    """table: the table that the feature looks up."""
    own = tables.settings_of(table)
    return TableConfig(
        name=given.name,
        num_embeddings=given.num_embeddings,
        embedding_dim=own.dim or given.embedding_dim or tables.embedding_dim,
        pooling=own.pooling or tables.pooling,
        dtype=own.dtype or tables.dtype,
        optimizer=tables.optimizer_of(table),
        init=own.init,
    )
