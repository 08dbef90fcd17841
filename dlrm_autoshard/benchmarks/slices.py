"""Measures long benchmarks in slices: rows are kept as they are measured, and the same command continues after them.

rows = in_slices(Path("runs/planner-quality/rows.jsonl"), [("20x2", 0), ("20x4", 0)], measure)     # measure("20x2", 0)
rows[0]["of"], rows[0]["commit"]           # ["20x2", 0], and the commit at which that was measured
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.harness import STATE, UNKNOWN, commit, cpu_model
from dlrm_autoshard.records.jsonl import append_jsonl, read_jsonl

Key = tuple[str | int, ...]


def in_slices(
    kept: Path | None, wanted: Sequence[Key], measure: Callable[..., Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a row of each key, or, after an interrupt (SIGINT), of those measured until then. kept: the file of rows;
    None keeps nothing."""
    known = [] if kept is None else read_jsonl(kept)
    rows = [row for row in known if row["state"] == STATE and tuple(row["of"]) in wanted]
    done, on = {tuple(row["of"]) for row in rows}, machine()
    try:
        for key in (key for key in wanted if key not in done):
            with other_work() as beside:
                found = measure(*key)
            rows.append({"state": STATE, "of": list(key), "commit": commit(), **on, **found, **beside})
            if kept is not None:
                append_jsonl(kept, rows[-1])
            print(f"{', '.join(map(str, key))}: {len(rows)} of {len(wanted)}", flush=True)
    except KeyboardInterrupt:
        print(f"Stopped. What was measured lies in {kept or 'no file'}.", flush=True)
    return rows


def machine() -> dict[str, Any]:
    """Describes the machine of one start of a benchmark, before it measures: the load is other work's then."""
    return {"cpu": cpu_model(), "load_before": round(os.getloadavg()[0], 2)}


@contextmanager
def other_work() -> Iterator[dict[str, float]]:
    """Yields a dictionary that gets "load_beside" at the end: how many cores other work kept busy meanwhile.

    Other work is what neither this process nor its children did, on this machine or on others of its host ("steal").
    """
    found: dict[str, float] = {}
    busy, own, started = _busy_seconds(), _own_seconds(), time.perf_counter()
    yield found
    others = (_busy_seconds() - busy) - (_own_seconds() - own)
    found["load_beside"] = round(max(0.0, others) / max(1.0, time.perf_counter() - started), 2)


def _busy_seconds() -> float:
    import psutil

    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)  # guests are users', too


def _own_seconds() -> float:
    """Returns CPU seconds of this process and all that it started, ranks of the fork server included."""
    import psutil

    seconds, own = 0.0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])  # its own, and those of its children that have ended
    return seconds


def origins(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the commits, CPUs and highest load of all starts in which rows were measured, for `harness.finish`."""
    loads = [row.get("load_beside", row.get("load_before", 0.0)) for row in rows if "load_before" in row]
    highest = {"load_before": max(loads)} if loads else {}
    return {"measured_at": commits(rows), "cpus": sorted({row["cpu"] for row in rows if "cpu" in row}), **highest}


def commits(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the commits at which rows were measured."""
    return sorted({row["commit"] or UNKNOWN for row in rows if "commit" in row})
