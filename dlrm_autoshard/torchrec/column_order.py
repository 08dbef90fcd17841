"""Keeps the columns of a KeyedTensor in one order, as TorchRec's order depends on the tables' ranks.

Without it a model that reads `KeyedTensor.values()` would silently get other columns after a move.
"""

from __future__ import annotations

from typing import Any

from fbgemm_gpu.permute_pooled_embedding_modules import PermutePooledEmbeddings


class ColumnOrder:
    """A forward hook on a sharded EmbeddingBagCollection that keeps the order of keys at its creation."""

    def __init__(self, collection: Any) -> None:
        self._keys, self._dims = list(collection._embedding_names), list(collection._embedding_dims)
        self._now = self._keys
        self._permute: PermutePooledEmbeddings | None = None

    def __call__(self, collection: Any, inputs: Any, pending: Any) -> None:
        keys = collection._embedding_names
        if keys == self._keys:
            return
        if keys != self._now:
            order = [keys.index(key) for key in self._keys]
            self._permute = PermutePooledEmbeddings(collection._embedding_dims, order, collection._device)
            self._now = list(keys)
        pending.callbacks.append(self._in_order)

    def _in_order(self, pooled: Any) -> Any:
        from torchrec import KeyedTensor

        assert self._permute is not None
        return KeyedTensor(self._keys, self._dims, self._permute(pooled.values()))
