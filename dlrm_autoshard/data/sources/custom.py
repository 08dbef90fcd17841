"""`source: custom`: reads samples with users' code. `data.factory` is called with the `tables:` section and the options
and returns a `DataSource` (see batch.py).

    data: {source: custom, factory: "clicks.py:Clicks", options: {path: clicks.npz}}

A few samples are read at once, so that errors appear before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from numbers import Integral
from typing import Any

from dlrm_autoshard import plug_in
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import CustomData
from dlrm_autoshard.data.batch import DataSource, label_names_of
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.form_check import check_form

_LOOKED_AT = 2  # samples


def open_custom(data: CustomData, tables: TablesConfig) -> DataSource:
    """Makes the user's source by its factory. DataError names what it lacks."""
    factory = plug_in.load(data.factory, "data.factory")
    source = plug_in.call(factory, "data.options", tables, **data.options)
    missing = [name for name in ("tables", "num_dense", "num_samples", "read") if not hasattr(source, name)]
    if missing:
        raise DataError(f"data.factory: the object that '{data.factory}' returns has no {' and no '.join(missing)}.")
    if not hasattr(source, "reuse_batches"):
        source.reuse_batches = None
    _check(source, data.factory)
    return source


def _check(source: Any, factory: str) -> None:
    for what, names in (("tables", [table.name for table in source.tables]), ("label_names", label_names_of(source))):
        twice = next((name for name, times in Counter(names).items() if times > 1), None)
        if twice is not None:
            raise DataError(
                f"data.factory: {what} of '{factory}' have '{twice}' more than once. Give each its own name."
            )
    for split in ("train", "val", "test"):
        samples = source.num_samples(split)
        if not isinstance(samples, Integral) or samples < 0:
            raise DataError(
                f"data.factory: num_samples('{split}') of '{factory}' is {samples!r}; it must be a whole number, "
                "because samples are read by position."
            )
    count = min(_LOOKED_AT, source.num_samples("train"))
    if count == 0:
        raise DataError(f"data.factory: '{factory}' has no samples to train on: num_samples('train') is 0.")
    check_form(
        source.read("train", 0, 0, count), source, count, f"data.factory: read('train', 0, 0, {count}) of '{factory}'"
    )
