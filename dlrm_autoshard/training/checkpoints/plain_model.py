"""A trained model as a plain torch module, read from a checkpoint: no ranks, no plan, no fused lookup.

model = PlainModel(weights, source, features, config.model)      # weights: a SavedWeights
export_plain(model, source, file)
"""

from __future__ import annotations

from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from dlrm_autoshard.config import ModelConfig
from dlrm_autoshard.data.batch import DataSource, has_id_weights, label_names_of
from dlrm_autoshard.data.columns import dense_names_of
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.formats.progress import tracked
from dlrm_autoshard.model.dlrm import make_model
from dlrm_autoshard.model.jagged import Jagged
from dlrm_autoshard.training.checkpoints.saved_weights import SavedWeights


class PlainModel(nn.Module):
    """Predicts with torch's own modules: probabilities [B] (or [B, L]) = model(dense_BF, values, offsets).

    values, offsets: a tensor per feature in the data's order, as nn.EmbeddingBag takes them; then `weights`, if the
    data's ids have weights.
    """

    def __init__(self, weights: SavedWeights, source: DataSource, features: Features, config: ModelConfig) -> None:
        super().__init__()
        self.order, self.table_of = features.output_order(), features.table_of
        self.sequences = [feature.name if feature.name in features.sequences else None for feature in features.features]
        pooled = [features.features[place] for place in self.order]
        self.dense = make_model(source.num_dense, pooled, config, 0, len(label_names_of(source)), features.by_sequence)
        weights.load(self.dense)
        self.margin = self.dense.margin
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weights.table(table.name).float(), mode=table.pooling)
            for table in tracked(features.tables, len(features.tables), "tables")
        )

    def forward(
        self, dense_BF: Tensor, values: list[Tensor], offsets: list[Tensor], weights: list[Tensor] | None = None
    ) -> Tensor:
        pooled, sequences = dict[int, Tensor](), dict[str, Jagged]()
        for feature, table in enumerate(self.table_of):
            bags, name = self.bags[table], self.sequences[feature]
            own = None if weights is None else weights[feature]
            if name is None:
                pooled[feature] = bags(values[feature], offsets[feature], own)
            else:
                weight: Any = bags.weight
                vectors = nn.functional.embedding(values[feature], weight)
                vectors = vectors if own is None else vectors * own[:, None]
                sequences[name] = Jagged(vectors, _lengths(offsets[feature], values[feature]))
        before, after = (dense_BF.new_zeros(dense_BF.shape[0], columns) for columns in self.margin)
        pooled_BD = torch.cat([before, *(pooled[feature] for feature in self.order), after], 1)
        return torch.sigmoid(self.dense.logits(self.dense.bottom(dense_BF), pooled_BD, sequences))


def _lengths(offsets: Tensor, values: Tensor) -> Tensor:
    """Returns the lengths [B] of bags that start at `offsets`; the last one ends with the values."""
    return torch.diff(offsets, append=torch.ones_like(offsets[:1]) * values.shape[0])


def export_plain(model: PlainModel, source: DataSource, file: BinaryIO) -> None:
    """Exports a program for any batch size, which torch.export.load(file).module() runs without this package."""
    model, samples = model.eval().requires_grad_(False), 3
    count = len(model.table_of)
    values = [torch.zeros(2 * samples + number, dtype=torch.int64) for number in range(count)]
    offsets = [torch.arange(samples) * 2 for _ in range(count)]
    batch = torch.export.Dim("batch", min=2)
    ids = [{0: torch.export.Dim(f"ids_{number}", min=2)} for number in range(count)]
    inputs: list[Any] = [torch.zeros(samples, source.num_dense), values, offsets]
    shapes: list[Any] = [{0: batch}, ids, [{0: batch} for _ in range(count)]]
    if has_id_weights(source):
        inputs.append([torch.ones(len(of_feature)) for of_feature in values])
        shapes.append(ids)
    with torch.no_grad():
        program = torch.export.export(model, tuple(inputs), dynamic_shapes=tuple(shapes))
    torch.export.save(program, file)


def call_of(source: DataSource) -> dict[str, Any]:
    """Describes the program's arguments and results in order. Shapes: B is the batch size, N a feature's ids in it."""
    names = [table.name for table in source.tables]

    def one_a_feature(argument: str, size: str, dtype: str) -> dict[str, Any]:
        tensors = [{"name": name, "shape": [size], "dtype": dtype} for name in names]
        return {"name": argument, "list": tensors}

    labels = list(label_names_of(source))
    inputs: list[dict[str, Any]] = [
        {
            "name": "dense_BF",
            "shape": ["B", source.num_dense],
            "dtype": "float32",
            "columns": list(dense_names_of(source) or ()) or None,
        },
        one_a_feature("values", "N", "int64"),
        one_a_feature("offsets", "B", "int64"),
    ]
    if has_id_weights(source):
        inputs.append(one_a_feature("weights", "N", "float32"))
    shape = ["B", len(labels)] if len(labels) > 1 else ["B"]
    return {
        "inputs": inputs,
        "outputs": [{"name": "probabilities", "shape": shape, "dtype": "float32", "columns": labels}],
    }
