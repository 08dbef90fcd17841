"""Checks shapes and dtypes of every batch, before a kernel or an exchange misreads its bytes."""

from __future__ import annotations

import torch

from dlrm_autoshard.data.batch import Batch, DataSource
from dlrm_autoshard.data.errors import DataError

_WHOLE, _REAL = (torch.int32, torch.int64, torch.uint64), (torch.float32,)


def check_form(batch: Batch, source: DataSource, samples: int, where: str) -> None:
    """Raises DataError for a tensor that is not as batch.py describes. where: the batch's origin, for the message."""
    num_tables = len(source.tables)
    expected = {
        "dense_BF": ((samples, source.num_dense), _REAL),
        "lengths_TB": ((num_tables, samples), (torch.int32,)),
        "values_N": ((int(batch.lengths_TB.sum()),), _WHOLE),
        "labels_B": ((samples, *batch.labels_B.shape[1:2]), _REAL),
    }
    if batch.loss_weights_B is not None:
        expected["loss_weights_B"] = (tuple(batch.labels_B.shape), _REAL)
    if batch.weights_N is not None:
        expected["weights_N"] = (tuple(batch.values_N.shape), _REAL)
        averaged = next((table.name for table in source.tables if table.pooling == "mean"), None)
        if averaged is not None:
            raise DataError(
                f"{where} gives weights_N, but weighted ids are summed, and the pooling of '{averaged}' is mean. "
                "Set tables.pooling or tables.poolings to sum, or leave the weights out."
            )
    for name, (shape, dtypes) in expected.items():
        tensor = getattr(batch, name)
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise DataError(
                f"{where} gives {name} as {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; with "
                f"{num_tables} tables and {source.num_dense} dense features it must be {wanted} {list(shape)}."
            )
