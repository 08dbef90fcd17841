"""Reads the costs that the package ships: shards measured on CPUs and a GPU, exchanges on CPUs; any planner's start.

samples = read_samples(SHIPPED / "amd_epyc.npz")         # ShardSamples and CommsSamples
start_warm(planner, hardware_fingerprint())              # names their machine in `planner.costs.costs_from`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.planner.costs.features import WORK
from dlrm_autoshard.planner.costs.replay import CommsSample, ShardSample
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.tables import TableConfig, TableOptimizer, TableStats

# `<machine>.npz`: the measurements (made by `python -m dlrm_autoshard.probe.collect`). `<machine>.json`: hardware,
# command, and the cost model fitted to them, so that a warm start needs no fitting. On other hardware they give
# proportions, which are better than nothing, and `costs_from` says so.

SHIPPED = Path(__file__).parent / "shipped"


def write_samples(path: Path, shards: Sequence[ShardSample], comms: Sequence[CommsSample]) -> None:
    """Writes samples; each table once, shards as runs of table numbers."""
    number: dict[tuple[TableConfig, TableStats], int] = {}
    members = [
        [number.setdefault(pair, len(number)) for pair in zip(shard.tables, shard.stats, strict=True)]
        for shard in shards
    ]
    tables, stats = zip(*number, strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        table_names=np.array([table.name for table in tables]),
        rows=np.array([table.num_embeddings for table in tables]),
        dims=np.array([table.embedding_dim for table in tables], dtype=np.int16),
        fp16=np.array([table.dtype == "fp16" for table in tables]),
        mean_pooling=np.array([stat.mean_pooling for stat in stats]),
        mean_reuse=np.array([stat.mean_reuse for stat in stats]),
        reuse_histogram=np.array([stat.reuse_histogram for stat in stats], dtype=np.float32),
        stats_batch_size=np.array([stat.batch_size for stat in stats], dtype=np.int32),
        members=np.concatenate([np.array(row, dtype=np.int32) for row in members]),
        shard_sizes=np.array([len(row) for row in members], dtype=np.int16),
        batch_size=np.array([shard.batch_size for shard in shards], dtype=np.int32),
        fwd_compute_ms=np.array([shard.fwd_compute_ms for shard in shards], dtype=np.float32),
        bwd_compute_ms=np.array([shard.bwd_compute_ms for shard in shards], dtype=np.float32),
        noise=np.array([shard.noise for shard in shards], dtype=np.float32),
        comms=np.array(json.dumps([sample.to_json() for sample in comms])),
    )


def read_samples(path: Path) -> list[ShardSample | CommsSample]:
    """Reads a shipped file of samples."""
    with np.load(path) as data:
        column = {name: data[name] for name in data.files}
    tables = [
        TableConfig(str(name), int(rows), int(dim), dtype="fp16" if fp16 else "fp32")
        for name, rows, dim, fp16 in zip(
            column["table_names"], column["rows"], column["dims"], column["fp16"], strict=True
        )
    ]
    stats = [
        TableStats(float(pooling), tuple(histogram), float(reuse), int(batch))
        for pooling, histogram, reuse, batch in zip(
            column["mean_pooling"],
            column["reuse_histogram"].astype(np.float64).tolist(),
            column["mean_reuse"],
            column["stats_batch_size"],
            strict=True,
        )
    ]
    ends = np.cumsum(column["shard_sizes"], dtype=np.int64)
    shards = [
        ShardSample(
            tables=tuple(tables[i] for i in column["members"][end - size : end]),
            stats=tuple(stats[i] for i in column["members"][end - size : end]),
            batch_size=int(column["batch_size"][index]),
            fwd_compute_ms=float(column["fwd_compute_ms"][index]),
            bwd_compute_ms=float(column["bwd_compute_ms"][index]),
            noise=float(column["noise"][index]),
        )
        for index, (end, size) in enumerate(zip(ends, column["shard_sizes"].astype(np.int64), strict=True))
    ]
    return [*shards, *(CommsSample.from_json(sample) for sample in json.loads(str(column["comms"])))]


UPDATE_NS: Mapping[TableOptimizer, float] = {"sgd": 0.07, "adagrad": 1.1}
"""Nanoseconds per byte of distinct rows that the fused backward takes on CPU, more than with row-wise Adagrad, with
which the shipped shards were measured. Fitted to 131 sets of tables of dims 4 to 128 on an AMD EPYC, half of them
single tables: 16 and 19% error remain, one factor for all would leave 16 and 58%. On GPUs, where it was not measured,
updates are taken to cost the same."""


def start_warm(
    planner: Planner, fingerprint: Mapping[str, Any] | None, optimizer: TableOptimizer = "rowwise_adagrad"
) -> None:
    """Gives the planner the shipped costs of the most similar machine, for tables with that optimizer.

    fingerprint: this machine's, to tell whether the costs are its own; None if unknown.
    """
    record = most_alike(fingerprint or {})
    planner.costs.cost_model.load_json(record["cost_model"])
    planner.costs.exchange.load_prices(record["comms"])
    if (fingerprint or {}).get("device", "cpu") == "cpu":
        planner.costs.cost_model.prices_PS[WORK.index("distinct_bytes"), 1] += UPDATE_NS.get(optimizer, 0.0)
    machine = record["fingerprint"]
    own = dict(fingerprint or {}) == machine
    planner.costs.costs_from = f"{record['shards']:,} shipped measurements on " + (
        "hardware like this one"
        if own
        else f"other hardware ({machine['processor']}, fbgemm {machine['fbgemm']}): proportions, not this machine's ms"
    )
    if not record["exchanges"]:
        planner.costs.costs_from += "; exchanges by a data sheet"


def most_alike(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the shipped record with most fingerprint entries in common, of the same device type if there is one; the
    first of equals."""
    records = [json.loads(path.read_text()) for path in sorted(SHIPPED.glob("*.json"))]

    def alike(record: dict[str, Any]) -> tuple[bool, int]:
        machine = record["fingerprint"]
        same = sum(fingerprint.get(key) == value for key, value in machine.items())
        return fingerprint.get("device", "cpu") == machine["device"], same

    return max(records, key=alike)
