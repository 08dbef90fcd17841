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
    """Parts of a table that are as wide as one another take as long, so they are one here.

    Axes: R whole tables, B directions: one for each of these, then one for each width of those seen in several.
    """

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        self.tables = tuple(tables)
        shapes = dict.fromkeys((_whole(table), table.embedding_dim) for table in tables)
        widths = Counter(whole for whole, _ in shapes)
        self._number_of = {whole: number for number, whole in enumerate(widths)}
        several = [shape for shape in shapes if widths[shape[0]] > 1]
        self._own = {shape: len(widths) + number for number, shape in enumerate(several)}
        self._alone = {shape for shape in shapes if widths[shape[0]] == 1}
        self.num_wholes, self.num_directions = len(widths), len(widths) + len(several)

    def wholes(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """[T, R]: 1 where a table is this one, or a part of it; any tables, observed or not."""
        inside_TR = np.zeros((len(tables), self.num_wholes))
        for row_R, table in zip(inside_TR, tables, strict=True):
            shape = _whole(table), table.embedding_dim
            if shape in self._alone or shape in self._own or Shard.parse(table.name).columns:
                number = self._number_of.get(shape[0])
                if number is not None:
                    row_R[number] = 1.0
        return inside_TR

    def basis(self, tables: Sequence[TableConfig]) -> np.ndarray:
        """[T, B] of any tables; what was never observed has nothing of its own here."""
        basis_TB = np.zeros((len(tables), self.num_directions))
        basis_TB[:, : self.num_wholes] = self.wholes(tables)
        for row_B, table in zip(basis_TB, tables, strict=True):
            shape = _whole(table), table.embedding_dim
            if shape not in self._alone:
                row_B *= PARTS_ALIKE**0.5
            if shape in self._own:
                row_B[self._own[shape]] = (1 - PARTS_ALIKE) ** 0.5
        return basis_TB


def _whole(table: TableConfig) -> tuple[str, int, str]:
    return Shard.parse(table.name).table, table.num_embeddings, table.dtype
