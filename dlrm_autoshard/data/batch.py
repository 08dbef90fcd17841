"""One rank's slice of a global batch, and the protocol of data sources.

Ids are table-major: all of table 0's ids (sample by sample), then table 1's, as fbgemm's lookup takes them. Here every
feature counts as a table under its own name; features.py knows which features share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.data.errors import DataError as DataError  # re-exported
from dlrm_autoshard.tables import TableConfig

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Batch:
    """B samples of a rank, of which the first `size` are real. The rest is padding (empty bags, no label), which gives
    all ranks the same B when the last global batch is uneven.

    dense_BF: float32. lengths_TB: int32, ids per table and sample. values_N: int32 or int64, N = lengths_TB.sum().
    labels_B: float32, 0 or 1; [B, L] for L tasks. global_size: real samples of all ranks. weights_N: float32, one per
    id, multiplied with its row before pooling; None: all 1. loss_weights_B: float32, shaped like the labels, multiplied
    with each loss; None: all 1.
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
        """Drops padding, which must not enter statistics such as BatchNorm's. A rank with only padding keeps it: its
        loss is a sum over no samples, so it learns nothing from it."""
        return values[: self.size] if 0 < self.size < self.padded_size else values

    def pinned(self) -> Batch:
        """Returns the batch in pinned memory, from which a GPU copies asynchronously."""
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **pinned)

    def padded_to(self, batch_size: int, global_size: int) -> Batch:
        """Appends empty samples up to `batch_size`."""
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
    """Returns int32, half the bytes to send and look up, if row numbers fit it counted through all tables, as fbgemm's
    GPU backward does; else int64."""
    return np.dtype(np.int32 if sum(table.num_embeddings for table in tables) < 2**31 else np.int64)


class DataSource(Protocol):
    """Samples in an order that depends only on seed, split and epoch.

    Reading is by position, so slicing by rank, resuming in mid-epoch and changing the number of ranks are arithmetic on
    positions, without reader state to save.

    reuse_batches: the loader repeats the first so many global batches (for benchmarks); None: it does not. Optional
    attributes: `label_names` of several tasks (see `label_names_of`); `dense_names`, by which a model finds dense
    columns in another order; `parallel_reads = True` if several threads may call `read` at once; `remarks`, sentences
    to print at a job's start; `num_files` per split. Ids may be uint64 (see id_check.py).
    """

    tables: tuple[TableConfig, ...]
    num_dense: int
    reuse_batches: int | None

    def num_samples(self, split: Split) -> int: ...

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        """Returns samples [first, last) of the epoch's order; size = global_size = last - first. DataError on bad data.

        Called from several threads, but one at a time without `parallel_reads`."""
        ...


def has_id_weights(source: DataSource) -> bool:
    """Returns whether batches have `weights_N`; sources with files may answer by `id_weights` without reading."""
    said = getattr(source, "id_weights", None)
    return source.read("train", 0, 0, 1).weights_N is not None if said is None else bool(said)


def label_names_of(source: DataSource) -> tuple[str, ...]:
    """Returns the name of each label; 'label' if the source names none."""
    return tuple(getattr(source, "label_names", ("label",)))
