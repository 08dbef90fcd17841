"""Checks labels, dense features and id weights of every batch, before the loss diverges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.errors import DataError


def check_labels(batch: Batch, describe_sample: Callable[[int], str], place: Callable[[int], str]) -> None:
    """Raises DataError for the first sample whose label is neither 0 nor 1; names the label and the file or source."""
    labels_B = batch.labels_B.numpy()
    bad_B = (labels_B != 0) & (labels_B != 1)  # NaN is neither
    if bad_B.any():
        first = tuple(np.argwhere(bad_B)[0])  # sample, and task if there are several
        sample = int(first[0])
        others = np.unique(labels_B[bad_B])
        more = f" (this batch has {', '.join(f'{label:g}' for label in others[:5])})" if len(others) > 1 else ""
        raise DataError(
            f"{describe_sample(sample)} has label {labels_B[first]:g}{more}: {place(sample)}. Labels must be "
            "0 (no click) or 1 (click): map them, or leave such samples out."
        )


def check_finite(batch: Batch, describe_sample: Callable[[int], str], place: Callable[[int], str]) -> None:
    """Raises DataError for the first sample with a dense feature or id weight that is not finite."""
    dense_BF = np.isfinite(batch.dense_BF.numpy())
    if not dense_BF.all():
        sample, feature = map(int, np.argwhere(~dense_BF)[0])
        value, what = float(batch.dense_BF[sample, feature]), f"dense feature {feature} (from 0)"
    elif batch.weights_N is not None and not (weights_N := np.isfinite(batch.weights_N.numpy())).all():
        first = int(weights_N.argmin())
        bag = int(np.searchsorted(batch.lengths_TB.numpy().ravel().cumsum(dtype=np.int64), first, side="right"))
        sample = bag % batch.padded_size
        value, what = float(batch.weights_N[first]), f"a weight of table {bag // batch.padded_size}'s ids (from 0)"
    else:
        return
    raise DataError(
        f"{describe_sample(sample)} has {what} that is {value}: {place(sample)}. Fill in a number, or leave "
        "such samples out."
    )
