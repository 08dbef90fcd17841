"""The order of features, dense columns and labels that a model was trained with.

columns = Columns.of(source, config.tables.shared)           # as checkpoints store them
source = in_order(source, columns, shared, "checkpoint 'c'") # the same samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from dlrm_autoshard.data.batch import Batch, DataSource, Split, label_names_of
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.features import Features

_Names = Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(max_length=10**6)]
_MOST_SHOWN = 12


class Columns(pydantic.BaseModel):
    """Names of columns in order. tables: the table of each feature. dense: None if the source does not name them."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    features: _Names
    tables: _Names
    dense: _Names | None
    labels: _Names

    @pydantic.model_validator(mode="after")
    def _each_once(self) -> Columns:
        for key, names in (("features", self.features), ("dense", self.dense or []), ("labels", self.labels)):
            if len(set(names)) < len(names):
                raise ValueError(f"{key} has a name twice")
        if len(self.tables) != len(self.features):
            raise ValueError("tables must name a table for each feature")
        return self

    @staticmethod
    def of(source: DataSource, shared: Mapping[str, Sequence[str]]) -> Columns:
        """Reads the columns of a source. shared: as in the config's `tables.shared`."""
        features = Features.of(source.tables, shared)
        dense = dense_names_of(source)
        return Columns(
            features=[feature.name for feature in features.features],
            tables=[features.tables[number].name for number in features.table_of],
            dense=None if dense is None else list(dense),
            labels=list(label_names_of(source)),
        )


def dense_names_of(source: DataSource) -> tuple[str, ...] | None:
    """Returns the names of the dense columns; None if the source has none."""
    names = getattr(source, "dense_names", None)
    if names is not None and len(names) != source.num_dense:
        raise DataError(f"the data source has {source.num_dense} dense columns, but {len(names)} dense_names.")
    return None if names is None else tuple(names)


def in_order(source: DataSource, wanted: Columns, shared: Mapping[str, Sequence[str]], model: str) -> DataSource:
    """Reorders the source's columns to `wanted`. DataError names both orders if the columns are not the same.

    model: the checkpoint trained in that order, for messages."""
    own = Columns.of(source, shared)
    features = _places("features (data.tables)", own.features, wanted.features, model)
    dense = _places("dense columns", own.dense, wanted.dense, model)
    labels = _places("labels", own.labels, wanted.labels, model)
    for feature, table in zip(wanted.features, wanted.tables, strict=True):
        here = own.tables[own.features.index(feature)]
        if here != table:
            raise DataError(
                f"{model} looks up '{feature}' in table '{table}', but tables.shared says '{here}'. Set it as it was "
                "(config.yaml in the run's directory)."
            )
    return source if own == wanted else _InOrder(source, features, dense, labels)


def _places(what: str, own: Sequence[str] | None, wanted: Sequence[str] | None, model: str) -> list[int]:
    """Returns the source's position of each wanted name; [] if there are no names."""
    if own is None and wanted is None:
        return []
    if own is None or wanted is None or set(own) != set(wanted):
        cure = "Use the old names; a custom source names its dense columns in `dense_names`"
        raise DataError(
            f"{model} was trained with other {what}: {_listed(wanted)}, in this order; the data has {_listed(own)}"
            f"{_difference(own or (), wanted or ())}. {cure}, or start a new run."
        )
    place = {name: number for number, name in enumerate(own)}
    return [place[name] for name in wanted]


def _difference(own: Sequence[str], wanted: Sequence[str]) -> str:
    missing = [name for name in wanted if name not in set(own)]
    new = [name for name in own if name not in set(wanted)]
    parts = [f"{_listed(names)} {word}" for names, word in ((missing, "is missing"), (new, "is new")) if names]
    return f" ({', '.join(parts)})" if parts and own and wanted else ""


def _listed(names: Sequence[str] | None) -> str:
    if names is None:
        return "columns without names"
    shown = ", ".join(f"'{name[:80]}'" for name in names[:_MOST_SHOWN]) or "none"
    return shown + (f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else "")


class _InOrder:
    """Wraps a DataSource and reorders its columns; everything else is the wrapped source's."""

    def __init__(self, source: DataSource, features: list[int], dense: list[int], labels: list[int]) -> None:
        """features, dense, labels: the wrapped source's position of each column; dense is [] without names."""
        self._source, self._features, self._dense, self._labels = source, features, dense, labels
        self.tables = tuple(source.tables[place] for place in features)
        self.num_dense, self.reuse_batches = source.num_dense, source.reuse_batches
        names = label_names_of(source)
        self.label_names = tuple(names[place] for place in labels)
        named = getattr(source, "dense_names", None)
        self.dense_names = None if named is None else tuple(named[place] for place in dense)

    def __getattr__(self, name: str) -> Any:
        """Passes on `parallel_reads`, `place` and other optional attributes."""
        if name == "_source":  # during unpickling
            raise AttributeError(name)
        return getattr(self._source, name)

    def num_samples(self, split: Split) -> int:
        return self._source.num_samples(split)

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        batch = self._source.read(split, epoch, first, last)
        if not self._is_whole(batch):
            return batch  # the form check reports what is wrong
        counts = batch.lengths_TB.sum(1).tolist()

        def of_ids(values_N: Tensor) -> Tensor:
            of_feature = values_N.split(counts)
            return torch.cat([of_feature[place] for place in self._features])

        def of_columns(values: Tensor, places: list[int]) -> Tensor:
            return values[:, places] if places and values.ndim == 2 else values

        weights_N, loss_weights_B = batch.weights_N, batch.loss_weights_B
        return replace(
            batch,
            dense_BF=of_columns(batch.dense_BF, self._dense),
            lengths_TB=batch.lengths_TB[self._features],
            values_N=of_ids(batch.values_N),
            labels_B=of_columns(batch.labels_B, self._labels),
            weights_N=None if weights_N is None else of_ids(weights_N),
            loss_weights_B=None if loss_weights_B is None else of_columns(loss_weights_B, self._labels),
        )

    def _is_whole(self, batch: Batch) -> bool:
        lengths_TB, ids = batch.lengths_TB, [batch.values_N, *([] if batch.weights_N is None else [batch.weights_N])]
        labels = [batch.labels_B, *([] if batch.loss_weights_B is None else [batch.loss_weights_B])]
        return (
            lengths_TB.ndim == 2
            and len(lengths_TB) == len(self.tables)
            and not (lengths_TB.dtype.is_floating_point or bool((lengths_TB < 0).any()))
            and all(values.ndim == 1 and len(values) == int(lengths_TB.sum()) for values in ids)
            and batch.dense_BF.ndim == 2
            and batch.dense_BF.shape[1] == self.num_dense
            and all(values.ndim == 1 or values.shape[1:] == (len(self._labels),) for values in labels)
        )
