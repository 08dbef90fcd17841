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
    loop, static = runs["loop"], runs["static"]
    # Each job beside its own healthy epochs: a machine that is faster an hour later then tells nothing.
    stays = static.throughput(2, 3) / static.throughput(0, 1)
    healthy = loop.throughput(1, first - 1)
    keeps = loop.throughput(first + 1, last) / healthy
    unavoidable = 0.75  # a rank of half the speed leaves 1.5 of 2 ranks' computing, whatever one does
    return {
        "figures": {
            "healthy": healthy,
            "static": stays * healthy,
            "in_loop": keeps * healthy,
            "best_known": max(unavoidable, keeps) * healthy,
            "static_of_healthy": stays,
            "in_loop_of_healthy": keeps,
            "measured_with_the_loops_plan": runs["known"].throughput(0),
            "recovered": (keeps - stays) / (unavoidable - stays) if unavoidable > stays else None,
            "after_it_ended": loop.throughput(epochs - 1) / healthy,
            "reshards": loop.moves,
        },
        "targets": {"recovered": ">= 0.6", "after_it_ended": ">= 0.95"},
        "notes": [
            "recovered: of what the static plan loses beyond the unavoidable quarter (in all stages, also the dense "
            "part's, which no placement moves), from the epoch after the one in which the loop first saw it.",
            "static is given at the loop job's speed: static_of_healthy x healthy. best_known: perfect balance.",
            *loop.texts,
        ],
    }
