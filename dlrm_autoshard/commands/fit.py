"""`dlrm-autoshard fit`: fits the cost model and a policy to training tasks, for `plan` and `compare-planners`."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_autoshard.commands.arguments import add_devices, check_out, positive, seed, write_json
from dlrm_autoshard.commands.planning import STATE_FILE, topology_of
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.progress import progress


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("fit", help="fit cost model and policy to training tasks (DreamShard's training)")
    parser.add_argument("--tasks", type=Path, required=True, metavar="FILE", help="tasks.json of `tasks`")
    add_devices(parser)
    parser.add_argument(
        "--costs", choices=["measured", "simulated"], default="measured", help="measured: with fbgemm on this machine"
    )
    parser.add_argument(
        "--algorithm",
        choices=["dreamshard", "autoshard", "rnn"],
        default="dreamshard",
        help="whose policy; the fitted costs serve every algorithm; autoshard measures each placement that it tries",
    )
    parser.add_argument(
        "--iterations", type=positive, default=10, help="rounds: measure, fit costs, policy (default 10)"
    )
    parser.add_argument("--placements", type=positive, default=10, help="placements measured per round (default 10)")
    parser.add_argument(
        "--reference", action="store_true", help="DreamShard exactly as in Zha et al. 2022, for comparison with ours"
    )
    parser.add_argument("--cold", action="store_true", help="start from random weights instead of the shipped costs")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the fitted planner")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from dlrm_autoshard.planner.dreamshard.drawn_tasks import TaskSet
    from dlrm_autoshard.planner.dreamshard.settings import PUBLISHED, DreamShardSettings
    from dlrm_autoshard.planner.planner import Planner
    from dlrm_autoshard.planner.task import PlacementTask
    from dlrm_autoshard.probe.hardware import hardware_fingerprint
    from dlrm_autoshard.probe.measured import Costs
    from dlrm_autoshard.probe.shipped_costs import start_warm

    if arguments.reference and arguments.algorithm != "dreamshard":
        raise UserError(f"--reference is for --algorithm dreamshard; '{arguments.algorithm}' has no reference version.")
    check_out(arguments.out, folder=True)
    started = time.perf_counter()
    tasks = TaskSet.load(arguments.tasks)
    topology = topology_of(arguments.devices, arguments.memory_gib)
    budget = replace(
        PUBLISHED if arguments.reference else DreamShardSettings(),
        iterations=arguments.iterations,
        placements=arguments.placements,
    )
    torch.set_num_threads(1)  # as in ranks
    planner = Planner(arguments.algorithm, seed=arguments.seed, reference=arguments.reference, settings=budget)
    if arguments.costs == "measured" and not arguments.cold:  # shipped costs come from real machines
        start_warm(planner, hardware_fingerprint())
    costs = Costs(arguments.costs, planner.costs.exchange, arguments.seed)
    problems = [
        PlacementTask.build(task.tables, task.stats, topology, batch_size=tasks.batch_size) for task in tasks.train
    ]
    placements = 0
    with progress(f"{arguments.costs} placements", quiet=arguments.json) as at:

        def measured(done: int, total: int) -> None:
            nonlocal placements
            placements = done
            at(done, total)

        report = planner.fit(problems, costs.measure, progress=measured)
    seconds = time.perf_counter() - started
    write_json(arguments.out / STATE_FILE, planner.state_dict())
    summary = {
        "tasks": len(problems),
        "devices": arguments.devices,
        "costs": arguments.costs,
        "algorithm": arguments.algorithm,
        "placements": placements,
        "reference": arguments.reference,
        "shards": report.samples,
        "error_before": list(report.error_before),
        "error_after": list(report.error_after),
        "seconds": seconds,
        "out": str(arguments.out),
    }
    if arguments.json:
        print(json.dumps(summary, indent=1))
    else:
        print(
            f"{len(problems)} tasks on {arguments.devices} devices, {summary['placements']} {arguments.costs} "
            f"placements, {seconds:.0f} s: {arguments.out}"
        )
        if not arguments.reference:
            before, after = (
                " and ".join(f"{100 * error:.1f}%" for error in errors)
                for errors in (report.error_before, report.error_after)
            )
            print(
                f"error of forward and backward compute on these {report.samples} sets of tables: "
                f"{before} before, {after} after"
            )
    return 0
