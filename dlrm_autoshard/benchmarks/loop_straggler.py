"""A busy process takes half of one rank's core in epochs 3 to 6 of 9: what the loop recovers, and its way back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.loop_job import Job, fixed_plan, run_jobs, settings

TITLE = "half of one rank's core is taken in epochs 3 to 6 of 9: what is recovered, and the return afterwards"
ROUGH_TIME = "4 min"


def run(quick: bool) -> dict[str, Any]:
    steps, epochs, first, last = (24, 6, 2, 3) if quick else (60, 9, 3, 6)
    busy = tuple(range(first, last + 1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def job(epochs: int, **autoshard: Any) -> Any:
            return settings(folder, epochs=epochs, steps_per_epoch=steps, **autoshard)

        runs = run_jobs([Job("loop", job(epochs, enabled=True), busy)], folder)
        by_epoch = {record.epoch: record for record in runs["loop"].epochs}
        healthy_plan, busy_plan = by_epoch[0].plan, by_epoch[last].plan
        runs |= run_jobs(
            [
                Job("static", job(4, **fixed_plan(healthy_plan, folder)), (2, 3)),
                Job("known", job(2, **fixed_plan(busy_plan, folder)), (0, 1)),
            ],
            folder,
        )
    before, starved = runs["static"].throughput(0, 1), runs["static"].throughput(2, 3)
    known = max(runs["known"].throughput(0), runs["loop"].throughput(last, last))
    in_loop = runs["loop"].throughput(first + 1, last)
    since_start = runs["loop"].throughput(first, last)
    # A half-speed rank leaves 1.5 ranks' worth of computing: that much is lost whatever one does.
    unavoidable = before * 0.75
    reach = min(known, unavoidable) if known > starved else unavoidable
    return {
        "figures": {
            "healthy": before,
            "static": starved,
            "in_loop": in_loop,
            "in_loop_with_the_first_epoch": since_start,
            "best_known": known,
            "perfect_at_three_quarters": unavoidable,
            "recovered": (in_loop - starved) / (unavoidable - starved) if unavoidable > starved else None,
            "recovered_of_best_known": (in_loop - starved) / (reach - starved) if reach > starved else None,
            "after_it_ended": runs["loop"].throughput(epochs - 1) / before,
            "reshards": runs["loop"].moves,
        },
        "targets": {"recovered": ">= 0.6", "after_it_ended": ">= 0.95"},
        "notes": [
            "recovered: of what the static plan loses beyond the unavoidable quarter (in all stages, also the dense "
            "part's, which no placement moves), from the epoch after the one in which the loop first saw it.",
            *runs["loop"].texts,
        ],
    }
