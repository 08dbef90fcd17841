"""Trains a small DLRM from a dict: `python launch/examples/quickstart.py`, or by torchrun on several ranks."""

import os

from dlrm_autoshard import train

CONFIG = {
    "run": {"name": "quickstart", "device": "cpu"},
    "data": {
        "source": "synthetic",
        "train_samples": 20_000,
        "test_samples": 2_000,
        "tables": [
            {"name": "user", "num_embeddings": 5_000},
            {"name": "item", "num_embeddings": 1_000, "mean_pooling": 5.0},
        ],
    },
    "tables": {"embedding_dim": 16, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}},
    "train": {"batch_size": 256, "epochs": 2},
}

if __name__ == "__main__":
    result = train(CONFIG)
    again = train(CONFIG, "train.epochs=1", "model.interaction=cat")  # overrides, as on the command line
    if os.environ.get("RANK", "0") == "0":
        print(f"{result.steps} steps: auc {result.metrics['auc']:.3f}, see {result.run_dir}/report.html")
        print(f"{again.steps} steps: auc {again.metrics['auc']:.3f}, see {again.run_dir}/report.html")
