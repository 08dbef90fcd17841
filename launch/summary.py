"""Prints the quickstart's summary: metrics, speed, where the tables are, what autoshard did.

python launch/summary.py runs/latest
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.jsonl import ReportError
from dlrm_autoshard.records.plans import last_plan
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.verdict import autoshard_in_one_line


def summarize(run_dir: Path) -> str:
    record = RunRecord.load(run_dir)
    final = record.final_metrics()
    if final is None:
        raise ReportError(f"'{run_dir}' is not a finished run: it was never evaluated.")
    plan = ShardingPlan.load(last_plan(run_dir))
    split, metrics = final
    speeds = [line["throughput"] for line in record.metrics_of("train") if "throughput" in line]
    lines = [f"Done. Run directory: {run_dir}"]
    if metrics.get("auc") is not None:
        lines.append(f"  {split} AUC".ljust(14) + f"{metrics['auc']:.4f} (logloss {metrics['logloss']:.4f})")
    if speeds:
        lines.append(f"  throughput  {speeds[-1]:,.0f} examples/s over {plan.world_size} ranks")
    for rank in range(plan.world_size):
        label = "placement" if rank == 0 else ""
        lines.append(f"  {label:<10}  rank {rank}: {', '.join(plan.shards_on(rank)) or 'no tables'}")
    if record.decisions:
        lines.append(f"  autoshard   {autoshard_in_one_line(record)}")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(summarize(Path(sys.argv[1]).resolve()))
    except UserError as error:
        sys.exit(str(error))
