"""The plans of a run: a plan file for each, named by the step from which it was the live one.

write_plan(run_dir, step=300, plan=plan)
last_plan(run_dir)                          # runs/mine/plan/step_00000300.json
"""

from __future__ import annotations

from pathlib import Path

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.step_names import step_in, step_name
from dlrm_autoshard.formats.whole_file import write_whole
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.jsonl import lost_if_unwritable

TABLES = Path("plan") / "tables.json"
"""In a run: its tables and what the data did to them when the job started, in the form of the planning commands."""


def write_plan(run_dir: Path, step: int, plan: ShardingPlan) -> None:
    """Writes the plan that is live from `step` on."""
    path = run_dir / "plan" / f"{step_name(step)}.json"
    with lost_if_unwritable(path):
        write_whole(path, plan.as_text())


def last_plan(run: Path) -> Path:
    """The file of the plan that a run ended with, or is at."""
    found = (run / "plan").glob("step_*.json")
    plans = sorted((path for path in found if step_in(path.stem) is not None), key=lambda path: step_in(path.stem) or 0)
    if not plans:
        raise UserError(f"'{run}' is no run: it has no plan.")
    return plans[-1]
