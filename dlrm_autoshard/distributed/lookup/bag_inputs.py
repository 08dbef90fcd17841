"""Checks the inputs of `ShardedEmbeddingBags` and turns them into a batch in the tables' order.

batch = BagInputs(tables, rank, check_ids=True).batch(lengths_TB, values_N)         # or a KeyedJaggedTensor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtypes, TableOptimizerConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.id_check import IdCheck
from dlrm_autoshard.distributed.lookup.wire import DTYPES
from dlrm_autoshard.distributed.tables.init import check_file
from dlrm_autoshard.errors import BagsError as BagsError
from dlrm_autoshard.tables import TableConfig

WHOLE = (torch.int32, torch.int64)


def features_given(
    tables: Sequence[TableConfig],
    features: Mapping[str, Sequence[str]],
    exchange_dtype: str | Mapping[str, str],
    optimizer: object,
    sequences: Sequence[str] = (),
) -> Features:
    """Returns the tables with their features; BagsError says why `ShardedEmbeddingBags` cannot be made of them."""
    check_tables(tables)
    for table in tables:
        check_file(table)
    looked_up = features_of(tables, features)
    for key, dtype in exchange_dtype.items() if isinstance(exchange_dtype, Mapping) else [("", exchange_dtype)]:
        if key not in ("", *ExchangeDtypes.model_fields):
            raise BagsError(f"exchange_dtype has a key {key!r}; its keys are {', '.join(ExchangeDtypes.model_fields)}.")
        if dtype not in DTYPES:
            where = f"exchange_dtype[{key!r}]" if key else "exchange_dtype"
            raise BagsError(f"{where} is {dtype!r}; it must be one of {', '.join(DTYPES)}.")
    own = {f"the optimizer of table '{table.name}'": table.optimizer or optimizer for table in tables}
    for what, given in {"optimizer": optimizer, **own}.items():
        if not isinstance(given, TableOptimizerConfig):
            raise BagsError(
                f"{what} is {given!r}; it must be a RowwiseAdagrad(lr), Adagrad(lr), SGD(lr), Adam(lr) or Frozen()."
            )
    if isinstance(sequences, str):
        raise BagsError(f"sequences is '{sequences}'; it must be a list of names: ['{sequences}'].")
    return Features.of(looked_up, features, sequences)


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Raises BagsError if the tables cannot be in one module."""
    if not tables:
        raise BagsError("there are no tables.")
    names = [table.name for table in tables]
    for number, table in enumerate(tables):
        if table.name in names[:number]:
            raise BagsError(
                f"two tables are named '{table.name}'. If features share a table, give the table once, and the "
                "features' names as features={'TABLE': [...]}."
            )


def features_of(tables: Sequence[TableConfig], features: Mapping[str, Sequence[str]]) -> list[TableConfig]:
    """Returns a table per feature, under the feature's name; BagsError if names do not fit."""
    unknown = sorted(features.keys() - {table.name for table in tables})
    if unknown:
        raise BagsError(f"features names a table '{unknown[0]}', which is not among the tables.")
    found = [replace(table, name=name) for table in tables for name in features.get(table.name, [table.name])]
    names = [feature.name for feature in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BagsError(f"two features are named '{twice}'. Give each a name of its own.")
    return found


class BagInputs:
    """Makes checked batches of the arguments of `ShardedEmbeddingBags`."""

    def __init__(self, tables: Sequence[TableConfig], rank: int, *, check_ids: bool) -> None:
        """tables: one per feature, under the feature's name."""
        self._tables, self._rank = tables, rank
        self._names = [table.name for table in tables]
        self._check = IdCheck(tables, "error", "Fix the ids, or the table's rows.") if check_ids else None

    def batch(self, ids: Any, values_N: Tensor | None, weights_N: Tensor | None) -> Batch:
        """Makes a batch of `ShardedEmbeddingBags.forward`'s arguments; BagsError, or the IdCheck's DataError."""
        if values_N is None:
            if weights_N is not None:
                raise BagsError("weights were given beside a KeyedJaggedTensor, which has its own.")
            lengths_TB, values_N, weights_N = self._of_keys(ids)
        else:
            lengths_TB = ids
        for what, given in (("lengths", lengths_TB), ("values", values_N)):
            if not isinstance(given, Tensor) or given.dtype not in WHOLE:
                kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
                raise BagsError(f"{what} are {kind}; they must be a tensor of int32 or int64.")
        if lengths_TB.numel() % len(self._tables):
            raise BagsError(
                f"lengths are {list(lengths_TB.shape)}; {len(self._tables)} tables need [{len(self._tables)}, B]."
            )
        if weights_N is not None and weights_N.shape != values_N.shape:
            raise BagsError(f"there are {len(weights_N)} weights for {len(values_N)} ids; each id needs one.")
        if weights_N is not None and any(table.pooling == "mean" for table in self._tables):
            raise BagsError("weights need tables with pooling 'sum'; for a weighted mean divide the sums yourself.")
        if weights_N is not None and weights_N.requires_grad and torch.is_grad_enabled():
            raise BagsError(
                "weights require a gradient, which is not computed: give weights_N.detach(), or multiply the pooled "
                "vectors by the learned factor."
            )
        if not lengths_TB.numel():
            raise BagsError(
                "the batch has no samples: every rank must look up at least one, and as many as the others."
            )
        lengths_TB = lengths_TB.reshape(len(self._tables), -1)
        samples = lengths_TB.shape[1]
        nothing, no_labels = torch.zeros(samples, 0), torch.zeros(samples)
        weights_N = None if weights_N is None else weights_N.float()
        batch = Batch(nothing, lengths_TB.int(), values_N, no_labels, samples, 0, weights_N)
        if self._check is None:
            return batch
        host = replace(batch, lengths_TB=batch.lengths_TB.cpu(), values_N=values_N.cpu())
        return self._check(host, lambda sample: f"sample {sample} of rank {self._rank}'s batch")

    def _of_keys(self, ids: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (lengths [T, B], values, weights) of a KeyedJaggedTensor, in the tables' order."""
        names = self._names
        if not all(hasattr(ids, name) for name in ("keys", "lengths", "values")):
            raise BagsError("ids must be lengths [T, B] and values [N], or a KeyedJaggedTensor.")
        keys = list(ids.keys())
        if sorted(keys) != sorted(names):
            unknown = [key for key in keys if key not in names] or [name for name in names if name not in keys]
            raise BagsError(
                f"the ids' keys must be the tables' names, each once; '{(unknown or keys)[0]}' is not. If features "
                "share a table, give their names as features={'TABLE': [...]}."
            )
        weights_N = getattr(ids, "weights_or_none", lambda: None)()
        lengths_TB = ids.lengths().reshape(len(keys), -1)
        if keys == names:
            return lengths_TB, ids.values(), weights_N
        order, counts = [keys.index(name) for name in names], lengths_TB.sum(1).tolist()

        def reordered(of_ids_N: Tensor) -> Tensor:
            parts = of_ids_N.split(counts)
            return torch.cat([parts[i] for i in order])

        return lengths_TB[order], reordered(ids.values()), None if weights_N is None else reordered(weights_N)
