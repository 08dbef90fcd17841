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
"""In a run: its tables and what the data did to them when the job started, in the form of the planning commands."""

REPLICATED = Path("plan") / "replicated.json"
"""In a run: the tables of which every rank has a copy, which are in none of its plans."""


class ReplicatedRecord(TypedDict):
    """REPLICATED as JSON."""

    schema: Literal[1]
    tables: list[TableRecord]


def write_plan(run_dir: Path, step: int, plan: ShardingPlan) -> None:
    """Writes the plan that is live from `step` on."""
    path = run_dir / "plan" / f"{step_name(step)}.json"
    with lost_if_unwritable(path):
        write_whole(path, plan.as_text())


def write_replicated(run_dir: Path, tables: Sequence[TableConfig]) -> None:
    """Writes down, at a start, the tables that are on every rank and in no plan; no file where there are none."""
    path = run_dir / REPLICATED
    with lost_if_unwritable(path):
        if tables:
            write_whole(path, json.dumps({"schema": SCHEMA, "tables": [t.to_json() for t in tables]}, indent=1) + "\n")
        else:
            path.unlink(missing_ok=True)


def replicated_in(run: Path) -> tuple[TableConfig, ...]:
    """Returns the tables that were on every rank at the run's last start. FormatError names what is wrong."""
    if not (run / REPLICATED).exists():
        return ()
    record = read_json(run / REPLICATED, ReplicatedRecord, "record of replicated tables")
    return tuple(TableConfig.from_json(table) for table in record["tables"])


def last_plan(run: Path) -> Path:
    """The file of the plan that a run ended with, or is at."""
    found = (run / "plan").glob("step_*.json")
    plans = sorted((path for path in found if step_in(path.stem) is not None), key=lambda path: step_in(path.stem) or 0)
    if not plans:
        raise UserError(f"'{run}' is no run: it has no plan.")
    return plans[-1]
