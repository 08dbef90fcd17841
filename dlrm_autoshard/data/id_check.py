"""Checks ids of every batch before a kernel reads beyond a table; cheap, as it compares each table's largest id.

batch = IdCheck(source.tables, on_bad_id="error")(batch, describe_sample)
signed(ids, rows=40, on_bad_id="clip")          # one table's ids, for sources with uint64 ids
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_autoshard.data.batch import Batch, DataError, ids_dtype
from dlrm_autoshard.data.errors import BadValue
from dlrm_autoshard.tables import TableConfig

OnBadId = Literal["error", "clip", "hash"]

_CURE = "Fix the data or the table's rows, or set data.on_bad_id to 'clip' or 'hash'."


def signed(ids: NDArray[np.integer], rows: int, on_bad_id: OnBadId) -> NDArray[np.integer]:
    """Returns one table's ids as int32 or int64, for IdCheck. Ids of 2^63 and more are repaired as IdCheck would, or
    raise BadValue."""
    if ids.dtype.name in ("int32", "int64"):
        return ids
    if ids.dtype != np.uint64 or int(ids.max(initial=0)) < 2**63:
        return ids.astype(np.int64)
    if on_bad_id == "error":
        place = int((ids >= 2**63).argmax())
        raise BadValue(place, f"{ids[place]}, but its table has {rows} rows (ids 0 to {rows - 1}). {_CURE[:-1]}")
    return (np.minimum(ids, np.uint64(rows - 1)) if on_bad_id == "clip" else ids % np.uint64(rows)).astype(np.int64)


class IdCheck:
    """Rejects ids outside [0, rows), or repairs them: `clip` to the nearest row, `hash` to id mod rows.

    Returns ids in `ids_dtype`.
    """

    def __init__(self, tables: Sequence[TableConfig], on_bad_id: OnBadId, cure: str = _CURE) -> None:
        """cure: the advice at the end of an error message."""
        self._tables = tables
        self._rows_T = np.array([table.num_embeddings for table in tables], np.int64)
        self._dtype = ids_dtype(tables)
        self._on_bad_id, self._cure = on_bad_id, cure

    def __call__(
        self, batch: Batch, describe_sample: Callable[[int], str], place: Callable[[int], str] | None = None
    ) -> Batch:
        """Returns the checked batch. describe_sample, place: name the batch's b-th sample and its file, for errors."""
        values_N = batch.values_N.numpy()
        lengths_TB = batch.lengths_TB.numpy()
        counts_T = lengths_TB.sum(axis=1, dtype=np.int64)
        if lengths_TB.size and lengths_TB.min() < 0:
            table, sample = map(int, np.argwhere(lengths_TB < 0)[0])
            raise DataError(
                f"{describe_sample(sample)} has a bag of length {lengths_TB[table, sample]} of table "
                f"'{self._tables[table].name}'; lengths are 0 or more."
            )
        if counts_T.sum() != len(values_N):
            raise DataError(
                f"the lengths of the bags add up to {counts_T.sum()}, but there are {len(values_N)} ids, in the batch "
                f"from {describe_sample(0)}. The data source is at fault."
            )
        if self._all_good(values_N, counts_T):
            return self._narrowed(batch, values_N)
        rows_N = np.repeat(self._rows_T, counts_T)
        if self._on_bad_id == "error":
            raise DataError(self._sentence(batch, values_N, rows_N, describe_sample, place))
        wide_N = values_N if values_N.dtype == np.uint64 else values_N.astype(np.int64)
        rows_N = rows_N.astype(wide_N.dtype)
        return self._narrowed(
            batch, np.clip(wide_N, 0, rows_N - 1) if self._on_bad_id == "clip" else np.mod(wide_N, rows_N)
        )

    def _all_good(self, values_N: NDArray[np.integer], counts_T: NDArray[np.int64]) -> bool:
        filled_T = np.flatnonzero(counts_T)
        if len(filled_T) == 0:
            return True
        # Viewed as unsigned, a negative id is huge, so the largest id of a table covers both ends.
        unsigned_N = values_N.view(np.uint32 if values_N.dtype == np.int32 else np.uint64)
        largest_T = np.maximum.reduceat(unsigned_N, (counts_T.cumsum() - counts_T)[filled_T])
        return bool((largest_T < self._rows_T[filled_T].astype(np.uint64)).all())

    def _narrowed(self, batch: Batch, values_N: NDArray[np.integer]) -> Batch:
        return replace(batch, values_N=torch.from_numpy(values_N.astype(self._dtype, copy=False)))

    def _sentence(
        self,
        batch: Batch,
        values_N: NDArray[np.integer],
        rows_N: NDArray[np.int64],
        describe_sample: Callable[[int], str],
        place: Callable[[int], str] | None,
    ) -> str:
        bad_N = (values_N < 0) | (values_N >= rows_N)
        first = int(bad_N.argmax())
        bag = int(np.searchsorted(batch.lengths_TB.numpy().ravel().cumsum(dtype=np.int64), first, side="right"))
        table, sample = self._tables[bag // batch.padded_size], bag % batch.padded_size
        others = int(bad_N.sum()) - 1
        return (
            f"table '{table.name}' has {table.num_embeddings} rows (ids 0 to {table.num_embeddings - 1}), but "
            f"{describe_sample(sample)} has id {values_N[first]}"
            + (f": {place(sample)}" if place is not None else "")
            + (f"; {others:,} more ids of this batch are out of range" if others else "")
            + f". {self._cure}"
        )
