"""`dlrm-autoshard export RUN --to pt|numpy|torchrec`: a trained model, for programs that don't have this package.

pt        a program: torch.export.load(FILE).module()(dense_BF, values, offsets) gives probabilities
numpy     an .npz with every weight under its name
torchrec  a state dict whose tables have the names of TorchRec's EmbeddingBagCollection
Beside each a .json file says what goes in, and in which order (records/SCHEMA.md, model.json).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_autoshard.commands.arguments import check_out
from dlrm_autoshard.commands.evaluate import add_model
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.records.jsonl import SCHEMA

if TYPE_CHECKING:
    from torch import Tensor

    from dlrm_autoshard.train.checkpoints.saved_model import SavedModel

_ENDINGS = {"pt": ".pt2", "numpy": ".npz", "torchrec": ".pt"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("export", help="a trained model, for programs without this package")
    add_model(parser, device="cpu")
    parser.add_argument("--to", choices=list(_ENDINGS), default="pt", help="form of the file (default: pt)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/model with the form's ending")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import numpy as np
    import torch

    from dlrm_autoshard.train.checkpoints.saved_model import export_plain, saved_model

    out = arguments.out or (arguments.model / "model").with_suffix(_ENDINGS[arguments.to])
    if out.suffix == ".json":
        raise UserError(f"--out is '{out}'; the .json file beside the model has that name. Name another.")
    check_out(out)
    with saved_model(
        arguments.model, arguments.checkpoint, labelled=False, device=arguments.device or "cpu", whole=True
    ) as saved:
        if arguments.to == "pt":
            export_plain(saved, out)
        elif arguments.to == "numpy":
            with out.open("wb") as file:
                arrays: dict[str, Any] = {name: w.float().numpy() for name, w in weights(saved, "tables.").items()}
                np.savez(file, **arrays)
        else:
            torch.save(weights(saved, "embedding_bags."), out)
        inputs, step = inputs_of(saved), saved.position.step
    described = out.with_suffix(".json")
    described.write_text(json.dumps({"schema": SCHEMA, "model": out.name, "step": step, **inputs}, indent=1) + "\n")
    print(f"the model of step {step}: {out}; what goes in: {described}")
    return 0


def inputs_of(saved: SavedModel) -> dict[str, Any]:
    """What the model takes and gives, in order, and the settings of the data that it learned from."""
    from dlrm_autoshard.data.batch import has_id_weights, label_names_of

    tables = [
        {"name": t.name, "num_embeddings": t.num_embeddings, "embedding_dim": t.embedding_dim, "pooling": t.pooling}
        for t in saved.source.tables
    ]
    return {
        "num_dense": saved.source.num_dense,
        "tables": tables,
        "id_weights": has_id_weights(saved.source),
        "probabilities_of": list(label_names_of(saved.source)),
        "data": saved.config.data.model_dump(mode="json"),
    }


def weights(saved: SavedModel, tables: str) -> dict[str, Tensor]:
    """tables: what stands before a table's name. The dense part's names begin with `dense.`."""
    found = {
        f"{tables}{table.name}.weight": saved.embeddings.storage.tensors(table.name)["weight"].detach().cpu()
        for table in saved.embeddings.tables
    }
    return found | {f"dense.{name}": value.detach().cpu() for name, value in saved.dense.state_dict().items()}
