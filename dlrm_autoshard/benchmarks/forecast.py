"""Forecasts real intervals under plans that were never tried, with all terms of the corrections and without some.

Two ranks train short jobs whose tables move to a random plan after each interval. The posterior forecasts each interval
from those before it, given its data: with terms left out it forecasts the same measurements, so a minute's noise says
nothing of the difference. Jobs are kept in runs/forecast, so other terms can be left out later without training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.autoshard.last_move import LastMove
from dlrm_autoshard.benchmarks.harness import BenchError, Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.loop_job import Job, settings, trainer_of
from dlrm_autoshard.benchmarks.paired import mean_with_interval, with_interval
from dlrm_autoshard.benchmarks.plans_interleaved import WORLD_SIZE
from dlrm_autoshard.benchmarks.slices import in_slices, origins
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.costs import StepProfile, step_cost_ms
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory, runtime_of
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.corrections.corrections import Corrections
from dlrm_autoshard.planner.corrections.terms import Spreads
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask

TITLE = "forecasts of real intervals under random plans: how far off, how sure, and what each term of them is worth"
ROUGH_TIME = "5 min"
INTERVALS, STEPS = 15, 40
TERMS = tuple(field.name for field in fields(Spreads))


@dataclass(frozen=True)
class Wander:
    """A job whose tables wander. tables: number of random ones; 0: W-emb's. changes: epochs whose data differ from the
    one before. busy: epochs in which a busy process shares the last rank's core. split: some tables by columns."""

    seed: int
    tables: int = 0
    dims: tuple[int, ...] = (64,)
    changes: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    split: bool = False

    def config(self, folder: Path, intervals: int) -> Config:
        draw = np.random.default_rng(self.seed)
        drift = [{"epoch": epoch, "permute_pooling": True, "move_hot_ids": True} for epoch in self.changes]
        pooling = [float(mean) for mean in draw.permutation(W_EMB.pooling)]
        made = settings(
            folder, epochs=intervals, steps_per_epoch=STEPS, pooling=pooling, drift=drift, enabled=True
        ).model_dump(mode="json")
        if self.tables:
            made["data"]["tables"] = [
                {
                    "name": f"t{number}",
                    "num_embeddings": int(10 ** draw.uniform(3.5, 5.7)),
                    "embedding_dim": int(draw.choice(self.dims)),
                    "mean_pooling": float(10 ** draw.uniform(0.0, 1.5)),
                    "alpha": float(draw.uniform(0.5, 1.4)),
                }
                for number in range(self.tables)
            ]
        made["tables"]["optimizer"]["per_part"] = self.split
        made["autoshard"]["reshard"]["on_change"] = False
        return parse_config(made)

    def wandered(self, plan: ShardingPlan, tables: Sequence[str], draw: np.random.Generator) -> ShardingPlan:
        """Returns a random other plan: in two of five cases of all tables, else of one in seven."""
        drawn, was_on = plan, dict[str, int](plan.rank_of)
        while drawn == plan:
            moved, rank_of = 1.0 if draw.random() < 0.4 else 0.15, dict[str, int]()
            for table in tables:
                if self.split and draw.random() < 0.2:
                    rank_of |= {f"{table}[{part}]": int(draw.integers(WORLD_SIZE)) for part in ("0:32", "32:64")}
                elif table not in was_on or draw.random() < moved:
                    rank_of[table] = int(draw.integers(WORLD_SIZE))
                else:
                    rank_of[table] = was_on[table]
            drawn = ShardingPlan(rank_of, WORLD_SIZE)
        return drawn


JOBS = {
    "26 tables": Wander(1),
    "26 tables, again": Wander(2),
    "8 tables": Wander(3, tables=8),
    "24 tables of four dims": Wander(4, tables=24, dims=(16, 32, 64, 128)),
    "48 tables of two dims": Wander(5, tables=48, dims=(16, 32)),
    "drifting data": Wander(6, changes=(5, 10)),
    "drifting data, again": Wander(7, changes=(4, 8, 12)),
    "a busy core": Wander(8, busy=tuple(range(5, 10))),
    "a busy core, again": Wander(9, busy=tuple(range(3, 12))),
    "split tables": Wander(10, split=True),
}


def run(quick: bool, without: Sequence[str] = ()) -> dict[str, Any]:
    if unknown := {name for group in without for name in group.split("+")}.difference(TERMS):
        raise BenchError(f"there is no term '{min(unknown)}'; there are {', '.join(TERMS)}.")
    intervals, kept = (4, None) if quick else (INTERVALS, Path("runs/forecast/jobs.jsonl"))
    rows = in_slices(kept, [(name, intervals) for name in (list(JOBS)[:1] if quick else JOBS)], measured)
    return {**summarise(rows, list(without) or TERMS), **origins(rows)}


def summarise(rows: Sequence[Mapping[str, Any]], groups: Sequence[str]) -> dict[str, Any]:
    """Returns figures and notes. rows: of `measured`, with the job's name in `of`. groups: terms to leave out, some
    together ('fused+load')."""
    found = Findings()
    found.notes = [
        "a step: the slowest rank's lookups, backward and exchanges; gain: of one random plan over the one before, "
        "where neither data nor ranks changed between",
        "z: how far gains were off, over what the posterior and the interval's own noise allow; 1 is right",
        "without a term: by how many points of the step gains were further off; below 0 they were nearer",
    ]
    of_all = [forecasts(row, JOBS[row["of"][0]]) for row in rows]
    for row, steps_N3 in zip(rows, of_all, strict=True):
        off_N = np.abs(steps_N3[np.isfinite(steps_N3[:, 1]), 1])
        found.put(f"{row['of'][0]}: gains off by, %", 100 * float(off_N.mean()))
    every_N3 = np.concatenate(of_all)
    gains_N3 = every_N3[np.isfinite(every_N3[:, 1])]
    found.put("steps off by, %", mean_with_interval(100 * np.abs(every_N3[:, 0])), digits=2)
    found.put("gains off by, %", mean_with_interval(100 * np.abs(gains_N3[:, 1])), digits=2)
    found.put("z", with_interval(lambda x: np.sqrt((x**2).mean(axis=-1)), gains_N3[:, 2]), "<= 1.5", digits=2)
    for group in groups:
        other_N3 = np.concatenate([forecasts(row, JOBS[row["of"][0]], group.split("+")) for row in rows])
        further_N = 100 * (np.abs(other_N3[:, 1]) - np.abs(every_N3[:, 1]))
        found.put(f"without {group}", mean_with_interval(further_N[np.isfinite(further_N)]), digits=2)
    return vars(found)


def forecasts(row: Mapping[str, Any], job: Wander, without: Sequence[str] = ()) -> np.ndarray:
    """Returns [N, 3] for each interval but the first: log(forecast / measured) step; by what part of the step the
    forecast gain over the interval before was off, and that over what was to be expected (nan: the plan was the same,
    or data or ranks had changed)."""
    planner, topology = Planner(), Topology(WORLD_SIZE)
    planner.costs.corrections = Corrections(replace(Spreads(), **dict.fromkeys(without, 0.0)))
    planner.load_state_dict(row["planner"])
    profiles = [StepProfile.from_json(record) for record in row["profiles"]]
    found = []
    for epoch, (before, after) in enumerate(pairwise(profiles), start=1):
        planner.costs.observe(before, topology)
        task = PlacementTask.build(after.tables, after.stats, topology, batch_size=after.batch_size)
        step_ms, was_ms = step_cost_ms(after.ranks), step_cost_ms(before.ranks)
        off = float(np.log(step_cost_ms(planner.predict(task, after.plan)) / step_ms))
        changed = epoch in job.changes or (epoch in job.busy) != (epoch - 1 in job.busy)
        if changed or before.plan == after.plan:
            found.append((off, np.nan, np.nan))
            continue
        saved_D = planner.saved(task, before.plan, [after.plan])[:, 0]
        gain = 1 - step_ms / was_ms
        noise = (1 - gain) * np.hypot(before.standard_error, after.standard_error)
        away = float(saved_D.mean()) - gain
        found.append((off, away, away / max(float(np.hypot(saved_D.std(), noise)), 1e-4)))
    return np.array(found)


def measured(name: str, intervals: int) -> dict[str, Any]:
    """Returns a job's planner as it started, and the profiles of its intervals."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = on_pinned_ranks(_rank, WORLD_SIZE, JOBS[name], folder, intervals, timeout=300.0)[0]
    return found


def _rank(rank: int, world_size: int, job: Wander, folder: str, intervals: int) -> dict[str, Any]:
    keep_freed_memory()
    world = dist.group.WORLD
    assert world is not None
    runtime, config = runtime_of(world, torch.device("cpu")), job.config(Path(folder), intervals)
    with trainer_of(Job("wandering", config, job.busy), runtime, Path(folder)) as trainer:
        resharding = trainer.job.intervals.resharding
        assert resharding is not None
        if resharding.controller is None:
            trainer.run()
            return {}
        wandering = resharding.controller = _Wandering(resharding.controller, job)
        start = wandering.planner.state_dict()
        trainer.run()
    return {"planner": start, "profiles": [profile.to_json() for profile in wandering.profiles]}


class _Wandering(Controller):
    """Moves tables to a random plan after each interval, whatever it saves."""

    def __init__(self, like: Controller, job: Wander) -> None:
        super().__init__(like.config, like.planner, like.task, like.bytes_of, like.log)
        self._job, self._draw = job, np.random.default_rng(job.seed)
        self.profiles: list[StepProfile] = []

    def decide(self, interval: Interval, plan: ShardingPlan) -> Decision:
        self.profiles.append(interval.profile)
        drawn = self._job.wandered(plan, tuple(self.bytes_of), self._draw)
        decision = Decision(
            interval.epoch, interval.step, "moved", predicted_gain=0.0, uncertainty=0.0, new_plan=drawn, old_plan=plan
        )
        self._pending = LastMove(decision, interval.timed, early=False)
        return decision
