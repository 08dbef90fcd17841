"""What tables and their parts have in common: directions along which their errors are independent.

known = Parts(tables)                                  # tables and parts that were observed
share_NT @ known.basis(tables)                         # [N, B] shares along them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.tables import Shard, TableConfig

PARTS_ALIKE = 0.8
"""Of the variance of what parts of a table are off by: what they have in common with it, and with each other."""


class Parts:
    """Axes: R whole tables, B directions: one for each of these, then one for each shard of those that were split."""

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        self.tables = tuple(tables)
        seen = Counter(_whole(table) for table in tables)
        self._number_of = {whole: number for number, whole in enumerate(seen)}
        own = [table for table in tables if seen[_whole(table)] > 1]
        self._own = {table: len(seen) + number for number, table in enumerate(own)}
        self._alone = {table for table in tables if seen[_whole(table)] == 1}
        self.num_wholes, self.num_directions = len(seen), len(seen) + len(own)

    def wholes(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """[T, R]: 1 where a table is this one, or a part of it; any tables, observed or not."""
        inside_TR = np.zeros((len(tables), self.num_wholes))
        for row_R, table in zip(inside_TR, tables, strict=True):
            if table in self._alone or table in self._own or Shard.parse(table.name).columns:
                number = self._number_of.get(_whole(table))
                if number is not None:
                    row_R[number] = 1.0
        return inside_TR

    def basis(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """[T, B] of any tables; what was never observed has nothing of its own here."""
        basis_TB = np.zeros((len(tables), self.num_directions))
        basis_TB[:, : self.num_wholes] = self.wholes(tables)
        for row_B, table in zip(basis_TB, tables, strict=True):
            if table not in self._alone:
                row_B *= PARTS_ALIKE**0.5
            if table in self._own:
                row_B[self._own[table]] = (1 - PARTS_ALIKE) ** 0.5
        return basis_TB


def _whole(table: TableConfig) -> tuple[str, int, str]:
    return Shard.parse(table.name).table, table.num_embeddings, table.dtype
