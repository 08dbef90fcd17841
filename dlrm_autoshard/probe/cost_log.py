"""Measured costs kept between jobs on the same hardware: one JSON object a line, appended, never rewritten.

log = CostLog(Path(cache_dir), hardware_fingerprint())
log.append(samples)                  # ShardSamples, CommsSamples
log.read()                           # what this and earlier jobs measured on such hardware
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import FormatError, checked, parse_json, read_bytes
from dlrm_autoshard.formats.numbers import Amount, BatchSize
from dlrm_autoshard.planner.costs.replay import CommsSample, ShardSample
from dlrm_autoshard.tables import StatsRecord, TableConfig, TableRecord, TableStats

SCHEMA = 1


class CostLog:
    """Each fingerprint has its own file, so that another machine's costs are never taken for this one's. Tables are
    written once, named by their content, and shards refer to them. Lines are appended whole. What cannot be read or
    written costs a job no more than the measurements that it holds: it is left out, and named in `left_out`.
    """

    def __init__(self, cache_dir: Path, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = dict(fingerprint)
        self.path = cache_dir / f"costs-{digest(self.fingerprint)}.jsonl"
        self.left_out: list[str] = []
        self._written: set[str] = set()  # tables that the file has

    def read(self) -> list[ShardSample | CommsSample]:
        """All samples, oldest first; none where there is no file yet."""
        tables: dict[str, tuple[TableConfig, TableStats]] = {}
        samples: list[ShardSample | CommsSample] = []
        self.left_out = []
        try:
            lines = read_bytes(self.path, "cost log").split(b"\n")
        except FormatError as error:
            lines = []
            if not isinstance(error.__cause__, FileNotFoundError):
                self.left_out.append(f"'{self.path}' {error}")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                sample = _read_line(parse_json(line), tables)
            except UserError as error:
                self.left_out.append(f"'{self.path}', line {number}: {error}")
                continue
            if sample is not None:
                samples.append(sample)
        self._written = set(tables)
        return samples

    def append(self, samples: Sequence[ShardSample | CommsSample]) -> None:
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
            rows.append({key: value for key, value in shard.items() if key != "stats"})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                rows.insert(0, {"kind": "machine", "schema": SCHEMA, "fingerprint": self.fingerprint})
            # One write of whole lines: jobs that append at the same time do not cut into each other's. The newline in
            # front ends a line that a killed job left open.
            with self.path.open("a") as file:
                file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            self.left_out.append(f"'{self.path}' cannot be written: {error.strerror}")


class TableLine(TypedDict):
    """A measured table, as a line of the log."""

    id: str
    table: TableRecord
    stats: StatsRecord


class ShardLine(TypedDict):
    """tables: the ids of lines before."""

    tables: list[str]
    batch_size: BatchSize
    fwd_compute_ms: Amount
    bwd_compute_ms: Amount
    noise: Amount


def _read_line(row: Any, tables: dict[str, tuple[TableConfig, TableStats]]) -> ShardSample | CommsSample | None:
    """A line's sample; a line about a table is added to `tables`."""
    row = checked(dict[str, Any], row)
    kind = row.pop("kind", None)
    if kind == "table":
        line = checked(TableLine, row)
        tables[line["id"]] = TableConfig.from_json(line["table"]), TableStats.from_json(line["stats"])
    elif kind == "shard":
        shard: dict[str, Any] = {**checked(ShardLine, row)}
        unknown = next((name for name in shard["tables"] if name not in tables), None)
        if unknown is not None:
            raise FormatError(f"its table '{unknown}' is not described before it.")
        members = [tables[name] for name in shard["tables"]]
        pair = {"tables": tuple(table for table, _ in members), "stats": tuple(stats for _, stats in members)}
        return ShardSample(**shard | pair)
    elif kind == "exchange":
        return CommsSample.from_json(row)
    elif kind != "machine":
        raise FormatError("'kind' must be machine, table, shard or exchange.")
    return None


def digest(record: Any) -> str:
    """Short name of a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:12]
