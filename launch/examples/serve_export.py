"""Trains, exports, and predicts with plain torch, as a server would: `python launch/examples/serve_export.py`."""

import json
from pathlib import Path

import torch

from dlrm_autoshard import train
from dlrm_autoshard.commands.main import main as dlrm_autoshard

CONFIG = {
    "run": {"name": "served", "device": "cpu"},
    "data": {
        "source": "synthetic",
        "train_samples": 10_000,
        "test_samples": 1_000,
        "tables": [{"name": "user", "num_embeddings": 2_000}, {"name": "item", "num_embeddings": 500}],
    },
    "train": {"batch_size": 256},
}


def trained_and_exported() -> Path:
    run = train(CONFIG).run_dir
    status = dlrm_autoshard(["export", str(run), "--to", "pt", "--out", "served.pt2"])
    assert status == 0, "the command has said why"
    return Path("served.pt2")


def serve(file: Path) -> torch.Tensor:
    """Predicts with torch alone; a server needs only served.pt2 and served.pt2.json."""
    described = json.loads(file.with_name(f"{file.name}.json").read_text())
    print("what goes in:", ", ".join(described))
    program = torch.export.load(file).module()
    dense_BF = torch.randn(3, 13)
    users, items = torch.tensor([7, 8, 9]), torch.tensor([1, 2, 3, 4])  # the second sample has two items
    return program(dense_BF, [users, items], [torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])])


if __name__ == "__main__":
    print("probabilities:", serve(trained_and_exported()).tolist())
