"""The arms of `bench race`: how each job is started, and its clock. Jobs of users are started as users start them.

    found = run_arm("loop", world, folder)          # {"points": [[s, step], ...], "seconds": ..., "moves": [...], ...}

Wall clock, from the process's start to the step that a line of metrics.jsonl names. Two kinds of job are started by
race_jobs.py: the clairvoyant's, whose moves are free of charge, and TorchRec's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dlrm_autoshard.autoshard.asked import memory_asked
from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.benchmarks.loop_job import profiling_seconds
from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.benchmarks.race_worlds import RANKS, World, WorldName
from dlrm_autoshard.config import parse_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.statistics import measure_stats
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.greedy import HEURISTICS
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import read_jsonl

ARMS = ("round_robin", "heuristic", "planned", "loop", "clairvoyant", "torchrec", "torchrec_our_plan")
Arms = Mapping[WorldName, Sequence[str]]
"""Which run in which world."""
Runs = Mapping[str, Mapping[int, Mapping[str, dict[str, Any]]]]
"""Results of jobs, by world, seed and arm."""
DECIDES_EVERY = 100
"""Steps, a quarter of an epoch: what changes is seen an interval late, and a whole one costs a fifth of the gain."""
PLANNING_SECONDS = 60.0
"""Seconds of planning for a clairvoyant's start. With the usual 20 a start beside a busy core had no time left to
measure what spares it."""
POLL_SECONDS, LIMIT_SECONDS = 0.1, 3600
REFUSED = 2
"""The status with which a command ends that says what is wrong with its settings."""


class Refused(BenchError):
    """A job that refuses what it is asked for, as round robin does where it overflows a rank; it would do so again."""


def missing_peer(arm: str) -> str | None:
    return find_torchrec() if arm.startswith("torchrec") else None


def run_arm(arm: str, world: World, folder: Path) -> dict[str, Any]:
    """Runs one job to its end. BenchError where it fails, with the last line it said."""
    data, run = folder / "data", folder / arm
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    ours: dict[str, dict[str, Any]] = {
        "round_robin": {"enabled": False, "placement": "round_robin"},
        "planned": {"enabled": True, "reshard": {"enabled": False}},
        "loop": {"enabled": True, "reshard": {"every_steps": DECIDES_EVERY}},
    }
    if arm == "heuristic":
        plan = best_heuristic(world, data)
        plan.save(run / "plan.json")
        ours[arm] = {"enabled": False, "placement": str(run / "plan.json")}
    if arm in ours:
        config = world.config(data, ours[arm])
        return clocked(start_of(config, run), world, run)
    schedule = clairvoyant_plans(world, folder)
    config = world.config(data, {"enabled": False, "placement": str(schedule[0])})
    return clocked(own_start(arm, config, run, schedule), world, run)


def start_of(config: dict[str, Any], run: Path) -> list[str]:
    """As users start it."""
    path = _written(config, run)
    return [sys.executable, "-m", "dlrm_autoshard", "train", str(path), "--ranks", str(RANKS)]


def own_start(arm: str, config: dict[str, Any], run: Path, schedule: Mapping[int, Path]) -> list[str]:
    """By torchrun, with the plans by epoch."""
    (run / "schedule.json").write_text(json.dumps({epoch: str(path) for epoch, path in schedule.items()}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}"]
    return [*torchrun, "-m", "dlrm_autoshard.benchmarks.race_jobs", arm, str(_written(config, run)), str(run)]


def _written(config: dict[str, Any], run: Path) -> Path:
    config["run"] |= {"dir": str(run), "name": "job"}
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def clocked(command: Sequence[str], world: World, run: Path) -> dict[str, Any]:
    """Runs the command and watches its records. In a straggler's busy epochs a process shares the last rank's core."""
    points: list[tuple[float, int]] = []
    built, busy, job = None, None, run / "job"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(run / "said.txt", "w") as said:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                now = time.monotonic() - started
                if now > LIMIT_SECONDS:
                    raise BenchError(f"{run.name} took more than {LIMIT_SECONDS} s.")
                if built is None and (job / "environment.json").exists():
                    built = now  # tables, plan and model are there; what is left is the first step
                step = last_step(job / "metrics.jsonl")
                if step > (points[-1][1] if points else 0):
                    points.append((round(now, 2), step))
                wanted = step // world.scale.steps in world.busy_epochs
                if wanted and busy is None:
                    busy = busy_beside(process.pid, RANKS - 1)
                elif busy is not None and not wanted:
                    _ended(busy)
                    busy = None
        finally:
            _ended(busy)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
    if process.returncode or not points or points[-1][1] < world.total_steps:
        lines = (run / "said.txt").read_text().strip().splitlines()
        told = next((line for line in lines if "Error" in line), lines[-1] if lines else "nothing said")
        failed = Refused if process.returncode == REFUSED else BenchError
        raise failed(f"{run.name} ended with status {process.returncode}: {told}")
    found = read_records(job)
    free = found.pop("free_seconds")
    points = [(at - sum(s for step, s in free if step <= reached), reached) for at, reached in points]
    shutil.rmtree(job / "checkpoints", ignore_errors=True)
    return {"points": points, "seconds": points[-1][0], "first_step_seconds": built or points[0][0], **found}


def last_step(metrics: Path) -> int:
    """0 before the first line is whole."""
    if not metrics.exists():
        return 0
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    steps = [json.loads(line).get("step", 0) for line in lines[-4:]]
    return max(steps, default=0)


def read_records(job: Path) -> dict[str, Any]:
    """Moves, and what resharding cost by item. free_seconds: of moves that are not to be charged."""
    decisions = read_jsonl(job / "decisions.jsonl")
    result = json.loads((job / "result.json").read_text()) if (job / "result.json").exists() else {}
    free = job / "free_seconds.json"
    kept = ("step", "action", "predicted_gain", "measured_gain", "text")
    return {
        "moves": [{key: d.get(key) for key in kept} for d in decisions if d["action"] in ("moved", "rolled_back")],
        "phases_seconds": result.get("seconds", {}),
        "profiling_seconds": profiling_seconds(map(IntervalProfile.from_json, read_jsonl(epochs_file(job)))),
        "deciding_seconds": sum(d["decide_seconds"] for d in decisions),
        "moving_seconds": sum(d["move_seconds"] for d in decisions),
        "free_seconds": json.loads(free.read_text()) if free.exists() else [],
    }


def busy_beside(pid: int, rank: int, *, elsewhere: bool = True) -> subprocess.Popen[bytes] | None:
    """A process that never rests, on that rank's core. elsewhere: on any, where the rank has none of its own yet."""
    import psutil

    cores = None
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if child.environ().get("LOCAL_RANK") == str(rank):
                cores = child.cpu_affinity()
                break
    if not elsewhere and (cores is None or len(cores) == len(os.sched_getaffinity(0))):
        return None
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    if cores:
        psutil.Process(busy.pid).cpu_affinity(cores)
    return busy


def _ended(busy: subprocess.Popen[bytes] | None) -> None:
    if busy is not None:
        busy.kill()
        busy.wait()


# Plans ----------------------------------------------------------------------------------------------------------------


def best_heuristic(world: World, data: Path) -> ShardingPlan:
    """By predicted cost, as someone would choose it who measures nothing; on the memory that a job is given."""
    config = parse_config(world.config(data, {}))
    stats = measure_stats(open_source(config.data, config.tables), world.global_batch, config.autoshard.stats_batches)
    topology = Topology(RANKS, memory_asked(config.autoshard, RANKS))
    task = PlacementTask.build(world.tables, stats, topology, batch_size=world.global_batch)
    return min((Planner(name).plan(task) for name in HEURISTICS), key=lambda result: result.predicted_ms).plan


def clairvoyant_plans(world: World, folder: Path) -> dict[int, Path]:
    """Epoch -> plan file: what a long job that starts then plans and measures for its data, and for the core that is
    shared. Made once for a world and seed."""
    plans = {epoch: folder / "plans" / f"epoch_{epoch}.json" for epoch in [0, *world.changes]}
    (folder / "plans").mkdir(exist_ok=True)
    for epoch, path in plans.items():
        if path.exists():
            continue
        as_at_first = world.name == "straggler" and epoch and epoch not in world.busy_epochs
        (ShardingPlan.load(plans[0]) if as_at_first else _plan_of_a_start(world, folder, epoch)).save(path)
    return plans


def _plan_of_a_start(world: World, folder: Path, epoch: int) -> ShardingPlan:
    """As `planned` starts, on the data from that epoch on; a job so long that measuring all that helps pays, with
    `PLANNING_SECONDS` for it: they are free of charge."""
    run = folder / "planning"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    settings = {"enabled": True, "budget_seconds": PLANNING_SECONDS, "reshard": {"enabled": False}}
    config = world.config(folder / "data", settings, first_phase=world.phase_of(epoch))
    config["checkpoint"] = {"enabled": False}
    config["train"] |= {"epochs": 1000 * world.scale.epochs, "max_steps": None}
    planned, busy = run / "job" / "plan" / "step_00000000.json", None
    with open(run / "said.txt", "w") as said:
        environment, started = os.environ | {"OMP_NUM_THREADS": "1"}, time.monotonic()
        process = subprocess.Popen(start_of(config, run), stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            while not planned.exists():
                time.sleep(POLL_SECONDS)
                if process.poll() is not None or time.monotonic() - started > LIMIT_SECONDS:
                    raise BenchError(f"the clairvoyant's planning for epoch {epoch} failed; see {run / 'said.txt'}.")
                if busy is None and epoch in world.busy_epochs:
                    busy = busy_beside(process.pid, RANKS - 1, elsewhere=False)
            return ShardingPlan.load(planned)
        finally:
            _ended(busy)
            process.send_signal(signal.SIGTERM)  # it ends after the step that it is in
            process.wait()
            shutil.rmtree(run / "job", ignore_errors=True)
