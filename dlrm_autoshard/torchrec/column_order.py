"""The columns of a KeyedTensor in one order, whatever the plan: TorchRec's follows the tables' ranks.

A model that reads `KeyedTensor.values()` would otherwise be given other columns after a move, in silence.
"""

from __future__ import annotations

from typing import Any

import torch


class ColumnOrder:
    """A forward hook on a sharded EmbeddingBagCollection; its order is that of the keys when this is made."""

    def __init__(self, collection: Any) -> None:
        self._keys = list(collection._embedding_names)

    def __call__(self, collection: Any, inputs: Any, pending: Any) -> None:
        if collection._embedding_names != self._keys:
            pending.callbacks.append(self._in_order)

    def _in_order(self, pooled: Any) -> Any:
        from torchrec import KeyedTensor

        by_key = pooled.to_dict()
        columns = [by_key[key] for key in self._keys]
        return KeyedTensor(self._keys, [part.shape[1] for part in columns], torch.cat(columns, 1))
