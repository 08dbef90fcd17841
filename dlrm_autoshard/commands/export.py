"""`dlrm-autoshard export RUN --to pt|numpy|torchrec`: writes a trained model for programs without this package.

pt        a program: torch.export.load(FILE).module()(dense_BF, values, offsets) returns probabilities
numpy     an .npz of every weight by name, written one table at a time
torchrec  a state dict with the table names of TorchRec's EmbeddingBagCollection
FILE.json beside it lists inputs or contents in order (records/SCHEMA.md, FILE.json).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import ZipFile

from dlrm_autoshard.commands.arguments import check_out
from dlrm_autoshard.commands.evaluate import add_model
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.launcher_numbers import launcher_number
from dlrm_autoshard.formats.progress import elapsing, tracked
from dlrm_autoshard.formats.whole_file import whole_file, write_whole
from dlrm_autoshard.records.jsonl import SCHEMA

if TYPE_CHECKING:
    from torch import Tensor

    from dlrm_autoshard.config import Config
    from dlrm_autoshard.data.batch import DataSource

_ENDINGS = {"pt": ".pt2", "numpy": ".npz", "torchrec": ".pt"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("export", help="write a trained model for programs without this package")
    add_model(parser)
    parser.add_argument("--to", choices=list(_ENDINGS), default="pt", help="format of the file (default: pt)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/model with the format's ending")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.training.run_directory import check_run

    out = arguments.out or (arguments.model / "model").with_suffix(_ENDINGS[arguments.to])
    if launcher_number("WORLD_SIZE", 1) > 1:
        raise UserError("export runs in one process: start it without torchrun.")
    check_run(arguments.model)
    check_out(out)
    with whole_file(out) as file:
        described = _written(arguments, file)
    description = out.with_name(f"{out.name}.json")
    write_whole(description, json.dumps({"schema": SCHEMA, "model": out.name, **described}, indent=1) + "\n")
    print(f"model of step {described['step']}: {out}; its inputs and outputs: {description}")
    return 0


def _written(arguments: argparse.Namespace, file: BinaryIO) -> dict[str, Any]:
    """Writes the model and returns its description."""
    import torch

    from dlrm_autoshard.data.features import Features
    from dlrm_autoshard.data.open import open_source
    from dlrm_autoshard.training.checkpoints.folder import CheckpointFolder
    from dlrm_autoshard.training.checkpoints.plain_model import PlainModel, call_of, export_plain
    from dlrm_autoshard.training.checkpoints.saved_model import config_of
    from dlrm_autoshard.training.checkpoints.saved_weights import SavedWeights
    from dlrm_autoshard.training.state import in_trained_order

    config = config_of(arguments.model, trust=arguments.trust)
    path = CheckpointFolder(arguments.model / "checkpoints").asked_for(arguments.checkpoint)
    source = open_source(config.data, config.tables, labelled=False, splits=())
    source, _ = in_trained_order(source, config.tables.shared, path)
    features = Features.of(source.tables, config.tables.shared, config.tables.sequences)
    weights = SavedWeights.open(path, features.tables)
    described: dict[str, Any]
    if arguments.to == "pt":
        model = PlainModel(weights, source, features, config.model)
        with elapsing("exporting the program"):
            export_plain(model, source, file)
        described = call_of(source)
    else:
        described = {"tensors": []}
        prefix = "tables." if arguments.to == "numpy" else "embedding_bags."
        shown = tracked(weights.tensors(prefix), len(weights), "tensors")
        tensors = _described(shown, described["tensors"])
        if arguments.to == "numpy":
            write_npz(file, tensors)
        else:
            torch.save(dict(tensors), file)
    return {"step": weights.step, **described, **inputs_of(config, source)}


def _described(tensors: Iterable[tuple[str, Tensor]], into: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors and appends each one's name, shape and dtype to `into`; holds none in memory."""
    for name, tensor in tensors:
        into.append({"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")})
        yield name, tensor
        del tensor


def write_npz(file: BinaryIO, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes an .npz like np.savez, one array in memory at a time; floats as float32, as numpy has no bfloat16."""
    from numpy.lib.format import write_array

    with ZipFile(file, "w") as archive:
        for name, tensor in tensors:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                write_array(entry, (tensor.float() if tensor.is_floating_point() else tensor).numpy())
            del tensor  # frees it before the next is read


def inputs_of(config: Config, source: DataSource) -> dict[str, Any]:
    """Describes the model's inputs and outputs in order, and the data settings it was trained with."""
    from dlrm_autoshard.data.batch import has_id_weights, label_names_of
    from dlrm_autoshard.data.features import shared_by

    table_of = shared_by([t.name for t in source.tables], config.tables.shared)
    tables = [
        {"name": t.name, "num_embeddings": t.num_embeddings, "embedding_dim": t.embedding_dim, "pooling": t.pooling}
        | ({"table": table_of[t.name]} if t.name in table_of else {})
        for t in source.tables
    ]
    return {
        "num_dense": source.num_dense,
        "tables": tables,
        "id_weights": has_id_weights(source),
        "probabilities_of": list(label_names_of(source)),
        "data": config.data.model_dump(mode="json"),
    }
