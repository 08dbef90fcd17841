"""Long benchmarks in slices of a quiet machine: what was measured is kept, row by row; the same command goes on there.

rows = in_slices(Path("runs/planner-quality/rows.jsonl"), [("20x2", 0), ("20x4", 0)], measure)     # measure("20x2", 0)
rows[0]["of"], rows[0]["commit"]           # ["20x2", 0], at which that was measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.harness import STATE, UNKNOWN, commit
from dlrm_autoshard.records.jsonl import append_jsonl, read_jsonl

Key = tuple[str | int, ...]


def in_slices(
    kept: Path | None, wanted: Sequence[Key], measure: Callable[..., Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A row of each key, in any order; where it is interrupted (SIGINT), of those that were measured till then. kept:
    None keeps nothing."""
    known = [] if kept is None else read_jsonl(kept)
    rows = [row for row in known if row["state"] == STATE and tuple(row["of"]) in wanted]
    done = {tuple(row["of"]) for row in rows}
    try:
        for key in wanted:
            if key not in done:
                rows.append({"state": STATE, "of": list(key), "commit": commit(), **measure(*key)})
                if kept is not None:
                    append_jsonl(kept, rows[-1])
                print(f"{', '.join(map(str, key))}: {len(rows)} of {len(wanted)}", flush=True)
    except KeyboardInterrupt:
        print(f"Stopped. What was measured lies in {kept or 'no file'}.", flush=True)
    return rows


def commits(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """At which rows were measured."""
    return sorted({row["commit"] or UNKNOWN for row in rows if "commit" in row})
