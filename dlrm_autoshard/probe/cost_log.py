"""Keeps measured costs between jobs on the same hardware: JSON lines, appended, never rewritten.

log = CostLog(Path(cache_dir), hardware_fingerprint())
log.append(samples)                  # ShardSamples and CommsSamples
log.read()                           # those of this and earlier jobs on such hardware
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
    """A file of samples per hardware fingerprint, so that one machine's costs never serve another's.

    Each table is written once, under a digest of its content, and shards refer to it. Lines that cannot be read or
    written are skipped and named in `left_out`; a job never fails for them.
    """

    def __init__(self, cache_dir: Path, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = dict(fingerprint)
        self.path = cache_dir / f"costs-{digest(self.fingerprint)}.jsonl"
        self.left_out: list[str] = []
        self._written: set[str] = set()  # digests of tables in the file

    def read(self) -> list[ShardSample | CommsSample]:
        """Returns all samples, oldest first; none if there is no file yet."""
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
            # One write of whole lines, so that jobs appending at once do not mix theirs. The newline in front ends a
            # line that a killed job left unfinished.
            with self.path.open("a") as file:
                file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            self.left_out.append(f"'{self.path}' cannot be written: {error.strerror}")


class TableLine(TypedDict):
    """A line about a measured table."""

    id: str
    table: TableRecord
    stats: StatsRecord


class ShardLine(TypedDict):
    """A line about a measured shard. tables: ids of earlier lines."""

    tables: list[str]
    batch_size: BatchSize
    fwd_compute_ms: Amount
    bwd_compute_ms: Amount
    noise: Amount


def _read_line(row: Any, tables: dict[str, tuple[TableConfig, TableStats]]) -> ShardSample | CommsSample | None:
    """Returns a line's sample; adds a table's line to `tables` and returns None."""
    row = checked(dict[str, Any], row)
    kind = row.pop("kind", None)
    if kind == "table":
        line = checked(TableLine, row)
        tables[line["id"]] = TableConfig.from_json(line["table"]), TableStats.from_json(line["stats"])
    elif kind == "shard":
        shard: dict[str, Any] = {**checked(ShardLine, row)}
        unknown = next((name for name in shard["tables"] if name not in tables), None)
        if unknown is not None:
            raise FormatError(f"its table '{unknown}' is not described by an earlier line.")
        members = [tables[name] for name in shard["tables"]]
        pair = {"tables": tuple(table for table, _ in members), "stats": tuple(stats for _, stats in members)}
        return ShardSample(**shard | pair)
    elif kind == "exchange":
        return CommsSample.from_json(row)
    elif kind != "machine":
        raise FormatError("'kind' must be machine, table, shard or exchange.")
    return None


def digest(record: Any) -> str:
    """Returns a short hash of a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:12]
