"""Reads a trained model's weights from a checkpoint, one tensor at a time: all tables together need not fit in memory.

weights = SavedWeights.open(checkpoint, features.tables)
for name, tensor in weights.tensors(): ...                # tables.item.weight, dense.over_mlp.0.weight, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.training.checkpoints.manifest import (
    CheckpointError,
    Manifest,
    check_dtypes,
    check_shapes,
    read_manifest,
)
from dlrm_autoshard.training.checkpoints.tensor_file import read_tensors

DENSE, BUFFERS = "dense.", "dense_buffers."
"""Prefixes of names in a checkpoint; a module's state dict has parameters and buffers together."""


@dataclass(frozen=True)
class SavedWeights:
    """The weights in a checkpoint. tables: table -> the name of its weights, in the order of the data's tables."""

    path: Path
    manifest: Manifest
    tables: dict[str, str]

    @staticmethod
    def open(path: Path, tables: Sequence[TableConfig]) -> SavedWeights:
        """Opens a checkpoint; CheckpointError if its tables differ."""
        manifest = read_manifest(path)
        names = {table.name: f"tables.{table.name}.weight" for table in tables}
        wanted = {names[table.name]: (table.num_embeddings, table.embedding_dim) for table in tables}
        shapes = manifest.shapes().items()
        saved = {name: of for name, of in shapes if name.startswith("tables.") and name.endswith(".weight")}
        check_shapes(path, saved, wanted)
        return SavedWeights(path, manifest, names)

    @property
    def step(self) -> int:
        return self.manifest.state.step

    def __len__(self) -> int:
        """Returns the number of tensors."""
        return len(self.tables) + sum(name.startswith((DENSE, BUFFERS)) for name in self.manifest.tensors)

    def tensors(self, prefix: str = "tables.") -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of all weights. prefix: of the tables' names. DamagedCheckpoint if bytes have
        changed."""
        for table, saved in self.tables.items():
            yield f"{prefix}{table}.weight", self._read(saved)
        for saved in self.manifest.tensors:
            for start in (DENSE, BUFFERS):
                if saved.startswith(start):
                    yield DENSE + saved.removeprefix(start), self._read(saved)

    def table(self, name: str) -> Tensor:
        """Returns a table's weights, all columns."""
        return self._read(self.tables[name])

    def load(self, dense: nn.Module, shards: Mapping[str, Tensor] | None = None) -> None:
        """Fills the dense part's parameters and buffers, and shards' weights by name, in place. CheckpointError if they
        are of another model."""
        kept = dense.state_dict().keys()
        wanted: dict[str, Tensor] = {f"{DENSE}{name}": parameter for name, parameter in dense.named_parameters()}
        wanted |= {f"{BUFFERS}{name}": buffer for name, buffer in dense.named_buffers() if name in kept}
        saved = {
            name: tuple(tensor.shape)
            for name, tensor in self.manifest.tensors.items()
            if name.startswith((DENSE, BUFFERS))
        }
        check_shapes(self.path, saved, {name: tuple(tensor.shape) for name, tensor in wanted.items()})
        tables = {f"tables.{name}.weight": weight for name, weight in (shards or {}).items()}
        check_dtypes(self.path, self.manifest.tensors, tables)
        read_tensors(self.path, self.manifest, tables)
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(self._read(name))

    def _read(self, name: str) -> Tensor:
        saved = self.manifest.tensors[name]
        dtype = getattr(torch, saved.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"checkpoint '{self.path}': {name} is {saved.dtype}, which is not a dtype of torch.")
        tensor = torch.empty(saved.shape, dtype=dtype)
        read_tensors(self.path, self.manifest, {name: tensor})
        return tensor
