"""One rank's slice of a global batch, and the one method that every data source has.

Ids are table-major: all of table 0's ids (sample by sample), then table 1's, the layout fbgemm's lookup takes. Here a
table is a feature's, under the feature's name; which features share one says features.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.data.errors import DataError as DataError  # for those who import it from here
from dlrm_autoshard.tables import TableConfig

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Batch:
    """B samples of which the first `size` are real; the rest are padding (empty bags, no label) so that all
    ranks have the same B when the last global batch is uneven.

    dense_BF: float32. lengths_TB: int32, ids per table and sample. values_N: int32 or int64, N = lengths_TB.sum().
    labels_B: float32, 0 or 1; [B, L] where there are several tasks. global_size: real samples over all ranks.
    weights_N: float32, one an id, by which its row is multiplied before pooling; None: all 1. loss_weights_B: float32,
    shaped like the labels, by which each one's loss is multiplied; None: all 1.
    """

    dense_BF: Tensor
    lengths_TB: Tensor
    values_N: Tensor
    labels_B: Tensor
    size: int
    global_size: int
    weights_N: Tensor | None = None
    loss_weights_B: Tensor | None = None

    @property
    def padded_size(self) -> int:
        return self.labels_B.shape[0]

    def real_rows(self, values: Tensor) -> Tensor:
        """Returns the rows of real samples: padding belongs in no statistics, such as BatchNorm's. A rank with none but
        padding passes it on, and learns nothing from it: its loss is a sum over nothing."""
        return values[: self.size] if 0 < self.size < self.padded_size else values

    def pinned(self) -> Batch:
        """The same in memory from which a GPU copies without making anybody wait."""
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **pinned)

    def padded_to(self, batch_size: int, global_size: int) -> Batch:
        """The same samples followed by empty ones up to `batch_size`."""
        missing = batch_size - self.padded_size
        if missing == 0:
            return replace(self, global_size=global_size)

        def padded(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(values, (0, 0) * (values.ndim - 1) + (0, missing))

        return replace(
            self,
            dense_BF=padded(self.dense_BF),
            lengths_TB=torch.nn.functional.pad(self.lengths_TB, (0, missing)),
            labels_B=padded(self.labels_B),
            loss_weights_B=None if self.loss_weights_B is None else padded(self.loss_weights_B),
            global_size=global_size,
        )


def ids_dtype(tables: Sequence[TableConfig]) -> np.dtype[np.signedinteger]:
    """int32, half the bytes to send and to look up, where row numbers fit: counted through all tables, as fbgemm's
    backward on GPUs does."""
    return np.dtype(np.int32 if sum(table.num_embeddings for table in tables) < 2**31 else np.int64)


class DataSource(Protocol):
    """Samples in an order that depends on nothing but seed, split and epoch.

    Reading is by position, so that slicing by rank, resuming in mid-epoch and changing the number of ranks are
    arithmetic on positions, with no reader state to save.

    reuse_batches: None, or the loader goes over the first so many global batches in turn (for benchmarks). One with
    several tasks has `label_names`, too (see `label_names_of`); one that names its dense columns has `dense_names`, by
    which a model finds them again in another order; one whose `read` several threads may call at once says
    `parallel_reads = True`. What people should know of it at a job's start may be sentences in `remarks`, and the files
    of each split a number in `num_files`. A source's ids may be uint64, too: see id_check.py.
    """

    tables: tuple[TableConfig, ...]
    num_dense: int
    reuse_batches: int | None

    def num_samples(self, split: Split) -> int: ...

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        """Samples [first, last) of the epoch's order; size = global_size = last - first. DataError on bad data.
        A job calls it from several threads, one at a time but where `parallel_reads`."""
        ...


def has_id_weights(source: DataSource) -> bool:
    """Whether its batches come with `weights_N`: one with files, which may be gone, says so as `id_weights`."""
    said = getattr(source, "id_weights", None)
    return source.read("train", 0, 0, 1).weights_N is not None if said is None else bool(said)


def label_names_of(source: DataSource) -> tuple[str, ...]:
    """A name for each label; one that a source does not name is 'label'."""
    return tuple(getattr(source, "label_names", ("label",)))
