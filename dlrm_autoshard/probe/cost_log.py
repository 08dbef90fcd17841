"""Measured costs kept between jobs on the same hardware: one JSON object a line, appended, never rewritten.

    log = CostLog(Path(cache_dir), hardware_fingerprint())
    log.append(samples)                  # ShardSamples and CommsSamples
    log.read()                           # what this and earlier jobs measured on such hardware

Each fingerprint has its own file, so that another machine's costs are never taken for this one's. Tables are written
once, named by their content, and shards refer to them. Lines are appended whole; a line that a killed job left
unfinished is skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_autoshard.planner.replay import CommsSample, ShardSample
from dlrm_autoshard.tables import TableConfig, TableStats

SCHEMA = 1


class CostLog:
    def __init__(self, cache_dir: Path, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = dict(fingerprint)
        self.path = cache_dir / f"costs-{digest(self.fingerprint)}.jsonl"
        self._written: set[str] = set()  # tables that the file has

    def read(self) -> list[ShardSample | CommsSample]:
        """All samples, oldest first; none where there is no file yet."""
        tables: dict[str, tuple[TableConfig, TableStats]] = {}
        samples: list[ShardSample | CommsSample] = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["kind"] == "table":
                tables[row["id"]] = (TableConfig(**row["table"]), TableStats.from_json(row["stats"]))
            elif row["kind"] == "shard" and all(table in tables for table in row["tables"]):
                members = [tables[table] for table in row.pop("tables")]
                samples.append(
                    ShardSample(
                        tuple(table for table, _ in members),
                        tuple(stats for _, stats in members),
                        row["batch_size"],
                        row["fwd_compute_ms"],
                        row["bwd_compute_ms"],
                        row["noise"],
                    )
                )
            elif row["kind"] == "exchange":
                samples.append(CommsSample.from_json({key: value for key, value in row.items() if key != "kind"}))
        self._written = set(tables)
        return samples

    def append(self, samples: Sequence[ShardSample | CommsSample]) -> None:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write([{"kind": "machine", "schema": SCHEMA, "fingerprint": self.fingerprint}])
        rows: list[dict[str, Any]] = []
        for sample in samples:
            if isinstance(sample, CommsSample):
                rows.append({"kind": "exchange", **sample.to_json()})
                continue
            members = []
            for table, stats in zip(sample.tables, sample.stats, strict=True):
                record = {"table": table.to_json(), "stats": stats.to_json()}
                name = digest(record)
                if name not in self._written:
                    rows.append({"kind": "table", "id": name, **record})
                    self._written.add(name)
                members.append(name)
            shard = sample.to_json() | {"tables": members, "kind": "shard"}
            rows.append({key: value for key, value in shard.items() if key not in ("stats", "rank")})
        self._write(rows)

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        # One write of whole lines: jobs that append at the same time do not cut into each other's. The newline in
        # front ends a line that a killed job left open.
        with self.path.open("a") as file:
            file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))


def digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:12]
