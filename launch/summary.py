"""The quickstart's last words: how good, how fast, where the tables are, what the loop did, what to try next.

python launch/summary.py runs/latest
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.report.jsonl import ReportError, read_jsonl


def summarize(run_dir: Path) -> str:
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    plans = sorted((run_dir / "plan").glob("step_*.json"))
    if not metrics or not plans:
        raise ReportError(f"'{run_dir}' is no finished run: it has no metrics or no plan.")
    plan = ShardingPlan.load(plans[-1])
    lines = [f"Done. Run directory: {run_dir}"]
    test = _last(metrics, "auc", split="test")
    if test:
        lines.append(f"  test AUC    {test['auc']:.4f} (logloss {test['logloss']:.4f})")
    speed = _last(metrics, "throughput", split="train")
    if speed:
        lines.append(f"  throughput  {speed['throughput']:,.0f} examples/s over {plan.world_size} ranks")
    for rank in range(plan.world_size):
        label = "placement" if rank == 0 else ""
        lines.append(f"  {label:<10}  rank {rank}: {', '.join(plan.tables_on(rank)) or 'no tables'}")
    lines.append(f"  the loop    {describe_loop(read_jsonl(run_dir / 'decisions.jsonl'))}")
    return "\n".join(lines)


def describe_loop(decisions: list[dict[str, Any]]) -> str:
    """One line: how often tables moved, and the last decision in its own words."""
    if not decisions:
        return "took no decision (autoshard.enabled is off, or the run was too short)"
    counts = {action: sum(d.get("action") == action for d in decisions) for action in ("kept", "moved", "rolled_back")}
    happened = ", ".join(f"{action.replace('_', ' ')} {count}x" for action, count in counts.items() if count)
    return f"{happened}; last: {decisions[-1].get('text', '')}"


def _last(metrics: list[dict[str, Any]], name: str, split: str) -> Mapping[str, Any] | None:
    found = [line for line in metrics if line.get("split") == split and line.get(name) is not None]
    return found[-1] if found else None


if __name__ == "__main__":
    try:
        print(summarize(Path(sys.argv[1]).resolve()))
    except ValueError as error:
        sys.exit(str(error))
