"""`source: custom`: samples from users' own code. `data.factory` names it; it is called with the `tables:` section and
the options, and returns a `DataSource` (batch.py says what that is).

    data: {source: custom, factory: "clicks.py:Clicks", options: {path: clicks.npz}}

A few samples are read at once, so that a wrong shape or type is a sentence at the start and no crash in a kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from dlrm_autoshard import plug_in
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import CustomData
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.data.errors import DataError

_LOOKED_AT = 2  # samples


def open_custom(data: CustomData, tables: TablesConfig) -> DataSource:
    factory = plug_in.load(data.factory, "data.factory")
    source = plug_in.call(factory, "data.options", tables, **data.options)
    missing = [name for name in ("tables", "num_dense", "num_samples", "read") if not hasattr(source, name)]
    if missing:
        raise DataError(f"data.factory: what '{data.factory}' gives has no {' and no '.join(missing)}.")
    if not hasattr(source, "reuse_batches"):
        source.reuse_batches = None
    _check(source, data.factory)
    return source


def _check(source: Any, factory: str) -> None:
    for split in ("train", "val", "test"):
        samples = source.num_samples(split)
        if not isinstance(samples, int) or samples < 0:
            raise DataError(
                f"data.factory: num_samples('{split}') of '{factory}' is {samples!r}; it must be a whole number: "
                "samples are read by their position, so a source has to know how many it has."
            )
    count = min(_LOOKED_AT, source.num_samples("train"))
    if count == 0:
        raise DataError(f"data.factory: '{factory}' has no samples to train on: num_samples('train') is 0.")
    batch, num_tables = source.read("train", 0, 0, count), len(source.tables)
    expected = {
        "dense_BF": ((count, source.num_dense), (torch.float32,)),
        "lengths_TB": ((num_tables, count), (torch.int32,)),
        "values_N": ((int(batch.lengths_TB.sum()),), (torch.int32, torch.int64)),
        "labels_B": ((count, *batch.labels_B.shape[1:2]), (torch.float32,)),
    }
    if batch.loss_weights_B is not None:
        expected["loss_weights_B"] = (tuple(batch.labels_B.shape), (torch.float32,))
    if batch.weights_N is not None:
        expected["weights_N"] = (tuple(batch.values_N.shape), (torch.float32,))
        if any(table.pooling == "mean" for table in source.tables):
            raise DataError(
                f"data.factory: read('train', 0, 0, {count}) of '{factory}' gives weights_N, but ids with weights are "
                "summed and tables.pooling is mean. Set it to sum, or leave the weights out."
            )
    for name, (shape, dtypes) in expected.items():
        tensor = getattr(batch, name)
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise DataError(
                f"data.factory: read('train', 0, 0, {count}) of '{factory}' gives {name} as "
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; with {num_tables} tables and "
                f"{source.num_dense} dense features it must be {wanted} {list(shape)}."
            )
