"""Errors that tables and their parts share: directions along which their errors are independent.

known = Parts(tables)                                  # tables and parts that were observed
share_NT @ known.basis(tables)                         # [N, B] shares along them
known.also(others)                                     # and what is open of other parts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.tables import TableConfig


class Parts:
    """A part shares its table's error, and has one of its width, of which the cost network may have seen few. Parts of
    a table with equal width take equal time, so they count as one here.

    Axes: R whole tables; B directions: one per whole table, then one per table and width of parts; whole_of_B gives the
    table of each.
    """

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        self.tables = tuple(tables)
        wholes = dict.fromkeys(_whole(table) for table in tables)
        shapes = dict.fromkeys((_whole(table), table.embedding_dim) for table in tables if _is_part(table))
        self._number_of = {whole: number for number, whole in enumerate(wholes)}
        self._own = {shape: len(wholes) + number for number, shape in enumerate(shapes)}
        self._seen = set(tables)
        self.num_wholes, self.num_directions = len(wholes), len(wholes) + len(shapes)
        self.whole_of_B = np.array([*range(len(wholes)), *(self._number_of[whole] for whole, _ in shapes)], dtype=int)

    def also(self, tables: Sequence[TableConfig]) -> Parts:
        """Returns the parts with further directions for widths of the same tables that were not observed."""
        new = [table for table in tables if _is_part(table) and _whole(table) in self._number_of]
        return Parts([*self.tables, *new])

    def wholes(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """Returns [T, R]: 1 where a table is this one, or a part of it, for any tables."""
        inside_TR = np.zeros((len(tables), self.num_wholes))
        for row_R, table in zip(inside_TR, tables, strict=True):
            number = self._number_of.get(_whole(table))
            if number is not None and (table in self._seen or _is_part(table)):
                row_R[number] = 1.0
        return inside_TR

    def basis(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """Returns [T, B] for any tables; an unobserved width has no direction of its own."""
        basis_TB = np.zeros((len(tables), self.num_directions))
        basis_TB[:, : self.num_wholes] = self.wholes(tables)
        for row_B, table in zip(basis_TB, tables, strict=True):
            own = self._own.get((_whole(table), table.embedding_dim)) if _is_part(table) else None
            if own is not None:
                row_B[own] = 1.0
        return basis_TB


def _is_part(table: TableConfig) -> bool:
    return table.shard.columns is not None


def _whole(table: TableConfig) -> tuple[str, int, str]:
    return table.shard.table, table.num_embeddings, table.dtype
