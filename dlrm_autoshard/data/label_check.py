"""Labels are checked in every batch, before a loss can run away: they are 0 or 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.errors import DataError


def check_labels(batch: Batch, describe_sample: Callable[[int], str], place: Callable[[int], str]) -> None:
    """DataError names the first sample whose label is another, the label, and where it is: file or source."""
    labels_B = batch.labels_B.numpy()
    bad_B = (labels_B != 0) & (labels_B != 1)  # NaN is neither
    if bad_B.any():
        first = tuple(np.argwhere(bad_B)[0])  # sample, and task where there are several
        sample = int(first[0])
        others = np.unique(labels_B[bad_B])
        more = f" (this batch has {', '.join(f'{label:g}' for label in others[:5])})" if len(others) > 1 else ""
        raise DataError(
            f"{describe_sample(sample)} has label {labels_B[first]:g}{more}: {place(sample)}. Labels must be "
            "0 (no click) or 1 (click): map them so, or leave such samples out."
        )
