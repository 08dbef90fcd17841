"""The plans of a run: a plan file for each, named by the step from which it was the live one.

write_plan(run_dir, step=300, plan=plan)
last_plan(run_dir)                          # runs/mine/plan/step_00000300.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import read_json
from dlrm_autoshard.formats.step_names import step_in, step_name
from dlrm_autoshard.formats.whole_file import write_whole
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.jsonl import SCHEMA, lost_if_unwritable
from dlrm_autoshard.tables import TableConfig, TableRecord

TABLES = Path("plan") / "tables.json"
"""A run's tables with their statistics at the start, in the format that the planning commands read."""

REPLICATED = Path("plan") / "replicated.json"
"""A run's replicated tables, which no plan lists."""


class ReplicatedRecord(TypedDict):
    """REPLICATED as JSON."""

    schema: Literal[1]
    tables: list[TableRecord]


def write_plan(run_dir: Path, step: int, plan: ShardingPlan) -> None:
    """Writes the plan in use from `step` on."""
    path = run_dir / "plan" / f"{step_name(step)}.json"
    with lost_if_unwritable(path):
        write_whole(path, plan.as_text())


def write_replicated(run_dir: Path, tables: Sequence[TableConfig]) -> None:
    """Writes the list of replicated tables; no file if there are none."""
    path = run_dir / REPLICATED
    with lost_if_unwritable(path):
        if tables:
            write_whole(path, json.dumps({"schema": SCHEMA, "tables": [t.to_json() for t in tables]}, indent=1) + "\n")
        else:
            path.unlink(missing_ok=True)


def replicated_in(run: Path) -> tuple[TableConfig, ...]:
    """Returns the tables replicated since the run's last start. Raises FormatError."""
    if not (run / REPLICATED).exists():
        return ()
    record = read_json(run / REPLICATED, ReplicatedRecord, "record of replicated tables")
    return tuple(TableConfig.from_json(table) for table in record["tables"])


def last_plan(run: Path) -> Path:
    """Returns the path of a run's latest plan."""
    found = (run / "plan").glob("step_*.json")
    plans = sorted((path for path in found if step_in(path.stem) is not None), key=lambda path: step_in(path.stem) or 0)
    if not plans:
        raise UserError(f"'{run}' is not a run directory: it has no plan.")
    return plans[-1]
