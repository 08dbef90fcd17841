"""Trains on your own data source, arrays in one file: `python launch/examples/custom_source.py`."""

from pathlib import Path

import numpy as np
import torch

from dlrm_autoshard import Batch, TableRows, resolve_tables, train


class Clicks:
    """Arrays dense [S, F], ids [S, T] and label [S]; the last tenth is for testing."""

    parallel_reads = True  # several threads may read at once

    def __init__(self, tables, path):  # type: ignore[no-untyped-def]
        """tables: the YAML's section; path and further arguments: from data.options."""
        arrays = np.load(path)
        self.dense, self.ids, self.label = (torch.from_numpy(arrays[name]) for name in ("dense", "ids", "label"))
        self.num_dense, self.first_test = self.dense.shape[1], len(self.label) * 9 // 10
        rows = [TableRows(f"table_{i}", int(ids.max()) + 1) for i, ids in enumerate(self.ids.T)]
        self.tables = resolve_tables(rows, tables)

    def num_samples(self, split: str) -> int:
        return {"train": self.first_test, "test": len(self.label) - self.first_test}.get(split, 0)

    def read(self, split: str, epoch: int, first: int, last: int) -> Batch:
        offset = self.first_test if split == "test" else 0
        part = slice(offset + first, offset + last)
        ids = self.ids[part].T.int()  # all of table 0's ids, then table 1's; a bag may hold any number of them
        size = last - first
        return Batch(
            self.dense[part].float(), torch.ones_like(ids), ids.flatten(), self.label[part].float(), size, size
        )


def make_up(path: Path) -> None:
    draw = np.random.default_rng(0)
    ids, dense = draw.integers(200, size=(5_000, 3)), draw.normal(size=(5_000, 2))
    np.savez(path, ids=ids, dense=dense, label=ids[:, 0] + 50 * dense[:, 0] > 100)


if __name__ == "__main__":
    make_up(file := Path("clicks.npz"))
    data = {"source": "custom", "factory": f"{__file__}:Clicks", "options": {"path": str(file)}}
    result = train({"run": {"name": "clicks", "device": "cpu"}, "data": data}, "train.batch_size=128")
    print(f"auc {result.metrics['auc']:.3f}, see {result.run_dir}/report.html")
