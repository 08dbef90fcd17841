"""The scenarios of races: what tables a job has, and how its data, its machine or its memory change under way.

world = World("abrupt", seed=3)                 # draws tables and the time of change from the seed
world.draw_data(folder)                         # a file of batches for each phase of the data, shared by all arms
world.config(folder, {"enabled": True})         # a job on them: `data.source: custom`, Replayed below
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dlrm_autoshard.benchmarks.workloads import drawn
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import Drift
from dlrm_autoshard.data.batch import Batch, Split
from dlrm_autoshard.tables import TableConfig, TableStats, memory_bytes

WorldName = Literal["calm", "abrupt", "gradual", "hot-ids", "straggler", "tight"]
WORLDS: tuple[WorldName, ...] = ("calm", "abrupt", "gradual", "hot-ids", "straggler", "tight")
RANKS, ALPHA, NUM_DENSE = 2, 1.05, 13


@dataclass(frozen=True)
class Scale:
    """gib: of all tables with their optimizer's state. distinct: batches drawn of each phase, then gone over again.
    checkpoints: at our default, of all jobs; TorchRec's in torch's format."""

    tables: int = 60
    gib: float = 4.0
    batch: int = 1024
    epochs: int = 8
    steps: int = 400
    distinct: int = 32
    checkpoints: bool = True


QUICK = Scale(tables=12, gib=0.05, batch=256, epochs=4, steps=50, distinct=4)


@dataclass(frozen=True)
class World:
    name: WorldName
    seed: int
    scale: Scale = Scale()

    @cached_property
    def _draw(self) -> dict[str, Any]:
        generator = np.random.default_rng([WORLDS.index(self.name), self.seed])
        count, epochs = self.scale.tables, self.scale.epochs
        dims = generator.choice([16, 32, 64, 128], size=count)
        rows = np.exp(generator.uniform(math.log(1e3), math.log(4e6), size=count))
        rows = (rows * min(1.0, self.scale.gib * 2**30 / float((rows * (4 * dims + 4)).sum()))).clip(1e3)
        return {
            "dims": dims,
            "rows": rows.astype(int),
            "pooling": generator.permutation(np.geomspace(1, 100, count)),
            "other": generator.permutation(count),
            "change": int(generator.integers(max(1, epochs // 4), epochs // 2 + 1)),
            "busy": max(1, round(epochs / 3)),
        }

    @property
    def changes(self) -> list[int]:
        """Epochs from which the data or the machine are others."""
        change = self._draw["change"]
        if self.name == "gradual":
            return list(range(1, self.scale.epochs))
        if self.name == "straggler":
            return [change, change + self._draw["busy"]]
        return [change] if self.name in ("abrupt", "hot-ids") else []

    @property
    def busy_epochs(self) -> range:
        return range(*self.changes) if self.name == "straggler" else range(0)

    @property
    def phases(self) -> int:
        return 1 if self.name == "straggler" else 1 + len(self.changes)

    def phase_of(self, epoch: int) -> int:
        return 0 if self.name == "straggler" else sum(change <= epoch for change in self.changes)

    def pooling(self, phase: int) -> np.ndarray:
        before: np.ndarray = self._draw["pooling"]
        if self.name == "abrupt" and phase:
            return before[self._draw["other"]]
        if self.name == "gradual":  # in the end half way, by logarithm, to a permutation of them
            after, part = before[self._draw["other"]], 0.5 * phase / max(1, self.phases - 1)
            return np.exp((1 - part) * np.log(before) + part * np.log(after))
        return before

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        shapes = zip(self._draw["rows"], self._draw["dims"], strict=True)
        return tuple(TableConfig(f"t{i}", int(rows), int(dim)) for i, (rows, dim) in enumerate(shapes))

    @property
    def global_batch(self) -> int:
        return self.scale.batch * RANKS

    @property
    def total_steps(self) -> int:
        return self.scale.epochs * self.scale.steps

    @property
    def memory_gib(self) -> float | None:
        """A fiftieth more than the fuller rank needs where tables are placed largest first: few plans meet it."""
        if self.name != "tight":
            return None
        stats = [TableStats(float(pooling)) for pooling in self.pooling(0)]
        needed = memory_bytes(self.tables, stats, "rowwise_adagrad", self.global_batch)
        loads = [0] * RANKS
        for size in sorted(needed.values(), reverse=True):
            loads[loads.index(min(loads))] += size
        return round(1.02 * max(loads) / 2**30, 4)

    def draw_data(self, folder: Path) -> None:
        samples = self.scale.distinct * self.global_batch
        for phase in range(self.phases):
            target = folder / f"phase_{phase}"
            if (target / "labels.npy").exists():
                continue
            target.mkdir(parents=True, exist_ok=True)
            moved = self.name == "hot-ids" and phase > 0
            source = drawn(
                self.tables,
                self.pooling(phase),
                ALPHA,
                num_dense=NUM_DENSE,
                val_samples=samples,  # the same draws in each epoch, but for the hot rows
                seed=self.seed,
                drift=[Drift(epoch=1, permute_pooling=False)] if moved else [],
            )
            batch = source.read("val", int(moved), 0, samples)
            for name in ("dense_BF", "lengths_TB", "values_N"):
                np.save(target / f"{name}.npy", getattr(batch, name).numpy())
            np.save(target / "labels.npy", batch.labels_B.numpy())

    def config(self, data: Path, autoshard: dict[str, Any], first_phase: int = 0) -> Any:
        """As people would write it: profiling and checkpoints at their defaults. first_phase: of the data that the job
        begins with, to plan for later ones."""
        phases = [min(self.phases - 1, first_phase + self.phase_of(epoch)) for epoch in range(self.scale.epochs)]
        shapes = [[t.name, t.num_embeddings, t.embedding_dim] for t in self.tables]
        samples = self.scale.steps * self.global_batch
        limits = {} if self.memory_gib is None else {"memory_gib": self.memory_gib}
        return {
            "run": {"device": "cpu", "seed": self.seed},
            "data": {
                "source": "custom",
                "factory": "dlrm_autoshard.benchmarks.race_worlds:Replayed",
                "options": {"folder": str(data), "tables": shapes, "phases": phases, "samples": samples},
            },
            "tables": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.02}},
            "model": {
                "dense_arch_layer_sizes": [64],
                "over_arch_layer_sizes": [64, 1],
                "interaction": "cat",
            },
            "train": {
                "batch_size": self.scale.batch,
                "epochs": self.scale.epochs,
                "log_every_steps": 10,
                "max_steps": self.total_steps,
            },
            "checkpoint": {"enabled": self.scale.checkpoints},
            "autoshard": limits | autoshard,
        }


class Replayed:
    """The source of a job's samples: each epoch's phase, its few batches over and over.

    Batches were drawn once by SyntheticSource and are read from mapped files through the trainer's loader, so that arms
    are not held up by drawing ids.
    """

    def __init__(
        self, tables_config: TablesConfig, folder: str, tables: list[list[Any]], phases: list[int], samples: int
    ) -> None:
        self.tables = tuple(TableConfig(name, rows, dim) for name, rows, dim in tables)
        self.num_dense = NUM_DENSE
        self._folder, self._phases, self._samples = Path(folder), phases, samples
        self._phase = cache(self._load)

    def _load(self, phase: int) -> tuple[np.ndarray, ...]:
        at = self._folder / f"phase_{phase}"
        dense, lengths, values, labels = (
            np.load(at / f"{name}.npy", mmap_mode="r") for name in ("dense_BF", "lengths_TB", "values_N", "labels")
        )
        ends = np.concatenate([[0], lengths.ravel().cumsum(dtype=np.int64)])
        return dense, lengths, values, labels, ends

    def num_samples(self, split: Split) -> int:
        return self._samples if split == "train" else 0

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        dense, lengths, values, labels, ends = self._phase(self._phases[min(epoch, len(self._phases) - 1)])
        size, drawn = last - first, len(labels)
        at = first % drawn
        if at + size > drawn:  # slices are of whole batches, but statistics may ask for less regular ones
            at = 0
        starts = np.arange(len(self.tables)) * drawn + at
        ids = [values[ends[start] : ends[start + size]] for start in starts]
        return Batch(
            torch.from_numpy(dense[at : at + size].copy()),
            torch.from_numpy(lengths[:, at : at + size].copy()),
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(labels[at : at + size].copy()),
            size,
            size,
        )
