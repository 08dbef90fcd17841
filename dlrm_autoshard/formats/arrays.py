"""Arrays of numbers out of JSON's nested lists, of the shape that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrm_autoshard.formats.json_file import FormatError

MOST = 1e6
"""No weight, price or factor that was learned is larger."""


def array_like(record: Any, name: str, like: np.ndarray) -> np.ndarray:
    """record[name] with the shape and type of `like`; FormatError where it is missing, of another shape, or absurd."""
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
