"""How long the planner trains with the reference's budget, beside DreamShard to the letter.

That budget is 10 iterations of 10 placements, 300 cost updates (ours: 50) and 10 policy updates of 10 episodes. Costs
are simulated, so that only the planner's own CPU seconds count. Seconds differ twofold between machines, so they are
compared with a small loop that the reference was timed beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.paired import median_with_interval, paired_ratio
from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.simulator import SimulatedCluster

TITLE = "fitting DreamShard, simulated costs: ours with a sixth of the published code's cost updates, and with as many"
ROUGH_TIME = "1 min"
BATCH, DEVICES = 4096, 4
REFERENCE_LOOPS = {50: 110.0, 100: 222.0}
"""CPU time of the published code's default training (github.com/daochenzha/dreamshard, 4 devices, a stand-in for its
GPU measurements that takes no time, torch 2.13, one thread) over that of `calibration_loop`, run interleaved with
it."""


def run(quick: bool) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(quick)
    finally:
        torch.set_num_threads(threads)


def _run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for tables in (50,) if quick else (50, 100):
        task, what = _task(tables), f"{tables}_tables"
        for name, reference, target in (("dreamshard", False, ">= 20"), ("reference", True, None)):
            cpu, loops = [], []
            for repeat in range(3 if quick else 8):
                # The first repeat warms up allocator and caches and is not counted.
                loop = calibration_loop()
                own = _train(task, reference)
                if repeat:
                    cpu.append(own)
                    loops.append(0.5 * (loop + calibration_loop()))
            found.put(f"{name}_cpu_seconds_{what}", median_with_interval(cpu))
            reference_cpu = [REFERENCE_LOOPS[tables] * loop for loop in loops]
            found.put(f"{name}_times_quicker_{what}", paired_ratio(reference_cpu, cpu), target)
    found.notes = [
        "All costs are simulated.",
        "times_quicker: than the published code's default training, by CPU time, each in units of a loop timed "
        "beside it.",
    ]
    return vars(found)


def calibration_loop() -> float:
    """CPU seconds of small torch operations as both trainings are made of: 300 updates of a table network, each table's
    vector summed with those of its set."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table, head = _mlp(21, 128, 32), _mlp(32, 64, 1)
    optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()], lr=5e-4)
    feature_TF, ms_N = torch.rand(64 * 12, 21, generator=generator), torch.rand(64, generator=generator)
    set_T = torch.arange(64).repeat_interleave(12)
    begun = time.process_time()
    for _ in range(300):
        optimizer.zero_grad()
        summed_NL = torch.zeros(64, 32).index_add(0, set_T, table(feature_TF))
        torch.nn.functional.mse_loss(head(summed_NL).squeeze(1), ms_N).backward()
        optimizer.step()
    return time.process_time() - begun


def _mlp(first: int, hidden: int, last: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(first, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, last))


def _task(tables: int) -> PlacementTask:
    pool = synthetic_pool(tables, seed=tables, batch_size=BATCH)
    return PlacementTask.build(pool.tables, pool.stats, Topology(DEVICES), batch_size=BATCH)


def _train(task: PlacementTask, reference: bool) -> float:
    """CPU seconds of a whole training."""
    started = time.process_time()
    Planner("dreamshard", seed=0, reference=reference).fit([task], _simulated())
    return time.process_time() - started


def _simulated() -> Callable[[PlacementTask, Sequence[ShardingPlan]], list[StepProfile]]:
    cluster = SimulatedCluster(seed=0)

    def measure(task: PlacementTask, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        return [cluster.profile(task.tables, task.stats, plan, task.batch_size) for plan in plans]

    return measure
