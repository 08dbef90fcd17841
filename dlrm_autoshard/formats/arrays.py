"""Turns JSON's nested lists into arrays of an expected shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrm_autoshard.formats.json_file import FormatError

MOST = 1e6
"""Larger weights, prices or factors are taken for damage: none that were learned are."""


def array_like(record: Any, name: str, like: np.ndarray) -> np.ndarray:
    """Returns record[name] with the shape and dtype of `like`; FormatError if it is missing, misshapen or too large."""
    if not isinstance(record, Mapping) or name not in record:
        raise FormatError(f"'{name}' is missing.")
    try:
        values = np.array(record[name])
    except ValueError:  # rows of different lengths
        values = np.array(None)
    fits = values.shape == like.shape and values.dtype.kind in "fiu"
    if not fits or not (np.abs(values) <= MOST).all():
        raise FormatError(f"'{name}' must be numbers of shape {list(like.shape)}, none beyond {MOST:,.0f}; it is not.")
    return values.astype(like.dtype)
